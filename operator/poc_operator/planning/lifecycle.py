# SPDX-License-Identifier: Apache-2.0
"""The life of an object of any kind: its clocks, ``spec.suspend``, its deadlines, its end, its time to live.

A deletion is an end as any other: the pods are stopped, and the object is released once it is finished. Of the rules
of an end the first with an answer wins. An outcome is recorded before any pod is told to stop.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.status import Outcome, Result, SlotState, State, WorkStatus
from poc_operator.apis.v1alpha1.work import ConcurrencyPolicy
from poc_operator.planning.eligibility import busy_pods, loading_seconds, loads
from poc_operator.planning.snapshot import DeleteWork, Snapshot, StatusT, Step, Work, WorkEvent
from poc_operator.planning.waiting import holders, is_queued

StepT = TypeVar("StepT", bound=Step[Any])
SnapshotT = TypeVar("SnapshotT", bound=Snapshot[Any])
EndRule = Callable[[SnapshotT, StatusT], Outcome | None]


def complete(message: str, reason: Reason = Reason.COMPLETED) -> Outcome:
    """The outcome of work that has reached what it was made for."""
    return Outcome(type=Result.COMPLETE, reason=reason, message=message)


def failed(reason: Reason, message: str) -> Outcome:
    """The outcome of work that never will."""
    return Outcome(type=Result.FAILED, reason=reason, message=message)


def deadline_exceeded(snapshot: Snapshot[Work], status: WorkStatus) -> Outcome | None:
    """``activeDeadlineSeconds`` have passed since the start."""
    limit = snapshot.work.spec.active_deadline_seconds
    if limit is None or snapshot.seconds_since(status.start_time) < limit:
        return None
    return failed(Reason.DEADLINE_EXCEEDED, f"not complete {limit} s after the start (spec.activeDeadlineSeconds)")


def start_deadline_exceeded(snapshot: Snapshot[Work], status: WorkStatus) -> Outcome | None:
    """No pod has started within ``startDeadlineSeconds`` of the creation, or longer if one had to load its model.

    The time in which other rounds have the pods does not count.
    """
    if status.start_time is not None or not _idle_too_long(snapshot, status):
        return None
    limit = snapshot.work.spec.start_deadline_seconds
    message = f"no pod started within {limit} s (spec.startDeadlineSeconds){_waited(status)}"
    return failed(Reason.START_DEADLINE_EXCEEDED, message)


def _idle_too_long(snapshot: Snapshot[Work], status: WorkStatus) -> bool:
    limit, idle_since = snapshot.work.spec.start_deadline_seconds, status.idle_time
    if idle_since is None or snapshot.seconds_since(idle_since) < limit + loading_seconds(snapshot, idle_since):
        return False
    # A new process has yet to read the other rounds: until then nothing says whether this one waits for its turn.
    return snapshot.known_rounds is not None


def _waited(status: WorkStatus) -> str:
    return f"; last waited for: {status.message}" if status.message else ""


def pods_unreachable(snapshot: Snapshot[Work], status: WorkStatus) -> Outcome | None:
    """No pod has answered for ``pollFailureSeconds``, and none loads its model."""
    limit = snapshot.work.spec.poll_failure_seconds
    if status.poll_failure_time is None or snapshot.seconds_since(status.poll_failure_time) < limit:
        return None
    return failed(Reason.PODS_UNREACHABLE, f"no pod has answered for {limit} s (spec.pollFailureSeconds)")


def pods_idle(snapshot: Snapshot[Work], status: WorkStatus) -> Outcome | None:
    """No pod has worked on it for ``startDeadlineSeconds`` since it started, or longer if one had to load its model.

    The time in which other rounds have the pods does not count.
    """
    if status.start_time is None or not _idle_too_long(snapshot, status):
        return None
    limit = snapshot.work.spec.start_deadline_seconds
    message = f"no pod has worked on it for {limit} s (spec.startDeadlineSeconds){_waited(status)}"
    return failed(Reason.PODS_IDLE, message)


def pods_busy(snapshot: Snapshot[Work], status: WorkStatus) -> Outcome | None:
    """A pod computes other work before this one has started, and ``concurrencyPolicy`` is Fail."""
    if snapshot.work.spec.concurrency_policy is not ConcurrencyPolicy.FAIL or status.start_time is not None:
        return None
    busy = busy_pods(snapshot)
    if not busy:
        return None
    message = f"pods compute other work: {holders(snapshot, busy)} (spec.concurrencyPolicy is Fail)"
    return failed(Reason.PODS_BUSY, message)


#: Rules of every kind.
LIMITS: tuple[EndRule[Snapshot[Work], WorkStatus], ...] = (
    deadline_exceeded,
    start_deadline_exceeded,
    pods_unreachable,
    pods_idle,
    pods_busy,
)


def end_deleted(snapshot: Snapshot[Work], step: StepT) -> StepT:
    """End what is being deleted, suspended work too. What has an outcome keeps it."""
    if snapshot.work.metadata.deletion_timestamp is None or step.status.outcome is not None:
        return step
    outcome = failed(Reason.DELETED, "it is deleted")
    return step.extended(outcome=outcome, stop_time=step.status.stop_time or snapshot.now)


def end_by(rules: Iterable[EndRule[SnapshotT, Any]], snapshot: SnapshotT, step: StepT) -> StepT:
    """Record how the work ends, before any pod is told to stop."""
    step = end_deleted(snapshot, step)
    if step.status.stop_time is not None:
        return step  # ends already, or is suspended: nothing is computed, no deadline runs
    outcome = next((found for rule in rules if (found := rule(snapshot, step.status))), None)
    if outcome is None:
        return step
    return step.extended(outcome=outcome, stop_time=snapshot.now)


def suspend(snapshot: Snapshot[Work], step: StepT) -> StepT:
    """Follow ``spec.suspend``: let the pods stop, or go on once every pod has stopped."""
    status = step.status
    if status.outcome is not None:
        return step
    if snapshot.work.spec.suspend:
        return step.extended(stop_time=status.stop_time or snapshot.now)
    if status.stop_time is None or any(share.state.active for share in status.shares):
        return step
    # Like a Job's, the clock of resumed work starts anew.
    return step.extended(stop_time=None, start_time=None, idle_time=None)


def note_times(snapshot: Snapshot[Work], step: StepT, *, started: bool, works: bool, extent: str) -> StepT:
    """Record when the first pod confirmed its start, since when no pod has answered, and since when none works.

    ``started`` says whether one has by now, ``works`` whether one works, ``extent`` how much work it is.
    """
    status, events = step.status, list[WorkEvent]()
    start_time = status.start_time
    if start_time is None and started:
        start_time = snapshot.now
        events.append(WorkEvent(reason=Reason.STARTED, message=extent))
    failing_since = (status.poll_failure_time or snapshot.now) if _poll_failed(snapshot, status) else None
    # Another round's time is not this one's: who goes first may take the pods for longer than the deadline. But those
    # that this one has become free when it ends.
    queued = not any(share.state is SlotState.RUNNING for share in status.shares) and is_queued(snapshot)
    idle = not (works and start_time is not None) and not queued
    idle_since = (status.idle_time or _idle_from(snapshot)) if idle else None
    return step.extended(start_time=start_time, poll_failure_time=failing_since, idle_time=idle_since, events=events)


def _idle_from(snapshot: Snapshot[Work]) -> datetime:
    """Creation, if this is the first look at it; else now: a pod worked on it, or its turn in the queue has come."""
    work, status = snapshot.work, snapshot.work.status
    is_first = status.start_time is None and not status.observed_generation
    return work.metadata.creation_timestamp if is_first else snapshot.now


def _poll_failed(snapshot: Snapshot[Work], status: WorkStatus) -> bool:
    """Whether pods do the work, and none of them answers or loads its model. Those that leave are to do none."""
    active = [share for share in status.shares if share.state.active and share.state is not SlotState.LEAVING]
    return bool(active) and not any(
        snapshot.report_of(share).status is not None or loads(snapshot, snapshot.pod_of(share)) for share in active
    )


def close(snapshot: Snapshot[Work], step: StepT) -> StepT:
    """Finish the object once it has an outcome and every pod has stopped."""
    outcome = step.status.outcome
    if outcome is None or any(share.state.active for share in step.status.shares):
        return step
    # Not `Reason(...)`: another version may have recorded a reason that this one does not know.
    warning = outcome.type is Result.FAILED and outcome.reason != Reason.DELETED
    event = WorkEvent(reason=outcome.reason, message=outcome.message, warning=warning)
    return step.extended(completion_time=snapshot.now, events=[event])


def tally(snapshot: Snapshot[Work], step: StepT) -> StepT:
    """Fill in what ``kubectl get`` shows of every kind."""
    states = [share.state for share in step.status.shares]
    return step.extended(
        observed_generation=snapshot.work.metadata.generation,
        state=_state(step.status),
        desired=len(states),
        running=states.count(SlotState.RUNNING),
        done=states.count(SlotState.DONE),
        failed=states.count(SlotState.FAILED),
    )


def _state(status: WorkStatus) -> State:
    if status.outcome is not None:
        return State(status.outcome.type.value) if status.completion_time is not None else State.STOPPING
    if status.stop_time is not None:
        active = any(share.state.active for share in status.shares)
        return State.SUSPENDING if active else State.SUSPENDED
    return State.RUNNING if status.start_time is not None else State.PENDING


def expire(snapshot: Snapshot[Work], step: StepT) -> StepT:
    """Delete a finished object when its time to live has passed; until then its spec may change, and is observed."""
    generation = snapshot.work.metadata.generation
    seen = step.status.with_own_conditions(observed_generation=generation)
    step = step.extended(observed_generation=generation, conditions=seen)
    ttl = snapshot.work.spec.ttl_seconds_after_finished
    finished = step.status.completion_time
    if ttl is None or finished is None or snapshot.seconds_since(finished) < ttl:
        return step
    return step.extended(actions=[DeleteWork()])
