# SPDX-License-Identifier: Apache-2.0
"""What becomes of a slot whose pod lost it, cannot do it, or gets nothing done.

A lost slot is given out again within the budget, or given up. Where its server is known to have ended, it waits for
the first free pod, be it the old one after it has loaded. So does a slot that its pod refuses or has no time for:
nothing of it was computed, so nothing counts against the budget. A pod that stalls is stopped and told again, and in
the end evicted.
"""

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, RetryPolicy, StallAction
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import PodView, is_container_session
from poc_operator.planning.eligibility import loads
from poc_operator.planning.queue import taken_over
from poc_operator.planning.snapshot import Action, DeletePod, Loss, StopPod, WorkEvent
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep


def lose(
    snapshot: RoundSnapshot, slot: Assignment, loss: Loss, why: str, *, unbind: bool = False
) -> tuple[Assignment, WorkEvent | None]:
    """Return the slot after its work was lost, and the Event that tells the user.

    With ``unbind`` the slot waits for a free pod; else its own pod is told again. What the cluster's infrastructure
    ended does not count against the budget, nor a deleted pod that has stopped in time, nor what only a lease has
    ended, nor what a round took over that goes before this one, whatever becomes of that, nor what a gateway has lost.
    """
    slot = slot.model_copy(update={"lease_end_time": None, "unconfirmed": False})
    if snapshot.round.status.stop_time is not None:
        return slot.model_copy(update={"state": SlotState.DONE, "error": why}), None
    if snapshot.is_whole(slot):
        return slot.model_copy(update={"state": SlotState.DONE, "error": None}), None
    why, loss, free = _cause(snapshot, slot, loss, why)
    slot = slot.model_copy(update={"disruptions": slot.disruptions + free})
    refusal = _exhausted(snapshot, slot, free=free)
    if refusal is not None:
        failed = slot.model_copy(update={"state": SlotState.FAILED, "error": f"{why}; {refusal}"})
        return failed, WorkEvent.warn_of(slot, Reason.WORK_LOST, f"{why}; {refusal}")
    again = _reset(slot, _start_index(snapshot, slot), why)
    if snapshot.gateway is not None:
        again = again.model_copy(update={"lost": snapshot.now})
    message = f"{why}; starts again at {_where(snapshot, slot, again.start)}"
    event = WorkEvent.warn_of(slot, Reason.WORK_LOST, message, loss)
    return (_unbound(again) if unbind or loss is Loss.PREEMPTED else again), event


def _cause(snapshot: RoundSnapshot, slot: Assignment, loss: Loss, why: str) -> tuple[str, Loss, bool]:
    """Return why the slot was lost, the same in a word, and whether it counts against no budget."""
    taker = taken_over(snapshot, slot)
    if taker is not None:
        return f"pod {slot.pod} is for round {taker.name}, which goes first", Loss.PREEMPTED, True
    if loss in (Loss.PREEMPTED, Loss.RESULTS_LOST):
        return why, loss, True
    if loss is Loss.STOPPED and snapshot.known_rounds is None:
        return why, loss, True  # perhaps for another round, which nobody knows yet
    # One that stalled was evicted by us, and would be again and again.
    evicted = slot.state is SlotState.STALLED and snapshot.round.spec.stall.action is StallAction.DELETE_POD
    if snapshot.disrupted(slot) and not evicted:
        return f"{why} (disrupted by the cluster)", Loss.DISRUPTED, True
    if loss is Loss.POD_LEFT and snapshot.deleted(slot):
        return why, loss, True  # as in a scale-down: it has delivered what it had and confirmed its stop
    return why, loss, loss is Loss.LEASE_EXPIRED


def _where(snapshot: RoundSnapshot, slot: Assignment, start: int) -> str:
    """Say where a lost slot starts again."""
    if not _resumes(snapshot, slot):
        return "index 0, since such a pod cannot resume"
    return f"index {start}{', or later if the gateway has more by then' if snapshot.gateway is not None else ''}"


def _resumes(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the slot's pod could go on where it was: what is started by a container's session could not."""
    return snapshot.report_of(slot).resumes and not is_container_session(slot.session)


def _unbound(slot: Assignment) -> Assignment:
    nobody = {"state": SlotState.WAITING, "pod": None, "uid": None, "session": None, "restarts": None, "stalls": 0}
    nobody |= {"end": None}  # others may compute what this pod was dealt
    return slot.model_copy(update={**nobody, "previous": slot.pod, "lease_end_time": None, "unconfirmed": False})


def release(snapshot: RoundSnapshot, slot: Assignment, loss: Loss, why: str) -> tuple[Assignment, WorkEvent | None]:
    """Return the slot that its pod has not begun and cannot begin: it waits for a free pod.

    The Event is sent once, however often the pod is asked again.
    """
    if snapshot.round.status.stop_time is not None:
        return slot.model_copy(update={"state": SlotState.DONE, "error": why}), None
    counts = {"attempts": slot.attempts + 1, "disruptions": slot.disruptions + 1, "error": why}
    event = None if why == slot.error else WorkEvent.warn_of(slot, Reason.WORK_LOST, why, loss)
    return _unbound(slot).model_copy(update=counts), event


def why_ended(slot: Assignment, pod: PodView, port: int) -> str | None:
    """Return why the server that the slot was given to has certainly ended; None if it may compute."""
    server = pod.container(port)
    if server.ended:
        return f"pod {pod.name} does not run ({server.ended})"
    if slot.restarts is not None and server.restarts > slot.restarts:
        return f"pod {pod.name} restarted"
    return None


def _exhausted(snapshot: RoundSnapshot, slot: Assignment, *, free: bool) -> str | None:
    limits = snapshot.round.spec.retry
    if limits.policy is RetryPolicy.NEVER:
        return "spec.retry.policy is Never"
    if free:
        return None
    if slot.attempts - slot.disruptions > limits.backoff_limit_per_slot:
        return f"spec.retry.backoffLimitPerSlot of {limits.backoff_limit_per_slot} is used up"
    disruptions = sum(other.disruptions for other in snapshot.round.status.assignments)
    if snapshot.round.status.totals.retries - disruptions >= limits.backoff_limit:
        return f"spec.retry.backoffLimit of {limits.backoff_limit} is used up"
    return None


def _start_index(snapshot: RoundSnapshot, slot: Assignment) -> int:
    resume = snapshot.round.spec.retry.policy is RetryPolicy.RESUME
    return slot.delivered if resume else 0


def _reset(slot: Assignment, start: int, why: str) -> Assignment:
    """Forget the lost session; keep what was delivered below ``start``."""
    kept = start > 0
    return slot.model_copy(
        update={
            "state": SlotState.STARTING,
            "session": None,
            "start": start,
            "next": start,
            "end": None,
            "delivered": start,
            "valid": slot.valid if kept else 0,
            "valid_before": slot.valid if kept else 0,
            "rejected": slot.rejected if kept else 0,
            "rejected_before": slot.rejected if kept else 0,
            "attempts": slot.attempts + 1,
            "error": why,
        }
    )


#: Seconds that a decode step may take before a pod counts as stalled. The network's hardware takes up to 0.17 s.
STEP_SECONDS = 0.5
#: The same in times of the longest batch that the pod was seen to compute.
STALLED_BATCHES = 2


def stalled_for_long(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the slot's pod computes without progress for longer than ``stall.afterSeconds``.

    In the decode scheme nothing moves within a batch, so that a pod may take the time of a batch at least.
    """
    return _counts(snapshot) and snapshot.report_of(slot).stalled_seconds >= _patience(snapshot, slot)


def _patience(snapshot: RoundSnapshot, slot: Assignment) -> float:
    spec = snapshot.round.spec
    if spec.decode is None:
        return spec.stall.after_seconds
    seen = STALLED_BATCHES * snapshot.report_of(slot).batch_seconds
    return max(spec.stall.after_seconds, STEP_SECONDS * spec.decode.max_tokens, seen)


def silent_for_long(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the slot's pod has not answered for longer than ``stall.unreachableSeconds``, and does not load."""
    limit = snapshot.round.spec.stall.unreachable_seconds
    is_silent = snapshot.report_of(slot).silent_seconds >= limit
    return _counts(snapshot) and is_silent and not loads(snapshot, snapshot.pod_of(slot))


def _counts(snapshot: RoundSnapshot) -> bool:
    # A round that ends stops its pods anyway, and waits for each no longer than for any other.
    return snapshot.round.status.stop_time is None


def stall(slot: Assignment, what: str) -> tuple[Assignment, WorkEvent]:
    """Return the slot whose pod must be stopped first, and the Event that tells the user."""
    error = f"pod {slot.pod} {what}"
    stalled = slot.model_copy(update={"state": SlotState.STALLED, "stalls": slot.stalls + 1, "error": error})
    return stalled, WorkEvent.warn_of(slot, Reason.STALLED, error)


def heal_stalls(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Stop the pods that stalled; one that stalled before, or does not answer, is deleted if the round allows it."""
    if step.status.stop_time:
        return step
    stalled = [slot for slot in step.status.assignments if slot.state is SlotState.STALLED]
    actions = [action for slot in stalled if (action := _cure(snapshot, slot)) is not None]
    return step.extended(actions=actions)


def _cure(snapshot: RoundSnapshot, slot: Assignment) -> Action | None:
    pod = snapshot.pod_of(slot)
    if pod is None:
        return None
    answers = snapshot.report_of(slot).status is not None
    if snapshot.round.spec.stall.action is StallAction.DELETE_POD and (slot.stalls > 1 or not answers):
        return DeletePod(pod=pod)
    # A pod that does not answer may still compute: its slot must not be given to another one.
    return StopPod(pod=pod, round_id=snapshot.round.id) if answers else None
