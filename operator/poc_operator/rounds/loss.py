# SPDX-License-Identifier: Apache-2.0
"""What becomes of a slot whose pod lost it or gets nothing done.

A lost slot is given out again within the budget, or given up. A pod that stalls is stopped and told again, and in the
end deleted.
"""

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, RetryPolicy, StallAction
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.planning.snapshot import Action, DeletePod, Loss, StopPod, WorkEvent
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep


def lose(
    snapshot: RoundSnapshot, slot: Assignment, loss: Loss, why: str, *, unbind: bool = False
) -> tuple[Assignment, WorkEvent | None]:
    """Return the slot after its work was lost, and the Event that tells the user.

    With ``unbind`` the slot waits for another pod; else its own pod is told again. What the cluster's
    infrastructure ended does not count against the budget, nor does what only a lease has ended.
    """
    slot = slot.model_copy(update={"lease_end_time": None, "unconfirmed": False})
    if snapshot.round.status.stop_time is not None:
        return slot.model_copy(update={"state": SlotState.DONE, "error": why}), None
    if snapshot.is_whole(slot):
        return slot.model_copy(update={"state": SlotState.DONE, "error": None}), None
    disrupted = snapshot.disrupted(slot)
    if disrupted:
        why += " (disrupted by the cluster)"
    free = disrupted or loss is Loss.LEASE_EXPIRED
    slot = slot.model_copy(update={"disruptions": slot.disruptions + free})
    refusal = _exhausted(snapshot, slot, free=free)
    if refusal is not None:
        failed = slot.model_copy(update={"state": SlotState.FAILED, "error": f"{why}; {refusal}"})
        return failed, WorkEvent.warn_of(slot, Reason.WORK_LOST, f"{why}; {refusal}")
    again = _reset(slot, _start_index(snapshot, slot), why)
    later = ""
    if snapshot.gateway is not None:
        again, later = again.model_copy(update={"lost": snapshot.now}), ", or later if the gateway has more by then"
    if unbind:
        again = again.model_copy(update={"state": SlotState.WAITING, "pod": None, "uid": None, "stalls": 0})
    message = f"{why}; starts again at index {again.start}{later}"
    return again, WorkEvent.warn_of(slot, Reason.WORK_LOST, message, Loss.DISRUPTED if disrupted else loss)


def _exhausted(snapshot: RoundSnapshot, slot: Assignment, *, free: bool) -> str | None:
    limits = snapshot.round.spec.retry
    if limits.policy is RetryPolicy.NEVER:
        return "spec.retry.policy is Never"
    if free:
        return None
    if slot.attempts - slot.disruptions > limits.backoff_limit_per_slot:
        return f"spec.retry.backoffLimitPerSlot of {limits.backoff_limit_per_slot} is used up"
    disruptions = sum(other.disruptions for other in snapshot.round.status.assignments)
    if snapshot.round.status.totals.retries - disruptions >= limits.backoff_limit:
        return f"spec.retry.backoffLimit of {limits.backoff_limit} is used up"
    return None


def _start_index(snapshot: RoundSnapshot, slot: Assignment) -> int:
    resume = snapshot.round.spec.retry.policy is RetryPolicy.RESUME
    return slot.delivered if resume else 0


def _reset(slot: Assignment, start: int, why: str) -> Assignment:
    """Forget the lost session; keep what was delivered below ``start``."""
    kept = start > 0
    return slot.model_copy(
        update={
            "state": SlotState.STARTING,
            "session": None,
            "start": start,
            "next": start,
            "end": None,
            "delivered": start,
            "valid": slot.valid if kept else 0,
            "valid_before": slot.valid if kept else 0,
            "rejected": slot.rejected if kept else 0,
            "rejected_before": slot.rejected if kept else 0,
            "attempts": slot.attempts + 1,
            "error": why,
        }
    )


def stalled_for_long(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the slot's pod computes without progress for longer than ``stall.afterSeconds``."""
    return _counts(snapshot) and snapshot.report_of(slot).stalled_seconds >= snapshot.round.spec.stall.after_seconds


def silent_for_long(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the slot's pod has not answered for longer than ``stall.unreachableSeconds``."""
    limit = snapshot.round.spec.stall.unreachable_seconds
    return _counts(snapshot) and snapshot.report_of(slot).silent_seconds >= limit


def _counts(snapshot: RoundSnapshot) -> bool:
    # A round that ends stops its pods anyway, and waits for each no longer than for any other.
    return snapshot.round.status.stop_time is None


def stall(slot: Assignment, what: str) -> tuple[Assignment, WorkEvent]:
    """Return the slot whose pod must be stopped first, and the Event that tells the user."""
    error = f"pod {slot.pod} {what}"
    stalled = slot.model_copy(update={"state": SlotState.STALLED, "stalls": slot.stalls + 1, "error": error})
    return stalled, WorkEvent.warn_of(slot, Reason.STALLED, error)


def heal_stalls(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Stop the pods that stalled; one that stalled before, or does not answer, is deleted if the round allows it."""
    if step.status.stop_time:
        return step
    stalled = [slot for slot in step.status.assignments if slot.state is SlotState.STALLED]
    actions = [action for slot in stalled if (action := _cure(snapshot, slot)) is not None]
    return step.extended(actions=actions)


def _cure(snapshot: RoundSnapshot, slot: Assignment) -> Action | None:
    pod = snapshot.pod_of(slot)
    if pod is None:
        return None
    answers = snapshot.report_of(slot).status is not None
    if snapshot.round.spec.stall.action is StallAction.DELETE_POD and (slot.stalls > 1 or not answers):
        return DeletePod(pod=pod)
    # A pod that does not answer may still compute: its slot must not be given to another one.
    return StopPod(pod=pod, round_id=snapshot.round.id) if answers else None
