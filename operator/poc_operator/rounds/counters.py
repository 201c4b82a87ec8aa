# SPDX-License-Identifier: Apache-2.0
"""Whose numbers count: the pod's, if they can be true, and the gateway's, which knows more than pods do.

What cannot be true is not counted, so that totals go back only where the gateway has lost results. Pods may die before
they could tell what they have delivered; the gateway has it. And what a pod says to be delivered counts as far as the
gateway has it.

A pod counts a result as delivered when the gateway has stored it. So everything that a pod had told before the gateway
was asked must be in the answer: what is not was never delivered, and the pod is named. What it told since may be on its
way, and waits for the next answer, `poc_operator.controller.observing.ASK_SECONDS` later.
"""

from collections.abc import Mapping
from datetime import timedelta

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.planning.snapshot import WorkEvent
from poc_operator.rounds.snapshot import RoundSnapshot
from vllm_poc.wire.answers import StatusResponse
from vllm_poc.wire.messages import Protocol


def contradiction(
    slot: Assignment, status: StatusResponse, capacity: int, *, reach: int, settled_before: int | None = None
) -> str | None:
    """Return what is wrong with the counters of the slot's pod; None if they can be true.

    ``reach`` is the first index of a slot that no pods can have computed yet. Below ``settled_before`` the record is
    the gateway's, which may know more than the pod does.
    """
    order = (status.start_index, status.delivered_index, status.next_index, capacity)
    if list(order) != sorted(order):
        return "start_index {}, delivered_index {}, next_index {} of {} nonces are out of order".format(*order)
    if status.next_index > max(reach, slot.next):
        return f"next_index {status.next_index} is more than the {reach} nonces that pods can have computed by now"
    delivered = status.delivered_index - status.start_index
    if status.delivered_valid + status.delivered_rejected > delivered:
        counts = f"{status.delivered_valid} valid and {status.delivered_rejected} rejected"
        return f"{counts} nonces of {delivered} delivered ones are too many"
    return _fall(slot, status, settled_before)


def _fall(slot: Assignment, status: StatusResponse, settled_before: int | None) -> str | None:
    from_pods = settled_before is None
    index = settled_before or 0
    counters = (
        (from_pods or slot.next > index, "next_index", slot.next, status.next_index),
        (from_pods or slot.delivered > index, "delivered_index", slot.delivered, status.delivered_index),
        (from_pods, "delivered_valid", slot.valid - slot.valid_before, status.delivered_valid),
        (True, "delivered_rejected", slot.rejected - slot.rejected_before, status.delivered_rejected),
    )
    falls = (f"{name} falls from {before} to {now}" for told, name, before, now in counters if told and now < before)
    return next(falls, None)


def doubt(slot: Assignment, why: str) -> tuple[Assignment, WorkEvent | None]:
    """Return the slot with its counters as they were, and the Event that tells the user, once."""
    error = f"{_mark(slot)}: {why}"
    doubted = slot.model_copy(update={"error": error})
    if is_doubted(slot):
        return doubted, None
    return doubted, WorkEvent.warn_of(slot, Reason.REPORT_CONTRADICTORY, error)


def is_doubted(slot: Assignment) -> bool:
    """Whether the counters of the slot's pod were not believed when they were last seen."""
    return slot.error is not None and slot.error.startswith(_mark(slot))


def _mark(slot: Assignment) -> str:
    return f"pod {slot.pod} is not believed"


#: So long the gateway is waited for where its answer matters; then the round goes on with what is known.
PATIENCE = timedelta(seconds=5)


def counted(snapshot: RoundSnapshot, slot: Assignment) -> Assignment:
    """Return the slot with what the gateway has of it.

    A pod that cannot resume does not know what it has delivered: there the gateway's count stands alone, also if it
    has nothing yet. The answer may be a moment older than another pod's report, so of those two the larger count is
    true.
    """
    stored = snapshot.collected_of(slot)
    resumes = snapshot.report_of(slot).resumes
    if stored is None:
        nothing = not resumes and snapshot.gateway_answered and not snapshot.gateway_contradicts(slot)
        return slot.model_copy(update={"delivered": 0, "valid": 0}) if nothing else slot
    told = (slot.delivered, slot.valid) if resumes else (0, 0)
    delivered = max(told[0], stored.delivered_index)
    return slot.model_copy(
        update={
            "delivered": delivered,
            "next": max(slot.next, delivered),
            "valid": max(told[1], stored.stored),
        }
    )


def settled_nonces(round_: PoCRound, slot: Assignment) -> int:
    """Return how many of the slot's nonces are settled.

    Of chains also those behind a gap: reference pods leave out what has a step that is not finite, and do not say so.
    """
    return max(slot.delivered, slot.valid) if round_.spec.protocol is Protocol.DECODE else slot.delivered


def with_losses(snapshot: RoundSnapshot, slot: Assignment) -> Assignment:
    """Return the slot with what is left of it in a gateway that has lost results: it goes on from there."""
    stored, end = _stored(snapshot, slot)
    is_distance = snapshot.round.spec.protocol is Protocol.DISTANCE
    left = min(slot.delivered, end if is_distance else stored + slot.rejected)
    counts = {"delivered": left, "valid": min(slot.valid, stored)}
    if slot.state in (SlotState.WAITING, SlotState.STARTING):
        counts |= {"start": left, "next": left, "valid_before": counts["valid"], "rejected_before": slot.rejected}
    return slot.model_copy(update=counts)


def told_counts(snapshot: RoundSnapshot, slot: Assignment, status: StatusResponse) -> Mapping[str, int]:
    """Return the slot's counts of what is delivered, after the report of a pod that knows them.

    While the gateway answers, the pod's numbers count as far as it has the results; `counted` adds those of its own.
    """
    rejected = slot.rejected_before + status.delivered_rejected
    if snapshot.gateway_answers and not snapshot.gateway_contradicts(slot):
        confirmed = _confirmed(snapshot, slot, status, rejected)
        # Those above what is confirmed may be computed, and rejected, once more by the next pod.
        counted_rejected = rejected if confirmed >= status.delivered_index else slot.rejected
        return {"delivered": max(slot.delivered, confirmed), "rejected": counted_rejected}
    if undelivered(snapshot, slot) is not None:
        return {}
    return {
        "delivered": max(slot.delivered, status.delivered_index),
        "valid": max(slot.valid, slot.valid_before + status.delivered_valid),
        "rejected": rejected,
    }


def undelivered(snapshot: RoundSnapshot, slot: Assignment) -> str | None:
    """Return what the slot's pod told of delivered results before the gateway was asked, if it has fewer; else None."""
    status = snapshot.heard_of(slot)
    if status is None or not snapshot.report_of(slot).resumes or snapshot.gateway_contradicts(slot):
        return None
    is_of_slot = _is_of(snapshot, slot, status) and status.start_index == slot.start
    return _lack(snapshot, slot, status) if is_of_slot else None


def is_settled(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the gateway was asked since the slot's pod told what it has delivered, or does not answer."""
    report, heard = snapshot.report_of(slot), snapshot.heard_of(slot)
    status = report.status
    if status is None or not report.resumes or not snapshot.gateway_answers:
        return True
    if not _is_of(snapshot, slot, status):
        return True
    if heard is not None and heard.session_id == status.session_id and heard.delivered_index >= status.delivered_index:
        return True
    return status.delivered_index <= slot.delivered


def _is_of(snapshot: RoundSnapshot, slot: Assignment, status: StatusResponse) -> bool:
    """Whether a report is of the work that the slot's pod was given: the same process may have had another slot."""
    return names_slot(status, slot) and (status.round_id, status.session_id) == (snapshot.round.id, slot.session)


def names_slot(status: StatusResponse, slot: Assignment) -> bool:
    """Whether a report names this slot, or none."""
    config = status.config
    return config is None or (config.node_id, config.group_id) == (slot.node, slot.group)


def _confirmed(snapshot: RoundSnapshot, slot: Assignment, status: StatusResponse, rejected: int) -> int:
    """Return up to which index the pod's deliveries are confirmed by what the gateway has."""
    if snapshot.round.spec.protocol is not Protocol.DISTANCE:  # every nonce has a result, unless it is rejected
        return min(status.delivered_index, _stored(snapshot, slot)[0] + rejected)
    return status.delivered_index if _lack(snapshot, slot, status) is None else 0


def _lack(snapshot: RoundSnapshot, slot: Assignment, status: StatusResponse) -> str | None:
    """Return what the gateway's answer lacks of what the pod says; None if it may have everything.

    Which nonces of a distance round are valid, the pod alone knows. But it delivers each once, none below its start.
    """
    stored, end = _stored(snapshot, slot)
    results, start = status.delivered_valid, status.start_index
    if snapshot.round.spec.protocol is not Protocol.DISTANCE:
        results = max(results, status.delivered_index - start - status.delivered_rejected)
    if not results or (results <= stored and start + results <= end):
        return None
    has = f"{stored} of the slot, the last at index {end - 1}" if stored else "none of the slot"
    return f"it says that {results} results from index {start} on are delivered, and the gateway has {has}"


def _stored(snapshot: RoundSnapshot, slot: Assignment) -> tuple[int, int]:
    """Return how many results of the slot the gateway has, and the index after the last of them."""
    stored = snapshot.collected_of(slot)
    if stored is None or stored.last_nonce < 0:
        return 0, 0
    return stored.stored, snapshot.partition_of(slot).index(stored.last_nonce) + 1


def settled_before(snapshot: RoundSnapshot, slot: Assignment, capacity: int) -> int | None:
    """Return the index below which a pod may report less than is recorded, since the gateway told it.

    None without a gateway. What was recorded before the gateway's first answer may all be from it.
    """
    if snapshot.gateway is None:
        return None
    stored = snapshot.collected_of(slot)
    return stored.delivered_index if stored is not None else capacity
