# SPDX-License-Identifier: Apache-2.0
"""The queue of rounds for pods: who gets a pod that falls free, and who may take one from another round.

There is one order of all rounds, and everything follows it, so no two rounds ever take turns with a pod:

1. the higher ``spec.priority``;
2. of the same priority, rounds with ``concurrencyPolicy: Replace``, the higher block first;
3. then the older round.

A round with Replace stops work that it may replace without waiting for rounds that would not.
A round that another one may replace always stands behind it. Foreign work, which is no round of this namespace, stands
in no queue: it is known by what its pod says, and has priority 0.

Validations and calibrations stand in no queue: they ask any pod that computes no round, also one that a round waits
for. They keep no pod from a round: it takes the pod, and the request is withdrawn.
"""

from collections.abc import Callable, Iterable, Sequence

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.apis.v1alpha1.work import ConcurrencyPolicy
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.snapshot import OtherRound, Place, Snapshot, Work


def place_of(round_: PoCRound) -> Place:
    """Return where the round stands in the queue."""
    spec, metadata = round_.spec, round_.metadata
    replaces = spec.concurrency_policy is ConcurrencyPolicy.REPLACE
    newest_first = -spec.block_height if replaces else 0
    return -spec.priority, 0 if replaces else 1, newest_first, metadata.creation_timestamp, metadata.name


def full_name(round_: PoCRound) -> str:
    """Return namespace and name, as pods and users are told them."""
    return f"{round_.metadata.namespace}/{round_.metadata.name}"


def as_other(
    round_: PoCRound, status: RoundStatus, usable: Callable[[], Iterable[PodView]], *, blocked: bool
) -> OtherRound:
    """Return what the other rounds must know of this one. ``usable`` returns pods that can do its work, busy or not."""
    slots, spec = status.assignments, round_.spec
    waiting = sum(slot.state is SlotState.WAITING for slot in slots)
    asks = not (blocked or spec.suspend or status.stop_time is not None or status.state.finished)
    wanted = frozenset(pod.uid for pod in usable()) if asks and (waiting or not slots) else frozenset()
    return OtherRound(
        id=round_.id,
        name=full_name(round_),
        place=place_of(round_),
        priority=spec.priority,
        replaces=spec.concurrency_policy is ConcurrencyPolicy.REPLACE,
        block=(spec.block_hash, spec.block_height, spec.public_key),
        held=frozenset(slot.uid for slot in slots if slot.state.active and slot.uid is not None),
        wanted=wanted,
        needs=waiting if slots else len(wanted),
    )


def other_round(snapshot: Snapshot[Work], report: PodReport) -> OtherRound | None:
    """Return the other round of the namespace that the pod computes; None if it computes none of them."""
    status, others = report.status, snapshot.other_rounds or ()
    if status is None:
        return None
    if status.round_id is not None or status.config is None:
        return next((other for other in others if other.id == status.round_id), None)
    # Pods that do not know rounds say what they compute.
    block = (status.config.block_hash, status.config.block_height, status.config.public_key)
    return next((other for other in others if other.block == block), None)


def taken_over(snapshot: Snapshot[PoCRound], slot: Assignment) -> OtherRound | None:
    """Return the round that goes before this one and has given a slot to the slot's pod; None if there is none."""
    place = place_of(snapshot.work)
    return next(
        (other for other in snapshot.other_rounds or () if slot.uid in other.held and other.place < place), None
    )


def may_take(snapshot: Snapshot[Work], other: OtherRound) -> bool:
    """Whether this work may stop that of another round."""
    work = snapshot.work
    if not isinstance(work, PoCRound) or work.spec.concurrency_policy is not ConcurrencyPolicy.REPLACE:
        return False
    return (work.spec.priority, work.spec.block_height) > (other.priority, other.block[1])


def in_turn(snapshot: Snapshot[Work], idle: Sequence[PodView], busy: Sequence[PodView] = ()) -> list[PodView]:
    """Return the pods that this work may have now: no other round holds them or goes before it.

    ``busy`` are pods whose work this round may replace. Rounds that wait for work to end do not keep it from them.
    """
    work = snapshot.work
    if not (idle or busy) or snapshot.other_rounds is None:
        return []
    held = frozenset[str]().union(*(other.held for other in snapshot.other_rounds if not may_take(snapshot, other)))
    left = [pod for pod in (*idle, *busy) if pod.uid not in held]
    if not isinstance(work, PoCRound):
        return left
    place = place_of(work)
    waited_for = {pod.uid for pod in idle}
    for other in sorted(snapshot.other_rounds, key=lambda other: other.place):
        if other.place < place:
            wanted = other.wanted if other.replaces else other.wanted & waited_for
            theirs = [pod.uid for pod in left if pod.uid in wanted][: other.needs]
            left = [pod for pod in left if pod.uid not in theirs]
    return left


def first_in_line(snapshot: Snapshot[Work], idle: Iterable[PodView]) -> OtherRound | None:
    """Return the first of the rounds that keep these pods from this work; None if there is none."""
    work, uids = snapshot.work, {pod.uid for pod in idle}
    place = place_of(work) if isinstance(work, PoCRound) else None
    ahead = [
        other
        for other in snapshot.other_rounds or ()
        if uids & other.held or (place is not None and other.place < place and other.needs and uids & other.wanted)
    ]
    return min(ahead, key=lambda other: other.place, default=None)
