# SPDX-License-Identifier: Apache-2.0
"""Pods that compute other work: another round of ours, or somebody else's. ``spec.onBusy`` says what is done."""

from poc_operator.model.conditions import Reason
from poc_operator.model.pods import PodReport, PodView
from poc_operator.model.spec import BusyPolicy
from poc_operator.model.status import Assignment, SlotState
from poc_operator.plan.snapshot import RoundEvent, Snapshot, Step, StopPod
from vllm_poc.wire.messages import PowState


def computes_other_work(snapshot: Snapshot, report: PodReport) -> bool:
    """Whether the pod generates for another round than this one."""
    status = report.status
    return status is not None and status.state is PowState.GENERATING and status.round_id != snapshot.round.id


def busy_pods(snapshot: Snapshot) -> list[PodView]:
    """Return the ready pods that compute other work."""
    return [pod for pod, report in snapshot.answering if computes_other_work(snapshot, report)]


def holder(report: PodReport) -> str:
    """Say what the pod computes."""
    status = report.status
    if status is None:
        return "no answer"
    height = f", height {status.config.block_height}" if status.config else ""
    return f"round {status.round_id or 'without id'}{height}"


def may_replace(snapshot: Snapshot, report: PodReport) -> bool:
    """Whether this round may stop what the pod computes: older work only, so that two rounds never take turns."""
    status = report.status
    if snapshot.round.spec.on_busy is not BusyPolicy.REPLACE or status is None:
        return False
    return status.config is None or status.config.block_height < snapshot.round.spec.block_height


def replace_other_work(snapshot: Snapshot, step: Step) -> Step:
    """Stop older work on the pods that were given a slot."""
    if step.status.stop_time:
        return step
    held = [(slot, pod) for slot in step.status.assignments if (pod := _held_pod(snapshot, slot)) is not None]
    stops = [StopPod(pod=pod, round_id=_round_id(snapshot, slot)) for slot, pod in held]
    known = {slot.uid for slot in snapshot.round.status.assignments}
    events = [_event(slot, snapshot.report_of(slot)) for slot, _ in held if slot.uid not in known]
    return step.extended(actions=stops, events=events)


def _held_pod(snapshot: Snapshot, slot: Assignment) -> PodView | None:
    report = snapshot.report_of(slot)
    waits = slot.state is SlotState.STARTING and computes_other_work(snapshot, report)
    return snapshot.pod_of(slot) if waits and may_replace(snapshot, report) else None


def _round_id(snapshot: Snapshot, slot: Assignment) -> str | None:
    status = snapshot.report_of(slot).status
    return status.round_id if status is not None else None


def _event(slot: Assignment, report: PodReport) -> RoundEvent:
    message = f"pod {slot.pod} computes {holder(report)}: stopping it (spec.onBusy is Replace)"
    return RoundEvent(reason=Reason.REPLACED, message=message, warning=True)
