# SPDX-License-Identifier: Apache-2.0
"""What work waits for while no pod computes, in words that say what to do."""

from collections.abc import Callable, Sequence

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.observed import UNAUTHORIZED, PodView
from poc_operator.planning.eligibility import (
    busy_pods,
    busy_with,
    computes_other_work,
    incompatibility,
    named,
    spares_others,
    takeable_pods,
    usable_pods,
    why_not_ready,
)
from poc_operator.planning.queue import first_in_line, in_turn
from poc_operator.planning.snapshot import OtherRound, Snapshot, Work

Wait = tuple[bool, Reason, str]

#: What the message says where the pods answer, and do not take the operator's token.
UNAUTHORIZED_EVERYWHERE = "every ready pod refuses the operator's token"

Rule = Callable[[Snapshot[Work]], Wait | None]


def _no_fleet(snapshot: Snapshot[Work]) -> Wait | None:
    if snapshot.missing_fleet is None or snapshot.live_pods:
        return None
    return False, Reason.FLEET_NOT_FOUND, snapshot.missing_fleet


def _no_pod_matches(snapshot: Snapshot[Work]) -> Wait | None:
    if snapshot.live_pods:
        return None
    namespace, fleet = snapshot.work.metadata.namespace, snapshot.work.spec.fleet_ref
    if fleet is not None:
        remedy = f"kubectl -n {namespace} describe pocfleet {fleet.name}"
        return False, Reason.NO_MATCHING_PODS, f'the PoCFleet "{fleet.name}" has no pods yet: look at {remedy}'
    return (
        False,
        Reason.NO_MATCHING_PODS,
        (
            f'no pod in namespace "{namespace}" matches {snapshot.work.spec.pods}: '
            "create a PoCFleet there, or label your vLLM pods"
        ),
    )


def _no_pod_ready(snapshot: Snapshot[Work]) -> Wait | None:
    pods = snapshot.live_pods
    if any(pod.ready for pod in pods):
        return None
    waiting = named(pods, lambda pod: why_not_ready(snapshot, pod))
    pod = "the pod" if len(pods) == 1 else f"one of {len(pods)} pods"
    return False, Reason.NO_POD_READY, f"waiting for {pod} to become ready: {waiting}"


def _no_pod_answers(snapshot: Snapshot[Work]) -> Wait | None:
    if snapshot.answering:
        return None
    ready = [pod for pod in snapshot.live_pods if pod.ready]
    errors = named(ready, lambda pod: _error(snapshot, pod))
    if all(_error(snapshot, pod).startswith(UNAUTHORIZED) for pod in ready):
        return False, Reason.PODS_UNREACHABLE, f"{UNAUTHORIZED_EVERYWHERE}: {errors}"
    return (
        False,
        Reason.PODS_UNREACHABLE,
        (
            f"no pod answers the operator on port {snapshot.work.spec.port}: {errors}; "
            "check spec.port, that vLLM runs with --enable-poc, and that pods have the operator's token"
        ),
    )


def _error(snapshot: Snapshot[Work], pod: PodView) -> str:
    report = snapshot.reports.get(pod.uid)
    return (report.error if report else None) or "not polled yet"


def _all_pods_barred(snapshot: Snapshot[Work]) -> Wait | None:
    pods = [pod for pod, _ in snapshot.answering]
    if not all(pod.barred for pod in pods):
        return None
    pending = not all(pod.failed_check for pod in pods)
    reason = Reason.SELF_CHECKS_PENDING if pending else Reason.SELF_CHECK_FAILED
    return pending, reason, f"no pod may take part yet: {named(pods, lambda pod: pod.barred)}"


def _no_pod_fits(snapshot: Snapshot[Work]) -> Wait | None:
    findings = [incompatibility(snapshot.work.spec, report) for _, report in snapshot.answering]
    if None in findings:
        return None
    first = next(finding for finding in findings if finding)
    return (False, *first)


def _all_pods_busy(snapshot: Snapshot[Work]) -> Wait | None:
    others = busy_pods(snapshot)
    busy = {pod.uid for pod in others}
    if not all(pod.uid in busy or pod.barred for pod, _ in snapshot.answering):
        return None
    held = holders(snapshot, others)
    return False, Reason.PODS_BUSY, f"every pod computes another round: {held}; wait for it or stop it"


def _others_go_first(snapshot: Snapshot[Work]) -> Wait | None:
    """Pods compute nothing, and are for rounds that go before this one."""
    if not isinstance(snapshot.work, PoCRound) or any(slot.state.active for slot in snapshot.work.status.assignments):
        return None
    idle = [pod for pod in usable_pods(snapshot) if not computes_other_work(snapshot, snapshot.reports[pod.uid])]
    first = _first_of(snapshot, idle)
    if first is None:
        return None
    return False, Reason.PODS_BUSY, f"round {first.name} gets the pods first (its priority is {first.priority})"


def _first_of(snapshot: Snapshot[Work], pods: Sequence[PodView]) -> OtherRound | None:
    """Return the first of the rounds that have all these pods, or get them first; None if one is for this work."""
    first = first_in_line(snapshot, pods)
    return first if first is not None and not in_turn(snapshot, pods) else None


def is_queued(snapshot: Snapshot[Work]) -> bool:
    """Whether others have every pod that can do the work, or get it first."""
    pods = takeable_pods(snapshot)
    return _first_of(snapshot, pods) is not None if pods else spares_others(snapshot)


def holders(snapshot: Snapshot[Work], pods: Sequence[PodView]) -> str:
    """Name busy pods and what each computes."""
    return named(pods, lambda pod: busy_with(snapshot, snapshot.reports[pod.uid]))


_RULES: tuple[Rule, ...] = (
    _no_fleet,
    _no_pod_matches,
    _no_pod_ready,
    _no_pod_answers,
    _all_pods_barred,
    _no_pod_fits,
    _all_pods_busy,
    _others_go_first,
)


def waits_for(snapshot: Snapshot[Work]) -> Wait:
    """Return what work without a computing pod waits for."""
    blocked = next((wait for rule in _RULES if (wait := rule(snapshot))), None)
    return blocked or (True, Reason.STARTING, "waiting for the pods to confirm their start")
