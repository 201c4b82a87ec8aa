# SPDX-License-Identifier: Apache-2.0
"""Pods that compute a slot of the round which is not theirs.

A start may arrive long after its sender gave up or died, and a pod that was given up for silent may
compute on. Such a pod is stopped, and until then nobody else is told to compute its slot.
"""

from poc_operator.model.pods import PodView
from poc_operator.model.status import Assignment
from poc_operator.plan.snapshot import Snapshot, Step, StopPod
from vllm_poc.wire.messages import PowState, StatusResponse


def is_of_slot(status: StatusResponse, slot: Assignment) -> bool:
    """Whether the pod's round, if it is this one, is this slot from where it was last given out."""
    config = status.config
    same_slot = config is None or (config.node_id, config.group_id) == (slot.node, slot.group)
    return same_slot and status.start_index == slot.start


def computed_slots(snapshot: Snapshot) -> frozenset[tuple[int, int]]:
    """Return the slots that pods say they compute, by node and group."""
    configs = (status.config for _, status in _computing(snapshot))
    return frozenset((config.node_id, config.group_id) for config in configs if config is not None)


def stop_strays(snapshot: Snapshot, step: Step) -> Step:
    """Stop the pods that compute a slot of this round without having it."""
    slots = {slot.uid: slot for slot in step.status.assignments if slot.state.active}
    strays = [pod for pod, status in _computing(snapshot) if not _owns(slots.get(pod.uid), status)]
    return step.extended(actions=[StopPod(pod=pod, round_id=snapshot.round.id) for pod in strays])


def _computing(snapshot: Snapshot) -> list[tuple[PodView, StatusResponse]]:
    """Return the pods that say they compute this round."""
    polled = [(pod, report.status) for pod in snapshot.live_pods if (report := snapshot.reports.get(pod.uid))]
    return [
        (pod, status)
        for pod, status in polled
        if status is not None and status.state is PowState.GENERATING and status.round_id == snapshot.round.id
    ]


def _owns(slot: Assignment | None, status: StatusResponse) -> bool:
    return slot is not None and is_of_slot(status, slot)
