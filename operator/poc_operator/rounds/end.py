# SPDX-License-Identifier: Apache-2.0
"""How a round ends, pauses and goes: the rules of its end, ``spec.suspend``, and its time to live.

Of the rules of the end the first with an answer wins.
"""

from collections.abc import Callable, Iterable
from datetime import datetime

from poc_operator.model.conditions import ConditionType, Reason
from poc_operator.model.spec import MAX_SLOTS, BusyPolicy
from poc_operator.model.status import Assignment, Outcome, RoundState, RoundStatus, SlotState
from poc_operator.rounds.eligibility import busy_pods
from poc_operator.rounds.snapshot import DeleteRound, Snapshot, Step
from poc_operator.rounds.waiting import holders

Rule = Callable[[Snapshot, RoundStatus], Outcome | None]


def complete(message: str, reason: Reason = Reason.COMPLETED) -> Outcome:
    """The outcome of a round that has reached what it was made for."""
    return Outcome(type=RoundState.COMPLETE, reason=reason, message=message)


def failed(reason: Reason, message: str) -> Outcome:
    """The outcome of a round that never will."""
    return Outcome(type=RoundState.FAILED, reason=reason, message=message)


def _seconds_since(snapshot: Snapshot, moment: datetime | None) -> float:
    return (snapshot.now - moment).total_seconds() if moment is not None else 0.0


def enough_nonces(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """``stop.afterNonces`` is reached."""
    stop = snapshot.round.spec.stop
    checked = sum(slot.next for slot in status.assignments)
    if stop is None or stop.after_nonces is None or checked < stop.after_nonces:
        return None
    return complete(f"spec.stop.afterNonces of {stop.after_nonces} reached")


def enough_valid(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """``stop.afterValid`` is reached."""
    stop = snapshot.round.spec.stop
    valid = sum(slot.valid for slot in status.assignments)
    if stop is None or stop.after_valid is None or valid < stop.after_valid:
        return None
    return complete(f"spec.stop.afterValid of {stop.after_valid} reached")


def enough_time(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """``stop.afterSeconds`` have passed since the first pod started."""
    stop = snapshot.round.spec.stop
    if stop is None or stop.after_seconds is None:
        return None
    if _seconds_since(snapshot, status.start_time) < stop.after_seconds:
        return None
    return complete(f"spec.stop.afterSeconds of {stop.after_seconds} reached")


def all_nonces_computed(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """Every slot is at the end of the int32 range."""
    if not status.assignments or any(slot.state is not SlotState.DONE for slot in status.assignments):
        return None
    return complete("every nonce of the round is computed")


def deadline_exceeded(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """``activeDeadlineSeconds`` have passed since the start."""
    limit = snapshot.round.spec.active_deadline_seconds
    if limit is None or _seconds_since(snapshot, status.start_time) < limit:
        return None
    return failed(Reason.DEADLINE_EXCEEDED, f"not complete {limit} s after the start (spec.activeDeadlineSeconds)")


def start_deadline_exceeded(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """No pod has started within ``startDeadlineSeconds`` of the creation."""
    limit = snapshot.round.spec.start_deadline_seconds
    if status.start_time is not None:
        return None
    if _seconds_since(snapshot, _startable_since(snapshot)) < limit:
        return None
    waited = f"; last waited for: {status.message}" if status.message else ""
    message = f"no pod started within {limit} s (spec.startDeadlineSeconds){waited}"
    return failed(Reason.START_DEADLINE_EXCEEDED, message)


def _startable_since(snapshot: Snapshot) -> datetime:
    """Creation, or the moment of the last resumption."""
    created = snapshot.round.metadata.creation_timestamp
    changes = [
        condition.last_transition_time
        for condition in snapshot.round.status.conditions
        if condition.type == ConditionType.SUSPENDED
    ]
    return max([created, *changes])


def pods_unreachable(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """No pod has answered for ``pollFailureSeconds``."""
    limit = snapshot.round.spec.poll_failure_seconds
    if status.poll_failure_time is None or _seconds_since(snapshot, status.poll_failure_time) < limit:
        return None
    return failed(Reason.PODS_UNREACHABLE, f"no pod has answered for {limit} s (spec.pollFailureSeconds)")


def pods_busy(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """A pod computes other work before this round has started, and ``onBusy`` is Fail."""
    if snapshot.round.spec.on_busy is not BusyPolicy.FAIL or status.start_time is not None:
        return None
    busy = busy_pods(snapshot)
    if not busy:
        return None
    return failed(Reason.PODS_BUSY, f"pods compute other work: {holders(snapshot, busy)} (spec.onBusy is Fail)")


def all_slots_failed(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """Every slot was given up."""
    if not status.assignments or any(slot.state is not SlotState.FAILED for slot in status.assignments):
        return None
    return failed(Reason.REISSUE_LIMIT_EXCEEDED, status.assignments[0].error or "every slot was given up")


def too_many_slots(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """``nodes`` asks for more slots than a round may have, as only a spec of before that limit can."""
    nodes = snapshot.round.spec.nodes
    slots = len(nodes.ids) * (nodes.groups or 1)
    if status.slots or slots <= MAX_SLOTS:
        return None
    message = f"spec.nodes makes {slots} slots, at most {MAX_SLOTS} are allowed: serve fewer node ids in one round"
    return failed(Reason.TOO_MANY_SLOTS, message)


#: Rules of every round.
LIMITS: tuple[Rule, ...] = (deadline_exceeded, start_deadline_exceeded, pods_unreachable, pods_busy)

#: What is done counts first: a round that has both enough nonces and a passed deadline is complete.
ENDS: tuple[Rule, ...] = (
    too_many_slots,
    enough_nonces,
    enough_valid,
    enough_time,
    all_nonces_computed,
    *LIMITS,
    all_slots_failed,
)


def end_by(rules: Iterable[Rule], snapshot: Snapshot, step: Step) -> Step:
    """Record how the round ends, before any pod is told to stop."""
    if step.status.stop_time is not None:
        return step  # ends already, or is suspended: nothing is computed, no deadline runs
    outcome = next((found for rule in rules if (found := rule(snapshot, step.status))), None)
    if outcome is None:
        return step
    return step.extended(outcome=outcome, stop_time=snapshot.now)


def end(snapshot: Snapshot, step: Step) -> Step:
    """End a round that generates when it is time, or at once when the user wants it: suspended rounds too."""
    if snapshot.round.spec.finish and step.status.outcome is None:
        stopping_since = step.status.stop_time or snapshot.now
        return step.extended(outcome=complete("spec.finish is set"), stop_time=stopping_since)
    return end_by(ENDS, snapshot, step)


def suspend(snapshot: Snapshot, step: Step) -> Step:
    """Follow ``spec.suspend``: start to stop the pods, or let them go on from where they were."""
    status = step.status
    if status.outcome is not None:
        return step
    if snapshot.round.spec.suspend:
        return step.extended(stop_time=status.stop_time or snapshot.now)
    if status.stop_time is None or any(share.state.active for share in status.shares):
        return step  # it runs, or is still stopping: it resumes once every pod has stopped
    waiting = [_resume(snapshot, slot) for slot in status.assignments]
    # Like a Job's, the clock of a resumed round starts anew.
    return step.extended(stop_time=None, start_time=None, assignments=waiting)


def _resume(snapshot: Snapshot, slot: Assignment) -> Assignment:
    """Let a slot that was stopped wait for a pod; its work goes on after the last delivered nonce, if there is one."""
    if slot.state is not SlotState.DONE or snapshot.is_whole(slot):
        return slot
    return slot.model_copy(
        update={
            "state": SlotState.WAITING,
            "pod": None,
            "uid": None,
            "session": None,
            "start": slot.delivered,
            "next": slot.delivered,
            "end": None,
            "valid_before": slot.valid,
            "rejected_before": slot.rejected,
        }
    )


def expire(snapshot: Snapshot, step: Step) -> Step:
    """Delete the round if it is finished and its time to live has passed."""
    ttl = snapshot.round.spec.ttl_seconds_after_finished
    finished = step.status.completion_time
    if ttl is None or finished is None or (snapshot.now - finished).total_seconds() < ttl:
        return step
    return step.extended(actions=[DeleteRound()])
