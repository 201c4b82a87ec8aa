# SPDX-License-Identifier: Apache-2.0
"""Stops of the pods of a round that ends or is suspended, and the end itself."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from poc_operator.model.pods import PodReport, PodView
from poc_operator.model.status import Assignment, RoundState, RoundStatus, SlotState
from poc_operator.plan.collection import PATIENCE
from poc_operator.plan.snapshot import RoundEvent, Snapshot, Step, StopPod
from vllm_poc.wire.messages import PowState

#: So long a pod that does not answer is waited for when its round ends. One that answers is waited for
#: until it has stopped.
STOP_PATIENCE = timedelta(seconds=90)


def running_pods(snapshot: Snapshot) -> list[PodView]:
    """Pods that compute this round, or may do so without our knowledge."""
    return [
        pod
        for slot in snapshot.round.status.assignments
        if slot.state.active and (pod := snapshot.pod_of(slot)) is not None and _may_compute(snapshot, slot)
    ]


def _may_compute(snapshot: Snapshot, slot: Assignment) -> bool:
    report = snapshot.report_of(slot)
    status = report.status
    if status is None or report.in_flight:
        return True
    return status.round_id == snapshot.round.id and status.state is PowState.GENERATING


def stop_orders(snapshot: Snapshot, pods: Iterable[PodView]) -> list[StopPod]:
    """Return the orders for these pods. What does not answer may compute other work by now, and is not told."""
    heard = (pod for pod in pods if snapshot.reports.get(pod.uid, PodReport()).status is not None)
    return [StopPod(pod=pod, round_id=snapshot.round.id) for pod in heard]


def stop_pods(snapshot: Snapshot, step: Step) -> Step:
    """Stop every pod that still computes, and settle the slots that nobody computes."""
    stop_time = step.status.stop_time
    if stop_time is None:
        return step
    pods = running_pods(replace(snapshot, round=snapshot.round.model_copy(update={"status": step.status})))
    patient = snapshot.now - stop_time < STOP_PATIENCE
    busy = {pod.uid for pod in pods if patient or _is_heard_of(snapshot.reports.get(pod.uid))}
    assignments = [_settle(slot, busy) for slot in step.status.assignments]
    return step.extended(assignments=assignments, actions=stop_orders(snapshot, pods))


def _is_heard_of(report: PodReport | None) -> bool:
    return report is not None and (report.status is not None or report.in_flight)


def _settle(slot: Assignment, busy: set[str]) -> Assignment:
    if slot.state in (SlotState.DONE, SlotState.FAILED) or slot.uid in busy:
        return slot
    return slot.model_copy(update={"state": SlotState.DONE})


def finish(snapshot: Snapshot, step: Step) -> Step:
    """Close the round once every pod has stopped."""
    status = step.status
    if status.outcome is None or any(share.state.active for share in status.shares):
        return step
    undelivered = sum(slot.next - slot.delivered for slot in status.assignments)
    if undelivered and _gateway_may_know_more(snapshot, status):
        return step
    message = status.outcome.message
    if undelivered:
        message += f"; {undelivered} computed nonces were not delivered"
    outcome = status.outcome.model_copy(update={"message": message})
    failed = outcome.type is RoundState.FAILED
    event = RoundEvent(reason=outcome.reason, message=message, warning=failed)
    return step.extended(outcome=outcome, completion_time=snapshot.now, events=[event])


def _gateway_may_know_more(snapshot: Snapshot, status: RoundStatus) -> bool:
    stopped = status.stop_time
    return snapshot.gateway is not None and stopped is not None and snapshot.now - stopped < PATIENCE
