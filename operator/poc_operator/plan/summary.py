# SPDX-License-Identifier: Apache-2.0
"""What a person reads: totals, the state's one word, and how many pods are done."""

from poc_operator.model.conditions import Reason
from poc_operator.model.status import Assignment, RoundState, RoundStatus, SlotState, Totals
from poc_operator.plan.snapshot import RoundEvent, Snapshot, Step


def totals(snapshot: Snapshot, assignments: list[Assignment]) -> Totals:
    """Sum up the slots; the rate is that of the pods which compute now."""
    running = [snapshot.report_of(slot).status for slot in assignments if slot.state is SlotState.RUNNING]
    return Totals(
        checked=sum(slot.next for slot in assignments),
        valid=sum(slot.valid for slot in assignments),
        delivered=sum(slot.delivered for slot in assignments),
        rejected=sum(slot.rejected for slot in assignments),
        reissues=sum(max(0, slot.attempts - 1) for slot in assignments),
        rate=f"{sum(status.rate_per_second for status in running if status):.1f}",
    )


def _state(status: RoundStatus) -> RoundState:
    if status.outcome is not None:
        return status.outcome.type if status.completion_time is not None else RoundState.STOPPING
    if status.stop_time is not None:
        active = any(slot.state.active for slot in status.assignments)
        return RoundState.SUSPENDING if active else RoundState.SUSPENDED
    return RoundState.RUNNING if status.start_time is not None else RoundState.PENDING


def _poll_failed(snapshot: Snapshot, assignments: list[Assignment]) -> bool:
    """Whether pods work on the round and none of them answers."""
    active = [slot for slot in assignments if slot.state.active]
    return bool(active) and all(snapshot.report_of(slot).status is None for slot in active)


def note_times(snapshot: Snapshot, step: Step) -> Step:
    """Record when the first pod confirmed its start, and since when no pod has answered."""
    status, events = step.status, list[RoundEvent]()
    started = any(slot.state is SlotState.RUNNING for slot in status.assignments)
    start_time = status.start_time
    if started and start_time is None:
        start_time = snapshot.now
        events.append(RoundEvent(reason=Reason.STARTED, message=f"{len(status.assignments)} slots of {status.slots}"))
    failing = _poll_failed(snapshot, status.assignments)
    failing_since = (status.poll_failure_time or snapshot.now) if failing else None
    return step.extended(start_time=start_time, poll_failure_time=failing_since, events=events)


def summarise(snapshot: Snapshot, step: Step) -> Step:
    """Fill in what ``kubectl get`` shows."""
    slots = step.status.assignments
    done = sum(slot.state is SlotState.DONE for slot in slots)
    return step.extended(
        observed_generation=snapshot.round.metadata.generation,
        totals=totals(snapshot, slots),
        pods=f"{done}/{sum(slot.pod is not None for slot in slots)}",
        state=_state(step.status),
    )
