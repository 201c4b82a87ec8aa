# SPDX-License-Identifier: Apache-2.0
"""What is done about pods that are ready and get nothing done, and about those whose GPUs fail.

Such a pod is evicted, so that its StatefulSet makes it anew: one at a time, and no more in an hour than the spec
allows. That it is to go stands in the status before anybody is told; a pod that gets on meanwhile stays. One whose GPUs
fail may still compute, so it goes once no round has given it a slot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import FleetPod, Restart
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.forecast import Eviction, Spares
from poc_operator.fleets.progress import Watched, hung
from poc_operator.fleets.stages import GpuErrors
from poc_operator.observed import PodView

#: For so long a restart counts, and errors of GPUs do.
BUDGET_TIME = timedelta(hours=1)
_SPARES = {Reason.POD_HUNG: Spares.NOTHING, Reason.GPU_FAULTY: Spares.SLOTS}

Finding = tuple[Reason, str]


@dataclass(frozen=True, kw_only=True)
class Healed:
    """The restarts to record, the pods to evict now, and what to tell.

    ``failing`` says what becomes of the pods whose GPUs fail, by their uids.
    """

    restarts: Sequence[Restart]
    evict: Sequence[Eviction] = ()
    findings: Sequence[Finding] = ()
    failing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What is seen of pods, by their uids: their engines, the errors of their GPUs, and what they have a slot of."""

    health: Mapping[str, Watched] = field(default_factory=dict)
    gpu_errors: Mapping[str, GpuErrors] = field(default_factory=dict)
    needed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Case:
    """A pod to replace, and why."""

    pod: PodView
    reason: Reason
    why: str


def heal(
    fleet: PoCFleet,
    pods: Iterable[PodView],
    seen: Sight,
    now: datetime,
    refused: Mapping[str, str],
) -> Healed:
    """Return what to do about the fleet's hung pods, and about those whose GPUs fail.

    ``refused`` says why pods could not be evicted, by their uids.
    """
    spec = fleet.spec.healing
    kept = [restart for restart in fleet.status.restarts if now - restart.time < BUDGET_TIME]
    recorded = {restart.uid for restart in kept}
    found = [case for pod in pods if pod.ready and pod.stays and (case := _case(fleet, pod, seen))]
    if not spec.enabled:
        return _told(kept, (), [(case, "healing.enabled is false") for case in found])
    due = [case for case in found if not _computes(case, seen)]
    new = [_restart(case, now) for case in due if case.pod.uid not in recorded]
    if len(kept) >= spec.restarts_per_hour or any(case.pod.uid in recorded for case in due):
        new = []
    going = {restart.uid for restart in new[:1]} | recorded
    evict = [Eviction(case.pod, _SPARES[case.reason]) for case in due if case.pod.uid in recorded]
    told = [(case, _computes(case, seen) or _next(case.pod, fleet, going, refused)) for case in found]
    return _told([*kept, *new[:1]], evict, told)


def _computes(case: _Case, seen: Sight) -> str | None:
    """Say what a pod that may compute well is needed for; None if nothing keeps it."""
    return seen.needed.get(case.pod.uid) if _SPARES[case.reason] is Spares.SLOTS else None


def _case(fleet: PoCFleet, pod: PodView, seen: Sight) -> _Case | None:
    """Return why a pod is to be replaced; None if it is well. That it hangs comes first: nothing is lost then."""
    spec, found = fleet.spec.healing, seen.health.get(pod.uid)
    # What was seen of an earlier container says nothing of this one.
    if found is not None and found.look.server == pod.server(pod.serving_port(fleet.spec.port)):
        why = hung(found, spec.hung_seconds)
        if why is not None:
            return _Case(pod, Reason.POD_HUNG, why)
    errors = seen.gpu_errors.get(pod.uid)
    if errors is None or errors.lately < spec.gpu_errors_per_hour:
        return None
    return _Case(pod, Reason.GPU_FAULTY, f"{errors.lately} errors of its GPUs within an hour")


def _restart(case: _Case, now: datetime) -> Restart:
    pod = case.pod
    return Restart(name=pod.name, uid=pod.uid, time=now, reason=case.reason, node=pod.node, message=case.why)


def _told(restarts: Sequence[Restart], evict: Sequence[Eviction], then: Sequence[tuple[_Case, str]]) -> Healed:
    """Return what to do, and what to say of each pod: ``then`` is what becomes of it."""
    hangs = [
        (case.reason, f"{case.pod.name} is hung: {case.why}; {what}")
        for case, what in then
        if case.reason is Reason.POD_HUNG
    ]
    failing = {case.pod.uid: what for case, what in then if case.reason is Reason.GPU_FAULTY}
    return Healed(restarts=restarts, evict=evict, findings=hangs, failing=failing)


def _next(pod: PodView, fleet: PoCFleet, going: set[str], refused: Mapping[str, str]) -> str:
    """Say what becomes of a pod that is to be replaced."""
    if pod.uid in refused:
        return refused[pod.uid]
    if pod.uid in going:
        return "it is evicted"
    if len(going) >= fleet.spec.healing.restarts_per_hour:
        return f"healing.restartsPerHour of {fleet.spec.healing.restarts_per_hour} is used up: look at its log"
    return "it is evicted after the other one"


def faulty_gpus(pods: Iterable[FleetPod], healed: Healed) -> list[Finding]:
    """Tell of the pods whose GPUs have had errors since the operator first asked them, and of those replaced for it."""
    pods = list(pods)
    present = {pod.uid for pod in pods}
    found = [
        f"the GPUs of {pod.name} have had {errors} since they were first asked: {_then(pod, healed)}"
        for pod in pods
        if (errors := _gpu_errors(pod))
    ]
    found += [
        f"{restart.name} was replaced after {restart.message}: `kubectl cordon {restart.node}`, if these go on"
        for restart in healed.restarts
        if restart.reason == Reason.GPU_FAULTY and restart.uid not in present
    ]
    return [(Reason.GPU_FAULTY, text) for text in found]


def _then(pod: FleetPod, healed: Healed) -> str:
    """Say what becomes of a pod whose GPUs have had errors, and what a person must do."""
    cordon = f"`kubectl cordon {pod.node}`"
    what = healed.failing.get(pod.uid)
    return f"{what}; {cordon} keeps the next one away" if what else f"{cordon}, then delete the pod"


def _gpu_errors(pod: FleetPod) -> str:
    """Name the errors of a pod's GPUs; empty without any."""
    memory = (pod.memory_errors or 0) - (pod.memory_errors_before or 0)
    texts = [f"{memory} double-bit memory errors"] if memory > 0 else []
    texts += [f"{pod.xid_errors} Xid errors (the last is Xid {pod.last_xid})"] if pod.xid_errors else []
    return " and ".join(texts)
