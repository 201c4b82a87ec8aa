# SPDX-License-Identifier: Apache-2.0
"""Which pod works on which slot.

The number of slots is decided once, from the pods that exist when the first of them is ready, and
then recorded: a later change would make residue classes overlap.
"""

from collections.abc import Collection, Iterable
from datetime import datetime

from poc_operator.apis.v1alpha1.round import MAX_SLOTS, MAX_WAITS, Assignment, SlotWait
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.eligibility import (
    computes_other_work,
    incompatibility,
    may_replace,
    takeable_pods,
    usable_pods,
)
from poc_operator.planning.queue import in_turn
from poc_operator.rounds.ownership import is_stray
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from vllm_poc.wire.messages import Protocol


def free_pods(snapshot: RoundSnapshot, assignments: Iterable[Assignment]) -> list[PodView]:
    """Usable pods without a slot that are this round's to take: first those that compute nothing, then those whose vLLM
    sleeps or is paused, then those whose work may be replaced. A pod whose slot was given up comes after its like.
    """
    slots = list(assignments)
    taken = {slot.uid for slot in slots if slot.state.active}
    last = given_up(slots)
    pods = [(pod, snapshot.reports[pod.uid]) for pod in takeable_pods(snapshot) if pod.uid not in taken]
    idle = [(pod, report) for pod, report in pods if not (computes_other_work(snapshot, report) or is_stray(report))]
    idle.sort(key=lambda one: (one[1].status is not None and one[1].status.paused_by is not None, one[0].uid in last))
    busy = [pod for pod, report in pods if computes_other_work(snapshot, report) and may_replace(snapshot, report)]
    return in_turn(snapshot, [pod for pod, _ in idle], busy)


def given_up(assignments: Iterable[Assignment]) -> frozenset[str]:
    """Return the uids of pods whose slots were given up: the fault may be theirs."""
    return frozenset(slot.uid for slot in assignments if slot.state is SlotState.FAILED and slot.uid is not None)


#: So long a ready pod is waited for that was never reached, or has not told what it offers: one lost connection must
#: not leave it without a slot.
CONNECT_SECONDS = 5.0


def fix_slots(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Decide the residue classes, once: as many groups as asked for, or so that every pod of today gets a slot.

    Only pods that can do the work count, and those that may once they are ready: a selector may match others, and slots
    for these would stay empty. Pods beyond `MAX_SLOTS` get none. A spec that asks for more has ended the round:
    `end.too_many_slots`.
    """
    if step.status.slots or step.status.stop_time or snapshot.missing_fleet or not usable_pods(snapshot):
        return step
    nodes = snapshot.round.spec.nodes
    if nodes.groups is None and any(_may_answer_soon(snapshot, pod) for pod in snapshot.live_pods):
        return step
    pods = sum(_may_work(snapshot, pod) for pod in snapshot.live_pods)
    groups = nodes.groups or min(-(-pods // len(nodes.ids)), MAX_SLOTS // len(nodes.ids))
    assignments = [
        Assignment(node=node, group=group, state=SlotState.WAITING) for group in range(groups) for node in nodes.ids
    ]
    return step.extended(slots=nodes.count * groups, groups=groups, assignments=assignments)


def _may_answer_soon(snapshot: RoundSnapshot, pod: PodView) -> bool:
    """Whether the pod is ready, and was never reached, or did not tell its schemes, for less than `CONNECT_SECONDS`."""
    report = snapshot.reports.get(pod.uid)
    if report is not None and report.status is not None:
        is_asked = snapshot.round.spec.protocol is Protocol.DECODE and report.schemes is None
        since = snapshot.seconds_since(snapshot.round.metadata.creation_timestamp)
        return pod.ready and is_asked and since < CONNECT_SECONDS
    if report is None or report.listens or report.heard:
        return False
    return pod.ready and report.silent_seconds < CONNECT_SECONDS and _may_serve(snapshot, pod)


def _may_serve(snapshot: RoundSnapshot, pod: PodView) -> bool:
    """Whether the pod declares the round's port, or none."""
    ports = frozenset[int]().union(*(container.ports for container in pod.containers))
    return not ports or snapshot.round.spec.port in ports


def _may_work(snapshot: RoundSnapshot, pod: PodView) -> bool:
    if not pod.ready:
        return _may_serve(snapshot, pod)
    if pod.failed_check:
        return False
    report = snapshot.reports.get(pod.uid, PodReport())
    if report.status is None:
        return report.listens or report.heard
    return incompatibility(snapshot.round.spec, report) is None


def bind_pods(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Give every slot without a pod a free one, unless none could be started."""
    if step.status.stop_time or snapshot.blocked:
        return step
    slots = step.status.assignments
    free, doubtful = free_pods(snapshot, slots), given_up(slots)
    if not any(_may_work(snapshot, pod) and pod.uid not in doubtful for pod in snapshot.live_pods):
        doubtful = frozenset()
    return step.extended(assignments=[_bind(snapshot, slot, free, doubtful) for slot in slots])


#: A slot that had no pod for fewer seconds in all is not told of.
TOLD_SECONDS = 60


def note_waits(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Record how long slots have no pod, from the start of the round until it ends or is suspended."""
    status = step.status
    runs = status.start_time is not None and status.stop_time is None
    waiting = [slot for slot in status.assignments if slot.state is SlotState.WAITING] if runs else []
    known = {(wait.node, wait.group): wait for wait in status.slot_waits}
    new = {(slot.node, slot.group): SlotWait(node=slot.node, group=slot.group) for slot in waiting}
    noted = [_noted(wait, waits=place in new, now=snapshot.now) for place, wait in (new | known).items()]
    # What is told in the end comes first, and then what may still become long.
    noted.sort(key=lambda wait: -_waited(wait, snapshot.now) - (TOLD_SECONDS if wait.since is not None else 0))
    return step.extended(slot_waits=noted[:MAX_WAITS])


def _noted(wait: SlotWait, *, waits: bool, now: datetime) -> SlotWait:
    if waits:
        return wait.model_copy(update={"since": wait.since or now})
    return wait.model_copy(update={"since": None, "seconds": _waited(wait, now)})


def _waited(wait: SlotWait, now: datetime) -> int:
    """Return for how many seconds the slot has had no pod by now."""
    return wait.seconds + (max(0, int((now - wait.since).total_seconds())) if wait.since is not None else 0)


def _bind(snapshot: RoundSnapshot, slot: Assignment, free: list[PodView], doubtful: Collection[str]) -> Assignment:
    """Take a free pod off the list for a waiting slot: the first one, but rather not that which had it before.

    A ``doubtful`` one does not get it again: it would use up the slot's retries while a good pod restarts. Where no
    other pod may come none is doubtful, or the slot would wait for nobody.
    """
    if slot.state is not SlotState.WAITING:
        return slot
    again = (pod for pod in free if pod.uid not in doubtful)
    pod = next((pod for pod in free if pod.name != slot.previous), None) or next(again, None)
    if pod is None:
        return slot
    free.remove(pod)
    return slot.model_copy(
        update={
            "state": SlotState.STARTING,
            "pod": pod.name,
            "uid": pod.uid,
            "session": None,
            "leased": snapshot.reports[pod.uid].leases,
            "displaces": is_stray(snapshot.reports[pod.uid]),
            # A slot that was lost has counted its new attempt already.
            "attempts": max(slot.attempts, 1),
            "restarts": pod.container(snapshot.round.spec.port).restarts,
            "previous": None,
        }
    )
