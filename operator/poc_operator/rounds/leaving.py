# SPDX-License-Identifier: Apache-2.0
"""Leases of the round's pods, and pods that leave it with a slot: deleted, no longer selected, or silent for long.

Such a pod may compute on. Its slot is its own until it has confirmed the stop or its lease has run out; meanwhile it is
asked, told to stop, and what it delivers counts. A pod whose object is gone holds no slot: who deletes that by force
says that nothing runs any more, as Kubernetes has it.
"""

from datetime import datetime

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.leases import Renewal, recorded_end
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import StopPod
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from vllm_poc.wire.answers import PowState

#: A pod with such a slot is asked to compute on.
_LEASED = (SlotState.STARTING, SlotState.RUNNING)


def record_leases(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Record by when the leases have run out that are given from now on. A round that ends gives none."""
    status = step.status
    if status.stop_time or not any(slot.state in _LEASED for slot in status.assignments):
        return step
    return step.extended(lease_end_time=recorded_end(status.lease_end_time, snapshot.now, snapshot.lease_seconds))


def renewal(round_: PoCRound, seconds: int) -> Renewal | None:
    """Return which leases polls renew: those of pods that are to compute on, once it is recorded when they end."""
    status = round_.status
    if status.lease_end_time is None or status.stop_time or round_.metadata.deletion_timestamp:
        return None
    uids = {slot.uid for slot in status.assignments if slot.state in _LEASED}
    return Renewal(round_id=round_.id, uids=uids, seconds=seconds, end=status.lease_end_time)


def stop_leaving_pods(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Tell the pods that leave to stop, as long as they say that they compute the round."""
    if step.status.stop_time:
        return step
    leaving = [slot for slot in step.status.assignments if slot.state is SlotState.LEAVING]
    pods = [pod for slot in leaving if (pod := snapshot.existing_pod_of(slot)) and _computes(snapshot, slot)]
    return step.extended(actions=[StopPod(pod=pod, round_id=snapshot.round.id) for pod in pods])


def _computes(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    status = snapshot.report_of(slot).status
    return status is not None and status.state is PowState.GENERATING and status.round_id == snapshot.round.id


def leave(snapshot: RoundSnapshot, slot: Assignment, why: str) -> Assignment:
    """Return the slot of a pod that leaves, and is not asked to compute on from now on."""
    update = {"state": SlotState.LEAVING, "lease_end_time": lease_end(snapshot, slot), "error": why}
    return slot.model_copy(update=update)


def lease_end(snapshot: RoundSnapshot, slot: Assignment) -> datetime | None:
    """Return by when the lease of the slot's pod runs out if it is not renewed; None if the pod knows no leases."""
    return (slot.lease_end_time or snapshot.round.status.lease_end_time) if slot.leased else None


def lease_over(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the lease of the slot's pod, which is not renewed any more, has run out."""
    return slot.leased and slot.lease_end_time is not None and slot.lease_end_time <= snapshot.now


def why_leaving(slot: Assignment, pod: PodView) -> str:
    """Say why the slot's pod leaves."""
    return f"pod {slot.pod} is being deleted" if pod.terminating else f"pod {slot.pod} is not selected any more"
