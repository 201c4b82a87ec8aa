# SPDX-License-Identifier: Apache-2.0
"""When a round ends, what ``spec.suspend`` does to its slots, and when it is closed: Complete or Failed.

Of the rules of an end the first with an answer wins.
"""

from collections.abc import Sequence
from datetime import timedelta

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, MAX_WAITS, Assignment, RoundStatus, SlotWait
from poc_operator.apis.v1alpha1.schema import number_of
from poc_operator.apis.v1alpha1.status import Outcome, Result, SlotState
from poc_operator.planning import lifecycle
from poc_operator.planning.conditions import first_few
from poc_operator.planning.lifecycle import LIMITS, EndRule, close, complete, end_by, failed
from poc_operator.rounds.counters import PATIENCE, settled_nonces
from poc_operator.rounds.leaving import leave
from poc_operator.rounds.rivals import under_way
from poc_operator.rounds.slots import TOLD_SECONDS
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep

#: A round that ends waits so long for decisions about rivals: what they hold back is not forwarded before.
DECISION_PATIENCE = timedelta(seconds=30)


def enough_nonces(snapshot: RoundSnapshot, status: RoundStatus) -> Outcome | None:
    """``stop.afterNonces`` is reached: so many are settled, which a gateway must have stored."""
    stop = snapshot.round.spec.stop
    settled = sum(settled_nonces(snapshot.round, slot) for slot in status.assignments)
    if stop is None or stop.after_nonces is None or settled < stop.after_nonces:
        return None
    return complete(f"spec.stop.afterNonces of {stop.after_nonces} reached")


def enough_valid(snapshot: RoundSnapshot, status: RoundStatus) -> Outcome | None:
    """``stop.afterValid`` is reached."""
    stop = snapshot.round.spec.stop
    valid = sum(slot.valid for slot in status.assignments)
    if stop is None or stop.after_valid is None or valid < stop.after_valid:
        return None
    return complete(f"spec.stop.afterValid of {stop.after_valid} reached")


def enough_time(snapshot: RoundSnapshot, status: RoundStatus) -> Outcome | None:
    """``stop.afterSeconds`` have passed since the first pod started."""
    stop = snapshot.round.spec.stop
    if stop is None or stop.after_seconds is None:
        return None
    if snapshot.seconds_since(status.start_time) < stop.after_seconds:
        return None
    return complete(f"spec.stop.afterSeconds of {stop.after_seconds} reached")


def all_nonces_computed(snapshot: RoundSnapshot, status: RoundStatus) -> Outcome | None:
    """Every slot is at the end of the int32 range."""
    if not status.assignments or any(slot.state is not SlotState.DONE for slot in status.assignments):
        return None
    return complete("every nonce of the round is computed")


def no_slot_left(snapshot: RoundSnapshot, status: RoundStatus) -> Outcome | None:
    """Slots were given up, and nothing is left to compute in the others."""
    slots = status.assignments
    given_up = [slot for slot in slots if slot.state is SlotState.FAILED]
    if not given_up or any(slot.state not in (SlotState.FAILED, SlotState.DONE) for slot in slots):
        return None
    why = given_up[0].error or "it was lost too often"
    return failed(
        Reason.BACKOFF_LIMIT_EXCEEDED, f"{len(given_up)} of {len(slots)} slots were given up, the first: {why}"
    )


def too_many_slots(snapshot: RoundSnapshot, status: RoundStatus) -> Outcome | None:
    """``nodes`` asks for more slots than a round may have, as only a spec of before that limit can."""
    nodes = snapshot.round.spec.nodes
    slots = len(nodes.ids) * (nodes.groups or 1)
    if status.slots or slots <= MAX_SLOTS:
        return None
    message = f"spec.nodes makes {slots} slots, at most {MAX_SLOTS} are allowed: serve fewer node ids in one round"
    return failed(Reason.TOO_MANY_SLOTS, message)


#: What is done counts first: a round that has both enough nonces and a passed deadline is complete.
ENDS: tuple[EndRule[RoundSnapshot, RoundStatus], ...] = (
    too_many_slots,
    enough_nonces,
    enough_valid,
    enough_time,
    all_nonces_computed,
    *LIMITS,
    no_slot_left,
)


def end(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """End a round when it is time, or at once when the user wants it: suspended rounds too."""
    if snapshot.round.spec.finish and step.status.outcome is None:
        stopping_since = step.status.stop_time or snapshot.now
        return step.extended(outcome=complete("spec.finish is set"), stop_time=stopping_since)
    return end_by(ENDS, snapshot, step)


def suspend(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Follow ``spec.suspend``: start to stop the pods, or let them go on from where they were."""
    followed = lifecycle.suspend(snapshot, step)
    if step.status.stop_time is None or followed.status.stop_time is not None:
        return followed
    slots = [_resume(snapshot, slot) for slot in step.status.assignments]
    return followed.extended(assignments=slots, worked_seconds=worked_seconds(step.status))


def worked_seconds(status: RoundStatus) -> int:
    """Return how long pods have worked until the round was suspended, or has ended."""
    if status.start_time is None or status.stop_time is None:
        return status.worked_seconds
    return status.worked_seconds + int((status.stop_time - status.start_time).total_seconds())


def _resume(snapshot: RoundSnapshot, slot: Assignment) -> Assignment:
    """Let a slot that was stopped wait for a pod; its work goes on after the last delivered nonce, if there is one.

    One whose pod has not confirmed the stop waits for that first.
    """
    if slot.state is not SlotState.DONE or snapshot.is_whole(slot):
        return slot
    if slot.unconfirmed:
        return leave(snapshot, slot, f"pod {slot.pod} did not answer when it had to stop")
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


def finish(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Close the round once every pod has stopped."""
    status = step.status
    if status.outcome is None or any(share.state.active for share in status.shares):
        return step
    if under_way(status) and status.stop_time is not None and snapshot.now - status.stop_time < DECISION_PATIENCE:
        return step
    undelivered = sum(max(0, slot.next - settled_nonces(snapshot.round, slot)) for slot in status.assignments)
    if undelivered and _gateway_may_know_more(snapshot, status):
        return step
    lost = _lost(snapshot, status.outcome, status, undelivered)
    message = "; ".join(filter(None, (status.outcome.message, lost, _at_the_gateway(snapshot), _without_pods(status))))
    return close(snapshot, step.extended(outcome=status.outcome.model_copy(update={"message": message})))


def _lost(snapshot: RoundSnapshot, outcome: Outcome, status: RoundStatus, undelivered: int) -> str:
    if undelivered:
        return f"{number_of(undelivered, 'computed nonce was', 'computed nonces were')} not delivered"
    results = any(settled_nonces(snapshot.round, slot) for slot in status.assignments)
    lacks = outcome.type is Result.COMPLETE and has_begun(status) and not results
    return "no result was delivered" if lacks else ""


def has_begun(status: RoundStatus) -> bool:
    """Return whether pods have ever worked for the round: a suspension takes its start time away."""
    return status.start_time is not None or worked_seconds(status) > 0


def _at_the_gateway(snapshot: RoundSnapshot) -> str:
    """Say what waited at the gateway when the round ended, if its receiver did not take it."""
    gateway = snapshot.gateway
    told = gateway.collected if gateway is not None and gateway.error is None else None
    if told is None or told.forwarding_error is None:
        return ""
    return f"at its end {told.waiting} results waited at the gateway for the receiver ({told.forwarding_error})"


#: Nor is one that had none for a smaller share of the round's time than this.
_TOLD_SHARE = 0.1


def long_waits(status: RoundStatus, least: int) -> list[SlotWait]:
    """Return the slots that had no pod for so many seconds or more, and for a good part of the round's time."""
    seconds = worked_seconds(status)
    return [wait for wait in status.slot_waits if wait.seconds >= max(least, _TOLD_SHARE * seconds)]


def _without_pods(status: RoundStatus) -> str:
    """Say which slots had no pod for a good part of the round's time; nothing if all had theirs."""
    waits = long_waits(status, TOLD_SECONDS)
    # Others may have been left out of the status.
    what = f"{MAX_WAITS} or more slots" if len(waits) == MAX_WAITS else "slots"
    return f"{what} without a pod for a part of the {tell_waits(status, waits)}" if waits else ""


def tell_waits(status: RoundStatus, waits: Sequence[SlotWait]) -> str:
    """Say how long the round took, and which slots had no pod for how long of it."""
    told = [f"node {wait.node} group {wait.group} ({wait.seconds} s)" for wait in waits]
    return f"{worked_seconds(status)} s: {first_few(told)}"


def _gateway_may_know_more(snapshot: RoundSnapshot, status: RoundStatus) -> bool:
    stopped = status.stop_time
    return snapshot.gateway is not None and stopped is not None and snapshot.now - stopped < PATIENCE
