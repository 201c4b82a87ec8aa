# SPDX-License-Identifier: Apache-2.0
"""Which pod works on which slot.

The number of slots is decided once, from the pods that exist when the first of them is ready, and
then recorded: a later change would make residue classes overlap.
"""

from poc_operator.model.pods import PodView
from poc_operator.model.status import Assignment, SlotState
from poc_operator.plan.compatibility import incompatibility
from poc_operator.plan.snapshot import Snapshot, Step
from vllm_poc.wire.base import PowState


def usable_pods(snapshot: Snapshot) -> list[PodView]:
    """Pods that are ready, answer, and can run the round."""
    spec = snapshot.round.spec
    return [pod for pod, report in snapshot.answering if incompatibility(spec, report) is None]


def _free_for(snapshot: Snapshot, pod: PodView) -> bool:
    """Whether the pod computes nothing, or this round already."""
    status = snapshot.reports[pod.uid].status
    if status is None:
        return False
    return status.state is not PowState.GENERATING or status.round_id == snapshot.round.id


def fix_slots(snapshot: Snapshot, step: Step) -> Step:
    """Decide the residue classes, once: groups so that every pod of today gets a slot of its own."""
    if step.status.slots or step.status.stop_time or not usable_pods(snapshot):
        return step
    nodes = snapshot.round.spec.nodes
    groups = -(-len(snapshot.live_pods) // len(nodes.ids))
    assignments = [
        Assignment(node=node, group=group, state=SlotState.WAITING) for group in range(groups) for node in nodes.ids
    ]
    return step.extended(slots=nodes.count * groups, groups=groups, assignments=assignments)


def bind_pods(snapshot: Snapshot, step: Step) -> Step:
    """Give every slot without a pod a free one."""
    if step.status.stop_time:
        return step
    taken = {slot.uid for slot in step.status.assignments if slot.state is not SlotState.WAITING}
    free = [pod for pod in usable_pods(snapshot) if pod.uid not in taken and _free_for(snapshot, pod)]
    return step.extended(assignments=[_bind(slot, free) for slot in step.status.assignments])


def _bind(slot: Assignment, free: list[PodView]) -> Assignment:
    """Take the first free pod off the list for a waiting slot."""
    if slot.state is not SlotState.WAITING or not free:
        return slot
    pod = free.pop(0)
    return slot.model_copy(
        update={
            "state": SlotState.STARTING,
            "pod": pod.name,
            "uid": pod.uid,
            "session": None,
            # A slot that was lost has counted its new attempt already.
            "attempts": max(slot.attempts, 1),
            "error": None,
        }
    )
