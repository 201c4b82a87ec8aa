# SPDX-License-Identifier: Apache-2.0
"""What is done about pods that are ready and get nothing done, and about those whose GPUs fail again and again.

Such a pod is evicted, so that its StatefulSet makes it anew: one at a time, and no more in an hour than the spec
allows. That it is to go stands in the status before anybody is told; a pod that gets on meanwhile stays. One whose GPUs
fail still computes. So it goes as for an update: while no round needs it and none is expected. All other pods must be
ready then, and what replaces it must have its template.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.apis.v1alpha1.fleet_upkeep import CheckResult, FleetPod, Restart
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.forecast import Eviction, Spares, blocker, remembered, replacement_seconds
from poc_operator.fleets.progress import Watched, hung
from poc_operator.fleets.update import UpdateSeen
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import WorkEvent

#: For so long a restart counts.
BUDGET_TIME = timedelta(hours=1)
_GOES = "it is evicted"

Finding = tuple[Reason, str]


@dataclass(frozen=True, kw_only=True)
class Healed:
    """The restarts to record, the pods to evict now, and what to tell.

    ``failing`` says what is done about the pods whose GPUs fail, by their uids. ``moves`` says that a restart is new.
    """

    restarts: Sequence[Restart]
    evict: Sequence[Eviction] = ()
    findings: Sequence[Finding] = ()
    failing: Mapping[str, str] = field(default_factory=dict)
    moves: bool = False


@dataclass(frozen=True)
class Sight:
    """What is seen of a fleet's pods.

    ``health`` is what was seen of their engines, and ``refused`` why they could not be evicted, by their uids.
    ``update`` is what an update sees; without one, as while the spec is refused, no pod goes that computes.
    """

    health: Mapping[str, Watched] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    update: UpdateSeen | None = None


@dataclass(frozen=True)
class _Case:
    """A pod to replace: why it hangs, if it does, and how many errors its GPUs have had, if those are too many."""

    pod: PodView
    hangs: str | None
    errors: int

    @property
    def why(self) -> str:
        errors = f"its GPUs have had {self.errors} errors" if self.errors else ""
        return "; ".join(text for text in (self.hangs, errors) if text)


def heal(fleet: PoCFleet, pods: Iterable[PodView], seen: Sight, now: datetime) -> Healed:
    """Return what to do about the fleet's hung pods, and about those whose GPUs fail."""
    spec, own = fleet.spec.healing, [pod for pod in pods if pod.stays]
    kept = [restart for restart in fleet.status.restarts if now - restart.time < BUDGET_TIME]
    recorded = {restart.uid for restart in kept}
    found = [case for pod in own if pod.ready and (case := _case(fleet, pod, seen))]
    if not spec.enabled:
        return _told(kept, [(case, "healing.enabled is false") for case in found])
    stuck = frozenset(case.pod.uid for case in found if case.hangs)
    waits = {case.pod.uid: _kept_back(case.pod, own, stuck, seen.update) for case in found if not case.hangs}
    due = [case for case in found if waits.get(case.pod.uid) is None]
    new = [case for case in due if case.pod.uid not in recorded and (case.hangs or case.pod.uid not in seen.refused)]
    # A pod that was to go and is kept back has used nothing of the budget.
    unspent = {pod.uid for pod in own} - {case.pod.uid for case in due}
    spent = [restart.uid for restart in kept if restart.uid not in unspent]
    if len(spent) >= spec.restarts_per_hour or any(case.pod.uid in recorded for case in due):
        new = []
    going = {*spent, *(case.pod.uid for case in new[:1])}
    evict = [
        Eviction(case.pod, Spares.NOTHING if case.hangs else Spares.WORK) for case in due if case.pod.uid in recorded
    ]
    told = [(case, waits.get(case.pod.uid) or _next(case, fleet, going, seen.refused)) for case in found]
    return _told([*kept, *(_restart(case, now) for case in new[:1])], told, evict, moves=bool(new))


def _case(fleet: PoCFleet, pod: PodView, seen: Sight) -> _Case | None:
    """Return why a pod is to be replaced; None if it is well."""
    spec, found, hangs = fleet.spec.healing, seen.health.get(pod.uid), None
    # What was seen of an earlier container says nothing of this one.
    if found is not None and found.look.server == pod.server(pod.serving_port(fleet.spec.port)):
        hangs = hung(found, spec.hung_seconds)
    errors = sum(_memory_errors(one) + (one.xid_errors or 0) for one in fleet.status.pods if one.uid == pod.uid)
    errors = errors if errors >= spec.gpu_errors else 0
    return _Case(pod, hangs, errors) if hangs or errors else None


def _kept_back(pod: PodView, pods: Sequence[PodView], stuck: frozenset[str], update: UpdateSeen | None) -> str | None:
    """Say what a pod that computes waits for before it may be replaced; None if it may be."""
    is_over = update is not None and update.settled and update.old.phase in (UpdatePhase.COMPLETE, UpdatePhase.FAILED)
    if update is None or not is_over or any(one.revision != update.newest for one in pods):
        return "it stays while pods may get another template"
    others = [one for one in pods if one is not pod]
    if len(pods) < update.replicas or not all(one.ready and one.uid not in stuck for one in others):
        return "it stays until all other pods are ready"
    passed = {uid for uid, check in update.checks.items() if check.result is CheckResult.PASSED}
    if update.checks_pods and not all(one.uid in passed for one in others):
        return "it stays until all other pods have passed their self-check"
    need = replacement_seconds(update.old.startup_seconds, limit=update.startup_limit, grace=update.grace)
    needed = [one for one in update.work if one.needs(pod)]
    waits = blocker(remembered(update.old.rounds, update.work, update.now), needed, [pod], update.now, need)
    return f"it stays, waiting for {waits}" if waits is not None else None


def _restart(case: _Case, now: datetime) -> Restart:
    pod, reason = case.pod, Reason.GPU_FAULTY if case.errors else Reason.POD_HUNG
    return Restart(name=pod.name, uid=pod.uid, time=now, reason=reason, node=pod.node, message=case.why)


def _told(
    restarts: Sequence[Restart],
    then: Sequence[tuple[_Case, str]],
    evict: Sequence[Eviction] = (),
    *,
    moves: bool = False,
) -> Healed:
    """Return what to do, and what to say of each pod: ``then`` is what becomes of it."""
    hangs = [(Reason.POD_HUNG, f"{case.pod.name} is hung: {case.hangs}; {what}") for case, what in then if case.hangs]
    failing = {case.pod.uid: what for case, what in then if case.errors}
    return Healed(restarts=restarts, evict=evict, findings=hangs, failing=failing, moves=moves)


def _next(case: _Case, fleet: PoCFleet, going: set[str], refused: Mapping[str, str]) -> str:
    """Say what becomes of a pod that may be replaced."""
    if case.pod.uid in refused:
        return refused[case.pod.uid]
    if case.pod.uid in going:
        return _GOES
    if len(going) >= fleet.spec.healing.restarts_per_hour:
        used_up = f"healing.restartsPerHour of {fleet.spec.healing.restarts_per_hour} is used up"
        return used_up if case.errors else f"{used_up}: look at its log"
    return "it is evicted after the other one"


def beside(sick: Sequence[Eviction], outdated: Sequence[Eviction], unevicted: Mapping[str, str]) -> Sequence[Eviction]:
    """Return which of an update's evictions go beside those of sick pods: as a rule none, since these are away as well.

    While Kubernetes lets none of the sick go, old pods that are not ready do: its budget may wait for them.
    ``unevicted`` says why pods could not be evicted, by their uids.
    """
    if any(one.pod.uid not in unevicted for one in sick):
        return ()
    return [one for one in outdated if not (sick and one.pod.ready)]


def restarted(restart: Restart) -> WorkEvent:
    """Return the Event for a pod that is to be replaced."""
    if restart.reason != Reason.GPU_FAULTY:
        message = f"{restart.name} is hung: {restart.message}; it is evicted"
        return WorkEvent(reason=Reason.POD_HUNG, message=message, warning=True)
    cordon = f"`kubectl cordon {restart.node}` keeps the next one away from these GPUs"
    message = f"{restart.name} is to be replaced: {restart.message}; {cordon}"
    return WorkEvent(reason=Reason.GPU_FAULTY, message=message, warning=True)


def faulty_gpus(pods: Iterable[FleetPod], healed: Healed) -> list[Finding]:
    """Tell of the pods whose GPUs have had errors since the operator first asked them, and of what is to be done."""
    told = [
        f"the GPUs of {pod.name} have had {errors} since they were first asked: {_then(pod, healed)}"
        for pod in pods
        if (errors := _gpu_errors(pod))
    ]
    return [(Reason.GPU_FAULTY, text) for text in told]


def _then(pod: FleetPod, healed: Healed) -> str:
    """Say what becomes of a pod whose GPUs have had errors, and what a person can do."""
    cordon, told = f"`kubectl cordon {pod.node}`", healed.failing.get(pod.uid)
    if told == _GOES:
        return f"{told}; {cordon} keeps the next one away"
    return f"{told}; {cordon}, then delete the pod" if told else f"{cordon}, then delete the pod"


def _gpu_errors(pod: FleetPod) -> str:
    """Name the errors of a pod's GPUs; empty without any."""
    memory = _memory_errors(pod)
    texts = [f"{memory} double-bit memory errors"] if memory > 0 else []
    texts += [f"{pod.xid_errors} Xid errors (the last is Xid {pod.last_xid})"] if pod.xid_errors else []
    return " and ".join(texts)


def _memory_errors(pod: FleetPod) -> int:
    return max((pod.memory_errors or 0) - (pod.memory_errors_before or 0), 0)
