# SPDX-License-Identifier: Apache-2.0
"""``stop.afterNonces`` and ``stop.afterValid``: how far each slot may go, so that the round hardly overshoots.

Between two polls a pod computes thousands of nonces. So what is left to do is dealt out in allowances of some
seconds' work, and a pod that reaches the end of its allowance waits for the next.

What was dealt to a slot that gets nowhere, as of a silent pod, is kept for it while others work. Once these have done
their part and nobody has worked for some time, they get it. So the round may overshoot by what such a pod delivers in
the end, and does not wait for it without limit. It waits for pods that somebody has paused, and for results that wait
for their receiver.

In the decode scheme a pod computes what it may, up to some number of chains, as one batch, and a small batch takes as
long as a large one. Its index moves at the end of a batch alone. So there is always another whole batch to follow.
"""

import math
from collections.abc import Sequence

from poc_operator.apis.v1alpha1.round import Assignment, RoundStatus, Stop
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.planning.snapshot import ExtendPod
from poc_operator.rounds.counters import is_doubted, is_settled, settled_nonces
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from vllm_poc.wire.answers import StatusResponse
from vllm_poc.wire.messages import ExtendRequest, Protocol
from vllm_poc.wire.partition import MAX_NONCE

#: An allowance is worth so many seconds of its pod; another one is dealt when half of it is done. Several polls fit in.
ALLOWANCE_SECONDS = 20.0

#: The first allowance, before the pod's rate is known, and the least one, in batches.
FIRST_BATCHES = 16
LEAST_BATCHES = 2

#: Batches of chains that a pod may always compute: the one that may be under way, and a whole one after it.
CHAIN_BATCHES = 2
#: The same before a pod's first batch is done: two of the largest that the network's hardware computes.
FIRST_CHAINS = 4_096


def grant(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Deal allowances to the slots that need one, as long as there is something left."""
    stop, slots = snapshot.round.spec.stop, step.status.assignments
    if step.status.stop_time or stop is None or stop.after_seconds is not None:
        return step
    if stop.after_nonces is not None and nobody_works(snapshot, step.status):
        slots = _with_rest(snapshot, slots, stop.after_nonces)
    needy, left = [slot for slot in slots if _needs_more(snapshot, slot)], _left(snapshot, stop, slots)
    if not left and stop.after_valid is not None:
        # How many of the nonces under way are valid nobody knows. Who has none under way may try a batch.
        needy = [slot for slot in needy if not _underway(snapshot, slot)]
        left = len(needy) * snapshot.round.spec.batch_size
    allowances = dict[tuple[int, int], int]()
    for waiting, slot in zip(range(len(needy), 0, -1), needy, strict=True):
        allowance = min(_wanted(snapshot, slot) - _ahead(slot), math.ceil(left / waiting))
        allowances[slot.node, slot.group] = allowance
        left -= allowance
    return step.extended(assignments=[_extended(slot, allowances.get((slot.node, slot.group))) for slot in slots])


def waits_for_more(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the slot's pod has computed and delivered all that it may, by its own word, and the gateway was asked."""
    if slot.state is not SlotState.RUNNING or slot.end is None or not is_settled(snapshot, slot):
        return False
    return _told_delivered(snapshot, slot) >= slot.next >= slot.end


def nobody_works(snapshot: RoundSnapshot, status: RoundStatus) -> bool:
    """Whether no pod has got on for as long as one may get nothing done, with time left to do it."""
    spec, since = snapshot.round.spec, status.idle_time
    patience = min(spec.stall.after_seconds, spec.start_deadline_seconds // 2)
    return since is not None and snapshot.seconds_since(since) >= patience


def _with_rest(snapshot: RoundSnapshot, slots: Sequence[Assignment], after_nonces: int) -> list[Assignment]:
    """Return the slots after those that wait for more got what is not delivered: all of it, so that they wait once."""
    waiting = [slot for slot in slots if waits_for_more(snapshot, slot) and not is_doubted(slot)]
    left = max(0, after_nonces - sum(settled_nonces(snapshot.round, slot) for slot in slots))
    shares = {(slot.node, slot.group): math.ceil(left / len(waiting)) for slot in waiting}
    return [_extended(slot, shares.get((slot.node, slot.group))) for slot in slots]


def extend_pods(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Tell the pods whose slots may go further than they know."""
    if step.status.stop_time:
        return step
    extensions = [
        ExtendPod(pod=pod, request=ExtendRequest(round_id=snapshot.round.id, end_index=slot.end))
        for slot in step.status.assignments
        if slot.state is SlotState.RUNNING and slot.end is not None and _knows_less(snapshot, slot, slot.end)
        if (pod := snapshot.pod_of(slot)) is not None
    ]
    return step.extended(actions=extensions)


def _knows_less(snapshot: RoundSnapshot, slot: Assignment, end: int) -> bool:
    status = _told(snapshot, slot)
    known = status.end_index if status is not None else None
    return known is not None and known < end


def _told(snapshot: RoundSnapshot, slot: Assignment) -> StatusResponse | None:
    """Return what the slot's pod tells of this work; None if it tells nothing, or of other work."""
    status = snapshot.report_of(slot).status
    return status if status is not None and status.session_id == slot.session else None


def _needs_more(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    # Pods that cannot resume know nothing of allowances either.
    dealt = slot.state in (SlotState.STARTING, SlotState.RUNNING) and snapshot.report_of(slot).resumes
    if not dealt or slot.end is None:
        return dealt
    ahead = _ahead(slot)
    return 2 * ahead < _wanted(snapshot, slot) or ahead < _chains(snapshot, slot)


def _ahead(slot: Assignment) -> int:
    """Return how many nonces the slot's pod may still compute."""
    return max(0, (slot.end or 0) - slot.next)


def _dealt(slot: Assignment) -> int:
    """Return how many nonces of the slot are settled or may come: of one that nobody computes no more come."""
    return slot.next + _ahead(slot) if slot.state.active else slot.delivered


def _underway(snapshot: RoundSnapshot, slot: Assignment) -> int:
    """Return how many nonces are not computed or not delivered yet, of those that were dealt.

    By the pod's own word, also where the gateway lacks some: these do not come any more.
    """
    return max(0, _dealt(slot) - _told_delivered(snapshot, slot))


def _told_delivered(snapshot: RoundSnapshot, slot: Assignment) -> int:
    """Return up to which index the slot is delivered, as far as anybody says."""
    status = _told(snapshot, slot)
    return max(slot.delivered, status.delivered_index if status is not None else 0)


def _wanted(snapshot: RoundSnapshot, slot: Assignment) -> int:
    batch, rate = snapshot.round.spec.batch_size, snapshot.rate_of(slot)
    if slot.state is not SlotState.RUNNING or not rate:
        return max(FIRST_BATCHES * batch, _chains(snapshot, slot))
    return max(LEAST_BATCHES * batch, math.ceil(ALLOWANCE_SECONDS * rate), _chains(snapshot, slot))


def _chains(snapshot: RoundSnapshot, slot: Assignment) -> int:
    """Return how many nonces the slot's pod may always compute, so that none of its batches of chains is small.

    Until its first batch is done, nothing tells how large its batches are.
    """
    if snapshot.round.spec.protocol is not Protocol.DECODE:
        return 0
    return CHAIN_BATCHES * snapshot.report_of(slot).batch_nonces or FIRST_CHAINS


def _left(snapshot: RoundSnapshot, stop: Stop, slots: Sequence[Assignment]) -> int:
    """Return how many nonces may still be dealt out."""
    if stop.after_nonces is not None:
        dealt = (max(_dealt(slot), settled_nonces(snapshot.round, slot)) for slot in slots)
        return max(0, stop.after_nonces - sum(dealt))
    valid, delivered = sum(slot.valid for slot in slots), sum(slot.delivered for slot in slots)
    needed = math.ceil(max(0, (stop.after_valid or 0) - valid) * (delivered + 1) / (valid + 1))
    return max(0, needed - sum(_underway(snapshot, slot) for slot in slots))


def _extended(slot: Assignment, allowance: int | None) -> Assignment:
    if allowance is None:
        return slot
    return slot.model_copy(update={"end": min(slot.next + _ahead(slot) + allowance, MAX_NONCE)})
