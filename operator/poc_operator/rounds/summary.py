# SPDX-License-Identifier: Apache-2.0
"""What a person reads of a round: totals, the state's one word, and what is lost, missing or in doubt."""

from collections.abc import Callable, Sequence

from poc_operator.model.conditions import Reason
from poc_operator.model.status import Assignment, RoundState, RoundStatus, Sample, Share, SlotState, Totals
from poc_operator.rounds.cross_check import describe
from poc_operator.rounds.snapshot import RoundEvent, Snapshot, Step


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


Verdict = tuple[bool, Reason, str]

Finding = tuple[Reason, str]

#: So many slots are named in a message.
_NAMED = 3


def _failed(_: Snapshot, status: RoundStatus) -> Finding | None:
    failed = [share for share in status.shares if share.state is SlotState.FAILED]
    if not failed:
        return None
    return Reason.SLOTS_FAILED, f"{len(failed)} slots were given up, the first: {failed[0].error}"


def _stalled(_: Snapshot, status: RoundStatus) -> Finding | None:
    stalled = [slot for slot in status.assignments if slot.state is SlotState.STALLED]
    if not stalled:
        return None
    return Reason.SLOTS_STALLED, f"{len(stalled)} slots get nothing done, the first: {stalled[0].error}"


def _pods_disagree(_: Snapshot, status: RoundStatus) -> Finding | None:
    check = status.cross_check
    return (Reason.PODS_DISAGREE, describe(check)) if check is not None and check.deviating else None


def _conflicts(snapshot: Snapshot, status: RoundStatus) -> Finding | None:
    found = [(slot, stored.conflicts) for slot in status.assignments if (stored := snapshot.collected_of(slot))]
    named = [f"node {slot.node} group {slot.group} (pod {slot.pod}: {count})" for slot, count in found if count]
    if not named:
        return None
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    slots = f"{', '.join(named[:_NAMED])}{more}"
    return Reason.RESULTS_CONFLICT, f"results came twice and differ: {slots}; the first ones are kept"


def _gateway_unreachable(snapshot: Snapshot, _: RoundStatus) -> Finding | None:
    gateway = snapshot.gateway
    if gateway is None or gateway.error is None:
        return None
    return (
        Reason.GATEWAY_UNREACHABLE,
        f"{gateway.error}; pods compute on and deliver later, counts come from them alone",
    )


def _undelivered(snapshot: Snapshot, status: RoundStatus) -> Finding | None:
    missing = sum(slot.next - slot.delivered for slot in status.assignments)
    if not missing or any(slot.state.active for slot in status.assignments):
        return None
    receiver = "spec.callbackURL" if snapshot.gateway is None else "the gateway"
    return Reason.DELIVERY_INCOMPLETE, f"{missing} computed nonces were not delivered to {receiver}"


def _rejected(_: Snapshot, status: RoundStatus) -> Finding | None:
    rejected = status.totals.rejected
    return (Reason.RESULTS_REJECTED, f"{rejected} nonces had no finite result or were refused") if rejected else None


def _theory_disagrees(_: Snapshot, status: RoundStatus) -> Finding | None:
    found = status.calibration
    if found is None or found.agrees:
        return None
    theory = f"by theory rTarget {found.r_target} makes {found.theory_rate} valid"
    return Reason.THEORY_DISAGREES, f"{theory}, measured is {found.valid_rate}"


def _waiting(_: Snapshot, status: RoundStatus) -> Finding | None:
    waiting = [slot for slot in status.assignments if slot.state is SlotState.WAITING]
    if not waiting or status.start_time is None:
        return None
    return Reason.SLOTS_WAITING, f"{len(waiting)} of {len(status.assignments)} slots wait for a free, ready pod"


RULES: tuple[Callable[[Snapshot, RoundStatus], Finding | None], ...] = (
    _failed,
    _stalled,
    _pods_disagree,
    _conflicts,
    _gateway_unreachable,
    _undelivered,
    _rejected,
    _theory_disagrees,
    _waiting,
)


def degraded(snapshot: Snapshot, status: RoundStatus) -> Verdict:
    """Return the condition Degraded."""
    finding = next((found for rule in RULES if (found := rule(snapshot, status))), None)
    return (True, *finding) if finding else (False, Reason.ALL_SLOTS_WORK, "no slot is lost")
