# SPDX-License-Identifier: Apache-2.0
"""What a person reads: totals, the state's one word, and how many pods are done."""

from collections.abc import Sequence

from poc_operator.model.conditions import Reason
from poc_operator.model.status import Assignment, RoundState, RoundStatus, Sample, Share, SlotState, Totals
from poc_operator.plan.snapshot import RoundEvent, Snapshot, Step


def _sample_totals(samples: list[Sample]) -> Totals:
    done = [sample for sample in samples if sample.state is SlotState.DONE]
    checked = sum(sample.count for sample in done)
    rejected = sum(len(sample.not_computed) for sample in done)
    return Totals(
        checked=checked,
        valid=checked - rejected - sum(len(sample.mismatches) for sample in done),
        delivered=checked,
        rejected=rejected,
        reissues=sum(max(0, sample.attempts - 1) for sample in samples),
    )


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
        active = any(share.state.active for share in status.shares)
        return RoundState.SUSPENDING if active else RoundState.SUSPENDED
    return RoundState.RUNNING if status.start_time is not None else RoundState.PENDING


def _poll_failed(snapshot: Snapshot, shares: Sequence[Share]) -> bool:
    """Whether pods work on the round and none of them answers."""
    active = [share for share in shares if share.state.active]
    return bool(active) and all(snapshot.report_of(share).status is None for share in active)


def note_times(snapshot: Snapshot, step: Step) -> Step:
    """Record when the first pod confirmed its start, and since when no pod has answered."""
    status, events = step.status, list[RoundEvent]()
    started = any(share.state is SlotState.RUNNING for share in status.shares)
    start_time = status.start_time
    if started and start_time is None:
        start_time = snapshot.now
        events.append(RoundEvent(reason=Reason.STARTED, message=_extent(status)))
    failing = _poll_failed(snapshot, status.shares)
    failing_since = (status.poll_failure_time or snapshot.now) if failing else None
    return step.extended(start_time=start_time, poll_failure_time=failing_since, events=events)


def _extent(status: RoundStatus) -> str:
    if status.samples:
        return f"{sum(sample.count for sample in status.samples)} nonces in {len(status.samples)} samples"
    return f"{len(status.assignments)} slots of {status.slots}"


def summarise(snapshot: Snapshot, step: Step) -> Step:
    """Fill in what ``kubectl get`` shows."""
    status = step.status
    done = sum(share.state is SlotState.DONE for share in status.shares)
    return step.extended(
        observed_generation=snapshot.round.metadata.generation,
        totals=_sample_totals(status.samples) if status.samples else totals(snapshot, status.assignments),
        pods=f"{done}/{sum(share.pod is not None for share in status.shares)}",
        state=_state(step.status),
    )
