# SPDX-License-Identifier: Apache-2.0
"""What to do next about a fleet: which of its objects are to be applied, and what its status says.

Pods of an old revision are left alone. They are replaced when somebody deletes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType, merge_conditions
from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import Download, DownloadState
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.download import DownloadSeen, download, job_name, waits_for
from poc_operator.fleets.healing import Finding, Healed, faulty_gpus, heal
from poc_operator.fleets.merge import PatchError, covers
from poc_operator.fleets.progress import Watched
from poc_operator.fleets.render import Object, render
from poc_operator.fleets.resolve import Refusal, Resolved, Surroundings, resolve
from poc_operator.fleets.stages import cannot_run, pod_list, stages_of
from poc_operator.observed import PodView

#: Kind and name of an object of the fleet's namespace.
Key = tuple[str, str]

_REVISION_LABEL = "controller-revision-hash"


def key_of(body: Mapping[str, Any]) -> Key:
    """Return kind and name of an object."""
    return str(body["kind"]), str(body["metadata"]["name"])


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """What one plan of a fleet sees.

    ``objects`` are those with the fleet's label. ``settled`` has the versions of objects that were applied and do not
    look like what was wanted, since the API server writes some values in another way. ``refused`` is what became of
    the last objects that could not be applied. ``health`` is what was seen of the pods' engines, ``memory_errors``
    how many their GPUs have had, and ``not_evicted`` why pods could not be evicted: each by the pods' uids.
    ``download`` is what is seen of the download that is under way.
    """

    fleet: PoCFleet
    around: Surroundings
    now: datetime
    objects: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    pods: Sequence[PodView] = ()
    settled: Mapping[Key, str] = field(default_factory=dict)
    refused: Refusal | None = None
    health: Mapping[str, Watched] = field(default_factory=dict)
    memory_errors: Mapping[str, int] = field(default_factory=dict)
    not_evicted: Mapping[str, str] = field(default_factory=dict)
    download: DownloadSeen = field(default_factory=DownloadSeen)


@dataclass(frozen=True, kw_only=True)
class FleetStep:
    """What to apply, in this order, which pods to evict, and the status to record.

    ``needs_token`` says that the pods' Secret must exist.
    """

    status: FleetStatus
    apply: Sequence[Object] = ()
    evict: Sequence[PodView] = ()
    needs_token: bool = False


def plan(seen: FleetSnapshot) -> FleetStep:
    """Return the fleet's next step."""
    fleet = seen.fleet
    resolved = resolve(fleet.spec, seen.around, chosen=fleet.status.gpu_product)
    wanted = resolved if isinstance(resolved, Refusal) else _wanted(seen, resolved)
    healed = heal(fleet, seen.pods, seen.health, seen.now, seen.not_evicted)
    if isinstance(wanted, Refusal):
        status = _status(
            seen, None if isinstance(resolved, Refusal) else resolved, wanted, healed, fleet.status.download
        )
        return FleetStep(status=status, evict=healed.evict)
    assert not isinstance(resolved, Refusal)  # noqa: S101 - for the type checker
    objects, record = wanted
    return FleetStep(
        status=_status(seen, resolved, seen.refused, healed, record),
        apply=[body for body in objects if _differs(seen, body)],
        evict=healed.evict,
        needs_token=not fleet.spec.auth.open,
    )


def _wanted(seen: FleetSnapshot, resolved: Resolved) -> tuple[Sequence[Object], Download | None] | Refusal:
    """Return the objects that there should be now, and what to record of the download of the model."""
    job = seen.objects.get(("Job", job_name(seen.fleet, resolved)))
    try:
        wanted = render(seen.fleet, resolved, seen.around)
        ahead = download(seen.fleet, resolved, seen.around, job, seen.download)
    except PatchError as error:
        return Refusal(Reason.POD_TEMPLATE_INVALID, str(error))
    strangers = (foreign(seen.fleet, seen.objects[key]) for body in wanted if (key := key_of(body)) in seen.objects)
    stranger = next((stranger for stranger in strangers if stranger is not None), None)
    if stranger is not None:
        return stranger
    now = [body for body in wanted if not (ahead.holds and body["kind"] == "StatefulSet")]
    return [*now, *([ahead.job] if ahead.job is not None else [])], ahead.record


def foreign(fleet: PoCFleet, found: Mapping[str, Any]) -> Refusal | None:
    """Return why an object that has the name of one of the fleet's is not to be touched; None if it is the fleet's.

    One without an owner is adopted if it has the fleet's label: it was left behind with ``--cascade=orphan``.
    """
    metadata = found["metadata"]
    kind, name = found.get("kind", "object"), metadata["name"]
    owners = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("controller")]
    if any(owner["uid"] != fleet.metadata.uid for owner in owners):
        owner = owners[0]
        why = f"belongs to {owner['kind']} {owner['name']} (uid {owner['uid']}): delete that, or wait until it is gone"
    elif (metadata.get("labels") or {}).get(FLEET_LABEL) != fleet.metadata.name and not owners:
        why = "exists and belongs to no fleet: delete it, or give the fleet another name"
    else:
        return None
    return Refusal(Reason.OBJECT_CONFLICT, f'{kind} "{name}" {why}')


def _differs(seen: FleetSnapshot, wanted: Object) -> bool:
    key = key_of(wanted)
    found = seen.objects.get(key)
    if found is None:
        return True
    if "deletionTimestamp" in found["metadata"]:
        return False  # it is created anew when it is gone
    return found["metadata"]["resourceVersion"] != seen.settled.get(key) and not covers(found, wanted)


def _status(
    seen: FleetSnapshot,
    resolved: Resolved | None,
    refusal: Refusal | None,
    healed: Healed,
    ahead: Download | None,
) -> FleetStatus:
    fleet, old = seen.fleet, seen.fleet.status
    found = seen.objects.get(("StatefulSet", fleet.metadata.name), {})
    told = found.get("status") or {}
    newest = str(told.get("updateRevision") or old.update_revision)
    pods = [pod for pod in seen.pods if pod.stays]
    outdated = [pod for pod in pods if newest and pod.labels.get(_REVISION_LABEL, newest) != newest]
    ready = sum(pod.ready for pod in pods)
    listed = pod_list(old.pods, pods, fleet.spec.port, seen.memory_errors)
    verdict = _Verdict.of(seen, refusal, pods, outdated, ready)
    if refusal is None and ahead is not None:
        verdict = verdict.with_download(ahead, seen.download.pods, exists=bool(found))
    verdict = verdict.with_findings([*healed.findings, *faulty_gpus(listed), *_unmonitored(seen)])
    rate = resolved.nonces_per_minute if resolved is not None else None
    return old.model_copy(
        update={
            "observed_generation": fleet.metadata.generation,
            "replicas": len(pods),
            "ready_replicas": ready,
            "updated_replicas": len(pods) - len(outdated),
            "ready": f"{ready}/{fleet.spec.replicas}",
            "reason": verdict.ready[1],
            "message": verdict.ready[2],
            "current_revision": next((pod.labels[_REVISION_LABEL] for pod in outdated), newest),
            "update_revision": newest,
            "selector": f"{FLEET_LABEL}={fleet.metadata.name}",
            "model": resolved.model if resolved is not None else fleet.spec.model.path or "",
            "gpu_product": (resolved.gpu_product or "") if resolved is not None else old.gpu_product,
            "gpu_count": resolved.gpu_count if resolved is not None else 0,
            "seq_len": resolved.seq_len if resolved is not None else None,
            "k_dim": resolved.k_dim if resolved is not None else None,
            "expected_nonces_per_minute": rate * fleet.spec.replicas if rate is not None else None,
            "pods": listed,
            "restarts": list(healed.restarts),
            "download": ahead,
            "conditions": merge_conditions(old.conditions, verdict.conditions(seen.now, fleet.metadata.generation)),
        }
    )


def _unmonitored(seen: FleetSnapshot) -> list[Finding]:
    if not seen.fleet.spec.metrics.pod_monitor or seen.around.pod_monitors:
        return []
    text = (
        "the cluster does not know PodMonitors: install Prometheus Operator with its CRDs, or set metrics.podMonitor "
        "to false"
    )
    return [(Reason.POD_MONITOR_UNKNOWN, text)]


_Told = tuple[bool, Reason, str]


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """The fleet's conditions, each with status, reason and message."""

    ready: _Told
    progressing: _Told
    degraded: _Told
    stalled: _Told

    @classmethod
    def of(
        cls,
        seen: FleetSnapshot,
        refusal: Refusal | None,
        pods: Sequence[PodView],
        outdated: Sequence[PodView],
        ready: int,
    ) -> "_Verdict":
        fine = (Reason.ALL_REPLICAS_READY, f"all {seen.fleet.spec.replicas} replicas are ready")
        if refusal is not None:
            told = (refusal.reason, refusal.message)
            return cls(ready=(False, *told), progressing=(False, *told), degraded=(True, *told), stalled=(True, *told))
        failing = [pod for pod in pods if cannot_run(pod)]
        waits = _waits_for(seen, pods, ready)
        if waits is not None:
            told = (
                (Reason.PODS_FAILING, f"{stages_of(failing, seen.fleet.spec.port)} cannot run")
                if failing
                else (Reason.REPLICAS_NOT_READY, waits)
            )
            return cls(
                ready=(False, *told),
                progressing=(True, *told),
                degraded=(bool(failing), *told),
                stalled=(False, *told),
            )
        if outdated:
            told = (
                Reason.PODS_OUTDATED,
                f"{len(outdated)} of {len(pods)} pods have an old revision: delete them when no round runs",
            )
            return cls(ready=(True, *told), progressing=(True, *told), degraded=(False, *fine), stalled=(False, *fine))
        return cls(ready=(True, *fine), progressing=(False, *fine), degraded=(False, *fine), stalled=(False, *fine))

    def with_download(self, ahead: Download, pods: Sequence[PodView], *, exists: bool) -> "_Verdict":
        """Return the verdict while the StatefulSet, which may exist, waits for a model."""
        if ahead.state is DownloadState.DOWNLOADED:
            return self
        failed = ahead.state is DownloadState.FAILED
        told = (
            (Reason.DOWNLOAD_FAILED, f"the download of {ahead.model} has failed: {ahead.message}")
            if failed
            else (Reason.DOWNLOADING, waits_for(ahead, pods))
        )
        return _Verdict(
            ready=(self.ready[0] and exists, *told),
            progressing=(True, *told),
            degraded=(True, *told) if failed else self.degraded,
            stalled=(False, *told),
        )

    def with_findings(self, findings: Sequence[Finding]) -> "_Verdict":
        """Return the verdict with what was found of pods that are ready, beside what is said already."""
        if not findings:
            return self
        reason = self.degraded[1] if self.degraded[0] else findings[0][0]
        texts = ([self.degraded[2]] if self.degraded[0] else []) + [text for _, text in findings]
        return replace(self, degraded=(True, reason, "; ".join(texts)))

    def conditions(self, now: datetime, generation: int) -> list[Condition]:
        told = {
            ConditionType.READY: self.ready,
            ConditionType.PROGRESSING: self.progressing,
            ConditionType.DEGRADED: self.degraded,
            ConditionType.STALLED: self.stalled,
        }
        return [
            Condition(
                type=kind,
                status="True" if holds else "False",
                reason=reason,
                message=message,
                observed_generation=generation,
                last_transition_time=now,
            )
            for kind, (holds, reason, message) in told.items()
        ]


def _waits_for(seen: FleetSnapshot, pods: Sequence[PodView], ready: int) -> str | None:
    """Say what the fleet waits for until all of its replicas are ready; None if they are."""
    wanted = seen.fleet.spec.replicas
    if len(pods) > wanted:
        return f"{len(pods) - wanted} pods are to go"
    if ready == wanted:
        # Until then it is not known which revision is the newest.
        return None if _is_observed(seen) else "Kubernetes has yet to see the StatefulSet as it is"
    waiting = [pod for pod in pods if not pod.ready]
    missing = wanted - len(pods)
    texts = ([f"{missing} pods are to be created"] if missing else []) + (
        [stages_of(waiting, seen.fleet.spec.port)] if waiting else []
    )
    return f"{ready} of {wanted} replicas are ready: {', '.join(texts)}"


def _is_observed(seen: FleetSnapshot) -> bool:
    """Whether the StatefulSet's status is about its present spec."""
    found = seen.objects.get(("StatefulSet", seen.fleet.metadata.name))
    if found is None:
        return False
    told = found.get("status") or {}
    return bool(told.get("observedGeneration") == found["metadata"].get("generation") and told.get("updateRevision"))
