# SPDX-License-Identifier: Apache-2.0
"""What is done about pods that are ready and get nothing done, and what is said of GPUs whose memory fails.

A hung pod is evicted, so that its StatefulSet makes it anew: one at a time, and no more in an hour than the spec
allows. That it is to go stands in the status before anybody is told; a pod that gets on meanwhile stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import FleetPod, Restart
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.progress import Watched, hung
from poc_operator.observed import PodView

#: For so long a restart counts.
BUDGET_TIME = timedelta(hours=1)

Finding = tuple[Reason, str]


@dataclass(frozen=True, kw_only=True)
class Healed:
    """The restarts to record, the pods to evict now, and what to tell."""

    restarts: Sequence[Restart]
    evict: Sequence[PodView] = ()
    findings: Sequence[Finding] = ()


def heal(
    fleet: PoCFleet,
    pods: Iterable[PodView],
    health: Mapping[str, Watched],
    now: datetime,
    refused: Mapping[str, str],
) -> Healed:
    """Return what to do about the fleet's hung pods. ``refused`` says why pods could not be evicted, by their uids."""
    spec = fleet.spec.healing
    kept = [restart for restart in fleet.status.restarts if now - restart.time < BUDGET_TIME]
    recorded = {restart.uid for restart in kept}
    found = [
        (pod, why) for pod in pods if pod.ready and pod.stays and (why := _hung(pod, health, spec.hung_seconds, fleet))
    ]
    if not spec.enabled:
        return Healed(restarts=kept, findings=[_finding(pod, why, "healing.enabled is false") for pod, why in found])
    new = [Restart(name=pod.name, uid=pod.uid, time=now, message=why) for pod, why in found if pod.uid not in recorded]
    if len(kept) >= spec.restarts_per_hour or any(pod.uid in recorded for pod, _ in found):
        new = []
    going = {restart.uid for restart in new[:1]} | recorded
    return Healed(
        restarts=[*kept, *new[:1]],
        evict=[pod for pod, _ in found if pod.uid in recorded],
        findings=[_finding(pod, why, _next(pod, fleet, going, refused)) for pod, why in found],
    )


def _hung(pod: PodView, health: Mapping[str, Watched], seconds: int, fleet: PoCFleet) -> str | None:
    found, server = health.get(pod.uid), pod.server(pod.serving_port(fleet.spec.port))
    # What was seen of an earlier container says nothing of this one.
    return hung(found, seconds) if found is not None and found.look.server == server else None


def _finding(pod: PodView, why: str, then: str) -> Finding:
    return Reason.POD_HUNG, f"{pod.name} is hung: {why}; {then}"


def _next(pod: PodView, fleet: PoCFleet, going: set[str], refused: Mapping[str, str]) -> str:
    """Say what becomes of a hung pod."""
    if pod.uid in refused:
        return refused[pod.uid]
    if pod.uid in going:
        return "it is evicted"
    if len(going) >= fleet.spec.healing.restarts_per_hour:
        return f"healing.restartsPerHour of {fleet.spec.healing.restarts_per_hour} is used up: look at its log"
    return "it is evicted after the other one"


def faulty_gpus(pods: Iterable[FleetPod]) -> list[Finding]:
    """Tell of the pods whose GPUs have had errors since the operator first asked them."""
    return [
        (
            Reason.GPU_FAULTY,
            f"the GPUs of {pod.name} have had {errors} since they were first asked: `kubectl cordon {pod.node}`, then "
            "delete the pod",
        )
        for pod in pods
        if (errors := _gpu_errors(pod))
    ]


def _gpu_errors(pod: FleetPod) -> str:
    """Name the errors of a pod's GPUs; empty without any."""
    memory = (pod.memory_errors or 0) - (pod.memory_errors_before or 0)
    texts = [f"{memory} double-bit memory errors"] if memory > 0 else []
    texts += [f"{pod.xid_errors} Xid errors (the last is Xid {pod.last_xid})"] if pod.xid_errors else []
    return " and ".join(texts)
