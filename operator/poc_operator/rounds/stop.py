# SPDX-License-Identifier: Apache-2.0
"""Which pods must stop: those of a round that ends or is suspended, orphans, and those whose work is replaced.

An orphan computes a slot of the round that is not its own: a start may arrive long after its sender gave up or died,
and a pod that was given up for silent may compute on. It is stopped, and until then nobody else is told to compute
its slot.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.eligibility import computes_other_work, holder, may_replace
from poc_operator.planning.queue import full_name
from poc_operator.planning.snapshot import StopPod, WorkEvent
from poc_operator.rounds.counters import is_settled, names_slot
from poc_operator.rounds.leaving import lease_end
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from vllm_poc.wire.answers import PowState, StatusResponse


def replace_other_work(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Stop older work on the pods that were given a slot."""
    if step.status.stop_time or snapshot.blocked:
        return step
    held = [(slot, pod) for slot in step.status.assignments if (pod := _held_pod(snapshot, slot)) is not None]
    name = full_name(snapshot.round)
    stops = [StopPod(pod=pod, round_id=_round_id(snapshot, slot), preempted_by=name) for slot, pod in held]
    known = {slot.uid for slot in snapshot.round.status.assignments if slot.state.active}
    events = [_event(snapshot, slot) for slot, _ in held if slot.uid not in known]
    return step.extended(actions=stops, events=events)


def _held_pod(snapshot: RoundSnapshot, slot: Assignment) -> PodView | None:
    report = snapshot.report_of(slot)
    waits = slot.state is SlotState.STARTING and computes_other_work(snapshot, report)
    return snapshot.pod_of(slot) if waits and may_replace(snapshot, report) else None


def _round_id(snapshot: RoundSnapshot, slot: Assignment) -> str | None:
    status = snapshot.report_of(slot).status
    return status.round_id if status is not None else None


def _event(snapshot: RoundSnapshot, slot: Assignment) -> WorkEvent:
    held_by = holder(snapshot, snapshot.report_of(slot))
    message = f"pod {slot.pod} computes {held_by}: stopping it (spec.concurrencyPolicy is Replace)"
    return WorkEvent(reason=Reason.REPLACED, message=message, warning=True)


def is_of_slot(status: StatusResponse, slot: Assignment) -> bool:
    """Whether the pod's round, if it is this one, is this slot from where it was last given out."""
    return names_slot(status, slot) and status.start_index == slot.start


def computed_slots(snapshot: RoundSnapshot) -> frozenset[tuple[int, int]]:
    """Return the slots that pods say they compute, by node and group."""
    configs = (status.config for _, status in _computing(snapshot))
    return frozenset((config.node_id, config.group_id) for config in configs if config is not None)


def stop_orphans(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Stop the pods that compute a slot of this round without having it."""
    slots = {slot.uid: slot for slot in step.status.assignments if slot.state.active}
    orphans = [pod for pod, status in _computing(snapshot) if not _owns(slots.get(pod.uid), status)]
    return step.extended(actions=[StopPod(pod=pod, round_id=snapshot.round.id) for pod in orphans])


def _computing(snapshot: RoundSnapshot) -> list[tuple[PodView, StatusResponse]]:
    """Return the pods that say they compute this round."""
    polled = [(pod, report.status) for pod in snapshot.existing_pods if (report := snapshot.reports.get(pod.uid))]
    return [
        (pod, status)
        for pod, status in polled
        if status is not None and status.state is PowState.GENERATING and status.round_id == snapshot.round.id
    ]


def _owns(slot: Assignment | None, status: StatusResponse) -> bool:
    # What is lost is not adopted: the pod begins anew, and may have begun there before.
    return slot is not None and slot.lost is None and is_of_slot(status, slot)


#: So long a pod that does not answer is waited for when its round ends. One that answers is waited for until it has
#: stopped, or `spec.stopDeadlineSeconds` have passed.
STOP_PATIENCE = timedelta(seconds=90)
_LEFT = "computes on after"


def running_pods(snapshot: RoundSnapshot) -> list[PodView]:
    """Pods that compute this round, or may do so without our knowledge."""
    return [
        pod
        for slot in snapshot.round.status.assignments
        if slot.state.active and (pod := snapshot.existing_pod_of(slot)) is not None and _may_compute(snapshot, slot)
    ]


def _may_compute(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    report = snapshot.report_of(slot)
    status = report.status
    if status is None or report.in_flight:
        return True
    return status.round_id == snapshot.round.id and status.state is PowState.GENERATING


def stop_orders(snapshot: RoundSnapshot, pods: Iterable[PodView]) -> list[StopPod]:
    """Return the orders for these pods. What does not answer may compute other work by now, and is not told."""
    heard = (pod for pod in pods if snapshot.reports.get(pod.uid, PodReport()).status is not None)
    return [StopPod(pod=pod, round_id=snapshot.round.id) for pod in heard]


def stop_pods(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Stop every pod that still computes, and settle the slots that nobody computes.

    A slot is not settled before the gateway was asked for what its pod says to be delivered. One whose pod does not
    answer is settled without its word in the end: it may compute on until its lease runs out. After
    ``spec.stopDeadlineSeconds`` every slot is settled: a round ends, whatever a pod answers.
    """
    stop_time = step.status.stop_time
    if stop_time is None:
        return step
    pods = running_pods(replace(snapshot, work=snapshot.round.model_copy(update={"status": step.status})))
    patient = snapshot.now - stop_time < STOP_PATIENCE
    busy = {pod.uid for pod in pods if patient or _is_heard_of(snapshot.reports.get(pod.uid))}
    busy |= {slot.uid for slot in step.status.assignments if slot.uid is not None and not is_settled(snapshot, slot)}
    unheard = {pod.uid for pod in pods} - busy
    limit = snapshot.round.spec.stop_deadline_seconds
    if snapshot.seconds_since(stop_time) >= limit:
        slots = [_give_up(snapshot, slot, busy, unheard) for slot in step.status.assignments]
        return step.extended(assignments=slots, actions=stop_orders(snapshot, pods))
    assignments = [_settle(snapshot, slot, busy, unheard) for slot in step.status.assignments]
    return step.extended(assignments=assignments, actions=stop_orders(snapshot, pods))


def _give_up(snapshot: RoundSnapshot, slot: Assignment, busy: set[str], unheard: set[str]) -> Assignment:
    """Settle the slot although its pod has not confirmed that it stopped."""
    settled = _settle(snapshot, slot, set(), busy | unheard)
    if slot.uid not in busy or not slot.state.active:
        return settled
    limit = snapshot.round.spec.stop_deadline_seconds
    return settled.model_copy(update={"error": f"pod {slot.pod} {_LEFT} {limit} s (spec.stopDeadlineSeconds)"})


def is_left(slot: Assignment) -> bool:
    """Whether the slot was settled although its pod had not stopped."""
    return slot.state is SlotState.DONE and slot.error is not None and _LEFT in slot.error


def _is_heard_of(report: PodReport | None) -> bool:
    return report is not None and (report.status is not None or report.in_flight)


def _settle(snapshot: RoundSnapshot, slot: Assignment, busy: set[str], unheard: set[str]) -> Assignment:
    if slot.state in (SlotState.DONE, SlotState.FAILED) or slot.uid in busy:
        return slot
    unconfirmed = slot.uid in unheard
    end = lease_end(snapshot, slot) if unconfirmed else None
    return slot.model_copy(update={"state": SlotState.DONE, "unconfirmed": unconfirmed, "lease_end_time": end})
