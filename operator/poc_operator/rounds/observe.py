# SPDX-License-Identifier: Apache-2.0
"""What happened to each slot since the last plan, as its pod's report tells.

``_RULES`` is read from top to bottom; the first rule that has something to say about a slot wins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, RetryPolicy
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.eligibility import computes_other_work, holder, may_replace, why_not_ready
from poc_operator.planning.queue import taken_over
from poc_operator.planning.snapshot import Loss, WorkEvent
from poc_operator.rounds.allowance import nobody_works
from poc_operator.rounds.counters import (
    contradiction,
    counted,
    doubt,
    is_doubted,
    is_settled,
    settled_before,
    told_counts,
    undelivered,
    with_losses,
)
from poc_operator.rounds.leaving import lease_end, lease_over, leave, why_leaving
from poc_operator.rounds.loss import lose, release, silent_for_long, stall, stalled_for_long, why_ended
from poc_operator.rounds.slots import free_pods, given_up
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from poc_operator.rounds.stop import is_of_slot
from vllm_poc.wire.answers import PowState, StatusResponse, StopReason

_COMPUTING = (PowState.GENERATING, PowState.VALIDATING)
#: What pods stop for by other orders than the round's own.
_STOPS: Mapping[str, Loss] = {
    StopReason.SERVER_ENDS: Loss.STOPPED,
    StopReason.LEASE_EXPIRED: Loss.LEASE_EXPIRED,
    StopReason.PREEMPTED: Loss.PREEMPTED,
}


@dataclass(frozen=True, kw_only=True)
class SlotView:
    """One slot, its pod, and what the pod says."""

    snapshot: RoundSnapshot
    slot: Assignment
    pod: PodView | None
    report: PodReport

    @property
    def status(self) -> StatusResponse | None:
        """The pod's status, if it answered."""
        return self.report.status

    @property
    def ours(self) -> bool:
        """Whether the pod's last work was this slot of this round."""
        status = self.status
        return status is not None and status.round_id == self.snapshot.round.id and is_of_slot(status, self.slot)

    @property
    def computing(self) -> bool:
        """Whether the pod computes anything."""
        return self.status is not None and self.status.state in _COMPUTING

    @property
    def contradiction(self) -> str | None:
        """Why the pod's counters cannot be true, if they cannot."""
        if self.status is None:
            return None
        capacity = self.snapshot.partition_of(self.slot).capacity
        settled = settled_before(self.snapshot, self.slot, capacity)
        return contradiction(self.slot, self.status, capacity, reach=self.snapshot.reach, settled_before=settled)

    @property
    def ending(self) -> bool:
        """Whether the round is being stopped or suspended."""
        return self.snapshot.round.status.stop_time is not None


Change = tuple[Assignment, WorkEvent | None]

Rule = Callable[[SlotView], Change | None]


def _idle_slot(view: SlotView) -> Change | None:
    return None if view.slot.state.active else (view.slot, None)


def _pod_gone(view: SlotView) -> Change | None:
    if view.pod is not None:
        return None
    return lose(view.snapshot, view.slot, Loss.POD_GONE, f"pod {view.slot.pod} is gone", unbind=True)


def _server_ended(view: SlotView) -> Change | None:
    """The server that was given the slot is no more, as the kubelet says: nobody computes the slot.

    The kubelet's word may be late: a server that listens, and does not answer in time, may be the next one, with the
    slot. Which one it is its session tells as soon as it answers.
    """
    if view.status is not None or view.pod is None or (view.pod.ip and view.report.listens):
        return None
    why = why_ended(view.slot, view.pod, view.snapshot.round.spec.port)
    return None if why is None else lose(view.snapshot, view.slot, Loss.RESTARTED, why, unbind=True)


def _leaves(view: SlotView) -> Change | None:
    """The pod must give the slot back: it has stopped, or has not yet."""
    snapshot, slot, status = view.snapshot, view.slot, view.status
    stays = snapshot.pod_of(slot) is not None
    if view.pod is None or (stays and slot.state is not SlotState.LEAVING):
        return None
    why = f"pod {slot.pod} was told to stop" if stays else why_leaving(slot, view.pod)
    if status is None:
        if lease_over(snapshot, slot):
            return _lease_over(view, why)
        return leave(snapshot, slot, f"{why}, and does not answer: {view.report.error or 'it has no address'}"), None
    if view.report.started is not None:
        return leave(snapshot, slot.model_copy(update={"session": view.report.started}), why), None
    known = view.ours and slot.session in (None, status.session_id)
    if known and not view.contradiction:
        slot = _count(view, slot.model_copy(update={"session": status.session_id}), status)
    computes = view.report.in_flight or (view.ours and status.state is PowState.GENERATING)
    if computes or (view.ending and known and not is_settled(snapshot, slot)):
        return leave(snapshot, slot, why), None
    return lose(snapshot, slot, Loss.POD_LEFT, why, unbind=True)


def _unreachable(view: SlotView) -> Change | None:
    if view.status is not None:
        return None
    stalled = view.slot.state is SlotState.STALLED
    if stalled and lease_over(view.snapshot, view.slot):
        return _lease_over(view, f"pod {view.slot.pod} does not answer")
    if silent_for_long(view.snapshot, view.slot) and not stalled:
        return _stalls(view, view.slot, f"has not answered for {view.report.silent_seconds:.0f} s: {view.report.error}")
    return view.slot.model_copy(update={"error": view.report.error}), None


def _lease_over(view: SlotView, why: str) -> Change:
    """The pod has stopped by itself, though it cannot say so: what it delivered last, the gateway alone knows."""
    return lose(view.snapshot, view.slot, Loss.LEASE_EXPIRED, f"{why}, and its lease has run out", unbind=True)


def _stalls(view: SlotView, slot: Assignment, what: str) -> Change:
    """The pod must be stopped. Its lease is not renewed meanwhile."""
    stalled, event = stall(slot, what)
    return stalled.model_copy(update={"lease_end_time": lease_end(view.snapshot, slot)}), event


def _start_accepted(view: SlotView) -> Change | None:
    if view.slot.state is not SlotState.STARTING or view.report.started is None or view.slot.lost is not None:
        return None  # what is lost is begun anew
    return _confirm(view.slot, view.report.started), None


def _doubtful(view: SlotView) -> Change | None:
    status = view.status
    if status is None or not (view.ours and view.computing):
        return None
    known = view.slot.state is SlotState.STARTING or view.slot.session == status.session_id
    why = view.contradiction
    return doubt(view.slot, why) if known and why is not None else None


def _results_lost(view: SlotView) -> Change | None:
    """The slot's pod would not send again what the gateway lacks: it is told anew where to begin.

    The gateway has lost it, as after a restore, for all that it had told before. Or the pod tells what cannot be true,
    and no pod gets on.
    """
    snapshot, slot = view.snapshot, view.slot
    goes_on = view.report.resumes and snapshot.round.spec.retry.policy is RetryPolicy.RESUME
    runs = view.ours and view.computing and slot.state is SlotState.RUNNING
    if not (runs and goes_on) or view.ending:
        return None
    if snapshot.has_lost(slot):
        why = "the gateway has fewer results of the slot than it had told"
        return lose(snapshot, slot, Loss.RESULTS_LOST, why)
    if is_doubted(slot) and nobody_works(snapshot, snapshot.round.status):
        return lose(snapshot, slot, Loss.STALLED, slot.error or "")
    return None


def _runs(view: SlotView) -> Change | None:
    """The pod computes this round: adopt it if unconfirmed, take its counters if it is the known one."""
    status = view.status
    if status is None or not (view.ours and view.computing):
        return None
    if view.slot.state is SlotState.STARTING and view.slot.lost is None:
        return _count(view, _confirm(view.slot, status.session_id), status), None
    if view.slot.session != status.session_id:
        return None
    slot = _count(view, view.slot, status)
    if not stalled_for_long(view.snapshot, slot):
        return _told_of(view, _confirm(slot, status.session_id))
    if slot.state is SlotState.STALLED:
        return slot.model_copy(update={"error": view.slot.error}), None
    return _stalls(view, slot, f"has made no progress for {view.report.stalled_seconds:.0f} s")


def _not_started_yet(view: SlotView) -> Change | None:
    if view.slot.state is not SlotState.STARTING:
        return None
    released = _released(view)
    if released is not None or view.report.start_error is None:
        return released or (view.slot, None)
    error = f"pod {view.slot.pod} was told to start: {view.report.start_error}"
    event = None if error == view.slot.error else WorkEvent.warn_of(view.slot, Reason.WORK_LOST, error)
    return view.slot.model_copy(update={"error": error}), event


def _released(view: SlotView) -> Change | None:
    """The pod does not begin the slot: it refuses, or computes other work, or another round is to have it first."""
    snapshot, slot, report = view.snapshot, view.slot, view.report
    if report.in_flight:
        return None
    if report.refusal is not None:
        return release(snapshot, slot, Loss.REFUSED, f"pod {slot.pod} refused to start: {report.refusal[1]}")
    taker = taken_over(snapshot, slot)
    if taker is not None:
        return release(snapshot, slot, Loss.PREEMPTED, f"pod {slot.pod} is for round {taker.name}, which goes first")
    if computes_other_work(snapshot, report) and not may_replace(snapshot, report):
        return release(snapshot, slot, Loss.PREEMPTED, f"pod {slot.pod} computes {holder(snapshot, report)}")
    if view.pod is not None and not view.pod.ready and _has_better(snapshot):
        why = f"pod {slot.pod} is not ready ({why_not_ready(snapshot, view.pod)})"
        return release(snapshot, slot, Loss.REFUSED, why)
    return None


def _has_better(snapshot: RoundSnapshot) -> bool:
    slots = snapshot.round.status.assignments
    doubtful = given_up(slots)
    return any(pod.uid not in doubtful for pod in free_pods(snapshot, slots))


def _stopped(view: SlotView) -> Change | None:
    """The known session has stopped: as told, at the end of its nonces, by failure, or by somebody."""
    status = view.status
    if status is None or not view.ours or view.slot.session != status.session_id:
        return None
    slot = view.slot if view.contradiction else _count(view, view.slot, status)
    if view.slot.state is SlotState.STALLED and not view.ending:
        return lose(view.snapshot, slot, Loss.STALLED, view.slot.error or f"pod {slot.pod} stalled")
    if status.state is PowState.FAILED:
        return lose(view.snapshot, slot, Loss.FAILED, f"pod {slot.pod} failed: {status.error}", unbind=True)
    if view.ending or slot.next >= view.snapshot.partition_of(slot).capacity:
        if not is_settled(view.snapshot, slot):
            return slot, None
        return _told_of(view, slot.model_copy(update={"state": SlotState.DONE, "error": None}))
    loss = _STOPS.get(status.stop_reason or "")
    why = "was stopped by somebody else" if loss is None else f"stopped: {status.stop_message}"
    ends = status.stop_reason == StopReason.SERVER_ENDS  # it takes no more work
    return lose(view.snapshot, slot, loss or Loss.STOPPED, f"pod {slot.pod} {why}", unbind=ends)


def _forgot(view: SlotView) -> Change | None:
    """The pod says nothing of the slot: it has restarted, or never speaks of rounds that are over."""
    if view.status is None or view.slot.session != view.status.session_id:
        why = f"pod {view.slot.pod} restarted and forgot the round"
        return lose(view.snapshot, view.slot, Loss.RESTARTED, why, unbind=True)
    if view.ending and view.report.in_flight:
        return view.slot, None  # a reference pod says that it is idle while its last passes run: the stop tells
    if view.ending:
        return view.slot.model_copy(update={"state": SlotState.DONE, "error": None}), None
    if _had_other_round(view):
        why = f"pod {view.slot.pod} was given another round"
        return lose(view.snapshot, view.slot, Loss.PREEMPTED, why, unbind=True)
    if view.computing and not view.ours:
        why = f"pod {view.slot.pod} was given other work"
        return lose(view.snapshot, view.slot, Loss.STOPPED, why, unbind=True)
    return lose(view.snapshot, view.slot, Loss.STOPPED, f"pod {view.slot.pod} stopped and says nothing about it")


def _had_other_round(view: SlotView) -> bool:
    """Whether the pod's last work was another round of this cluster: the slot was stopped for that, or had ended."""
    status, owner = view.status, view.snapshot.owner
    if status is None or owner is None or status.owner != owner:
        return False
    return status.round_id not in (None, view.snapshot.round.id)


_RULES: tuple[Rule, ...] = (
    _idle_slot,
    _pod_gone,
    _server_ended,
    _leaves,
    _start_accepted,
    _unreachable,
    _results_lost,
    _doubtful,
    _runs,
    _not_started_yet,
    _stopped,
    _forgot,
)


def observe(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Bring every slot up to date with its pod's report."""
    changes = [_observe_slot(snapshot, slot) for slot in step.status.assignments]
    events = [event for _, event in changes if event]
    return step.extended(assignments=[slot for slot, _ in changes], events=events)


def _observe_slot(snapshot: RoundSnapshot, recorded: Assignment) -> Change:
    recorded = with_losses(snapshot, recorded) if snapshot.has_lost(recorded) else recorded
    slot = counted(snapshot, recorded)  # what is lost goes on from there
    view = SlotView(snapshot=snapshot, slot=slot, pod=snapshot.existing_pod_of(slot), report=snapshot.report_of(slot))
    seen, event = next(change for rule in _RULES if (change := rule(view)))
    return counted(snapshot, _with_restarts(view, seen)), event


def _with_restarts(view: SlotView, slot: Assignment) -> Assignment:
    """Remember how often the server of a pod that answers has restarted: once more, and it has lost the slot.

    Of a pod that does not answer, what it had restarted before anybody looked is not held against it.
    """
    if view.pod is None or slot.uid != view.pod.uid or not slot.state.active:
        return slot
    if view.status is None and slot.restarts is not None:
        return slot
    restarts = view.pod.container(view.snapshot.round.spec.port).restarts
    return slot if slot.restarts == restarts else slot.model_copy(update={"restarts": restarts})


def _confirm(slot: Assignment, session: str) -> Assignment:
    update = {"state": SlotState.RUNNING, "session": session, "lost": None, "lease_end_time": None, "error": None}
    return slot.model_copy(update=update)


def _told_of(view: SlotView, slot: Assignment) -> Change:
    """Name the pod if it said that it has delivered what the gateway has not got."""
    why = undelivered(view.snapshot, view.slot)
    if why is None:
        return slot, None
    doubted, event = doubt(view.slot, why)
    return slot.model_copy(update={"error": doubted.error}), event


def _count(view: SlotView, slot: Assignment, status: StatusResponse) -> Assignment:
    # What is recorded and more than the pod says, the gateway has told; else the pod would not be believed.
    counters: dict[str, object] = {"next": max(slot.next, status.next_index), "error": None}
    if view.computing:
        counters["leased"] = status.lease_remaining_seconds is not None
    if view.report.resumes or view.snapshot.gateway is None:
        counters |= told_counts(view.snapshot, slot, status)
    # Else only the gateway knows what was delivered, and the pod, which will be gone, must not have said more.
    return slot.model_copy(update=counters)
