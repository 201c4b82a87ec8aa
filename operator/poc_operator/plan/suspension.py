# SPDX-License-Identifier: Apache-2.0
"""``spec.suspend``: the pods stop and keep what they delivered; later they go on from there."""

from poc_operator.model.status import Assignment, SlotState
from poc_operator.plan.snapshot import Snapshot, Step


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
