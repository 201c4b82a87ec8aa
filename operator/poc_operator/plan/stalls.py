# SPDX-License-Identifier: Apache-2.0
"""Pods that hold a slot and get nothing done: they are stopped and told again, and in the end deleted."""

from poc_operator.model.conditions import Reason
from poc_operator.model.spec import StallAction
from poc_operator.model.status import Assignment, SlotState
from poc_operator.plan.snapshot import Action, DeletePod, RoundEvent, Snapshot, Step, StopPod


def stalled_for_long(snapshot: Snapshot, slot: Assignment) -> bool:
    """Whether the slot's pod computes without progress for longer than ``stall.afterSeconds``."""
    return _counts(snapshot) and snapshot.report_of(slot).stalled_seconds >= snapshot.round.spec.stall.after_seconds


def silent_for_long(snapshot: Snapshot, slot: Assignment) -> bool:
    """Whether the slot's pod has not answered for longer than ``stall.unreachableSeconds``."""
    limit = snapshot.round.spec.stall.unreachable_seconds
    return _counts(snapshot) and snapshot.report_of(slot).silent_seconds >= limit


def _counts(snapshot: Snapshot) -> bool:
    # A round that ends stops its pods anyway, and waits for each no longer than for any other.
    return snapshot.round.status.stop_time is None


def stall(slot: Assignment, what: str) -> tuple[Assignment, RoundEvent]:
    """Return the slot whose pod must be stopped first, and the Event that tells the user."""
    error = f"pod {slot.pod} {what}"
    stalled = slot.model_copy(update={"state": SlotState.STALLED, "stalls": slot.stalls + 1, "error": error})
    return stalled, RoundEvent.warn_of(slot, Reason.STALLED, error)


def heal_stalls(snapshot: Snapshot, step: Step) -> Step:
    """Stop the pods that stalled; one that stalled before, or does not answer, is deleted if the round allows it."""
    if step.status.stop_time:
        return step
    stalled = [slot for slot in step.status.assignments if slot.state is SlotState.STALLED]
    actions = [action for slot in stalled if (action := _cure(snapshot, slot)) is not None]
    return step.extended(actions=actions)


def _cure(snapshot: Snapshot, slot: Assignment) -> Action | None:
    pod = snapshot.pod_of(slot)
    if pod is None:
        return None
    answers = snapshot.report_of(slot).status is not None
    if snapshot.round.spec.stall.action is StallAction.DELETE_POD and (slot.stalls > 1 or not answers):
        return DeletePod(pod=pod)
    # A pod that does not answer may still compute: its slot must not be given to another one.
    return StopPod(pod=pod, round_id=snapshot.round.id) if answers else None
