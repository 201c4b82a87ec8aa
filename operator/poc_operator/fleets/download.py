# SPDX-License-Identifier: Apache-2.0
"""The download of a model into the cache, before pods need it.

One Job for each model, revision and PVC does it, with the pods' own image, variables and volumes, and where the pods
may run. Until it has succeeded the StatefulSet stays as it is, or does not exist yet. That it has is recorded: the Job
itself is deleted by Kubernetes after a while, and one that failed is then made anew. What it has downloaded is in one
PVC: another one of its name is empty, so the model is downloaded again. The last models that were downloaded before are
recorded too: who goes back to one of them asks no hub.

The template of a Job never changes. So one that has not succeeded is deleted when the spec asks for another template,
and made anew when it is gone. What it has downloaded stays in the PVC, and the next one goes on from there. A Job that
nothing asks for any more, as that of an earlier model, is deleted too.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import MAX_EARLIER, Download, DownloadedModel, DownloadState
from poc_operator.apis.v1alpha1.meta import DOWNLOAD_LABEL
from poc_operator.fleets.merge import PatchError, without_volume
from poc_operator.fleets.render import CONTAINER, HASH, Object, claim_of, object_of, pod_template
from poc_operator.fleets.resolve import TOKEN_VOLUME, Resolved, Surroundings
from poc_operator.fleets.strangers import foreign
from poc_operator.observed import PodView
from poc_operator.planning.eligibility import why_waiting

#: Port of the download's container that tells how far it is.
PORT = 8000
#: So long Kubernetes keeps a Job that has ended, and tries again.
_TTL_SECONDS = 600
_TRIES = 3
#: Conditions of a Job that does nothing any more.
_ENDS = frozenset({"Complete", "Failed"})
_GRACE_SECONDS = 5
#: Fields of the pods' spec that the download's pod has too.
_OF_THE_POD = (
    "affinity",
    "automountServiceAccountToken",
    "dnsConfig",
    "dnsPolicy",
    "enableServiceLinks",
    "hostAliases",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "volumes",
)
#: Fields of the pods' container that the download's container has too.
_OF_THE_CONTAINER = ("envFrom", "image", "imagePullPolicy", "securityContext", "volumeMounts")
#: Variables that the download must not have: it asks the hub, and nobody asks it.
_NOT_FOR_DOWNLOADS = frozenset(
    {"HF_HUB_OFFLINE", "VLLM_POC_TOKEN", "VLLM_POC_TOKEN_FILE", "VLLM_POC_OPEN", "VLLM_POC_CALLBACK_ALLOW"}
)


@dataclass(frozen=True, kw_only=True)
class DownloadSeen:
    """What is seen of a download: its pods, and what its running pod says of its percent, if it does.

    ``claim`` is the uid of its PVC: empty if there is none, None if that is not known.
    """

    pods: Sequence[PodView] = ()
    percent: int | None = None
    claim: str | None = None


@dataclass(frozen=True, kw_only=True)
class DownloadStep:
    """The Job to make, if one is missing, and what to record. ``holds`` says that the StatefulSet must wait.

    ``outdated`` says that the Job that there is has another template, and is to be deleted.
    """

    job: Object | None = None
    record: Download | None = None
    outdated: bool = False

    @property
    def holds(self) -> bool:
        """Whether the StatefulSet must wait."""
        return self.record is not None and self.record.state is not DownloadState.DOWNLOADED


def revision_of(args: Sequence[str]) -> str | None:
    """Return the revision that flags of vLLM name, the last one as vLLM reads them; None for the default branch."""
    found = [value for argument, after in zip_longest(args, args[1:]) if (value := _revision_in(argument, after))]
    return found[-1] if found else None


def _revision_in(argument: str, following: str | None) -> str | None:
    name, equals, value = argument.partition("=")
    return (value if equals else following) if name == "--revision" else None


def job_name(fleet: PoCFleet, resolved: Resolved) -> str:
    """Return the name of the Job: another one for each model, revision and PVC."""
    what = "\0".join((resolved.model, _revision(fleet, resolved) or "", claim_of(fleet) or ""))
    return f"{fleet.metadata.name}-download-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def _revision(fleet: PoCFleet, resolved: Resolved) -> str | None:
    return revision_of([*resolved.args, *(fleet.spec.engine_args or [])])


def download(
    fleet: PoCFleet,
    resolved: Resolved,
    around: Surroundings,
    jobs: Mapping[str, Mapping[str, Any]],
    seen: DownloadSeen,
) -> DownloadStep:
    """Return what to do about the download. ``jobs`` are the Jobs as the API server has them, by name. PatchError."""
    if not fleet.spec.cache.download:
        return DownloadStep(record=None)
    name, told = job_name(fleet, resolved), fleet.status.download
    known = _downloaded(told, seen, jobs)
    old = told if told is not None and told.job == name else _again(known.pop(name, None))
    step = _step(fleet, resolved, around, jobs.get(name), seen, old)
    if step.record is None:
        return step
    earlier = [one for one in known.values() if one.job != name][-MAX_EARLIER:]
    return replace(step, record=step.record.model_copy(update={"earlier": earlier}))


def _downloaded(
    told: Download | None, seen: DownloadSeen, jobs: Mapping[str, Mapping[str, Any]]
) -> dict[str, DownloadedModel]:
    """Return the models that were downloaded, by the names of their Jobs, the last one at the end.

    Those of which no PVC is known were in the one that is gone, if one is. The last Job may have ended since.
    """
    if told is None:
        return {}
    found = {one.job: one for one in told.earlier}
    job = jobs.get(told.job)
    has_ended = job is not None and _is_done(job) and not _is_going(job) and not _is_lost(told, job, seen)
    if told.state is DownloadState.DOWNLOADED or has_ended:
        found[told.job] = DownloadedModel(job=told.job, model=told.model, claim=told.claim)
    is_gone = seen.claim == "" or _is_in_another(told, seen)
    return {name: one for name, one in found.items() if one.claim or not is_gone}


def _again(one: DownloadedModel | None) -> Download | None:
    """Return the record of a model that was downloaded before."""
    if one is None:
        return None
    return Download(job=one.job, model=one.model, claim=one.claim, state=DownloadState.DOWNLOADED, percent=100)


def _step(
    fleet: PoCFleet,
    resolved: Resolved,
    around: Surroundings,
    job: Mapping[str, Any] | None,
    seen: DownloadSeen,
    old: Download | None,
) -> DownloadStep:
    """Return what to do about the download, of which ``old`` was recorded."""
    name = job_name(fleet, resolved)
    lost = _is_lost(old, job, seen)
    # A Job that goes on while its PVC is lost has filled that one.
    claim = old.claim if old is not None and old.claim and (job is not None or not lost) else seen.claim or ""
    if old is not None and old.state is DownloadState.DOWNLOADED and not lost:
        return DownloadStep(record=old.model_copy(update={"claim": claim}))
    record, wanted = Download(job=name, model=resolved.model, claim=claim), _job(fleet, resolved, around)
    if job is None:
        # What an earlier Job said is told until the next one runs.
        failed = old is not None and old.state is DownloadState.FAILED
        said = {"state": old.state, "message": old.message} if old is not None and failed else {}
        return DownloadStep(job=wanted, record=record.model_copy(update=said))
    if lost or _is_going(job) or not (_is_done(job) or _is_like(job, wanted)):
        return DownloadStep(record=record, outdated=not _is_going(job))
    return DownloadStep(record=record.model_copy(update=_state(job, seen)))


def _is_lost(old: Download | None, job: Mapping[str, Any] | None, seen: DownloadSeen) -> bool:
    """Whether what was downloaded is not in the PVC that there is, or nobody knows whether it is.

    That is so of a Job that has ended without a record, while the spec asked for another model.
    """
    is_done = job is not None and _is_done(job)
    return _is_in_another(old, seen) or (is_done and seen.claim == "") if old is not None else is_done


def _is_in_another(old: Download, seen: DownloadSeen) -> bool:
    """Whether the PVC of a download is gone, or another one has its name."""
    if seen.claim == "":
        return old.state is DownloadState.DOWNLOADED or bool(old.claim)
    return seen.claim is not None and old.claim not in ("", seen.claim)


def is_held(fleet: PoCFleet, seen: DownloadSeen) -> bool:
    """Whether the StatefulSet waits for a download, as far as the status tells."""
    told = fleet.status.download
    if not fleet.spec.cache.download or told is None:
        return False
    return told.state is not DownloadState.DOWNLOADED or _is_in_another(told, seen)


def is_abandoned(fleet: PoCFleet, body: Mapping[str, Any], wanted: str) -> bool:
    """Whether an object is a Job that downloads what the fleet asked for before; ``wanted`` is the name of another.

    One that has ended takes nothing from anybody, and Kubernetes deletes it.
    """
    name = str(body["metadata"]["name"])
    if body["kind"] != "Job" or name == wanted or _ended(body) or _is_going(body) or foreign(fleet, body):
        return False
    labels = body["spec"]["template"]["metadata"].get("labels") or {}
    return bool(labels.get(DOWNLOAD_LABEL) == name)  # another Job of the user's has not


def _is_done(job: Mapping[str, Any]) -> bool:
    return "Complete" in _ended(job)


def _is_going(job: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in job["metadata"]


def _is_like(job: Mapping[str, Any], wanted: Object) -> bool:
    """Whether a Job has the template that is wanted. One without a digest is of an older operator, and goes on."""
    digest = (job["metadata"].get("annotations") or {}).get(HASH)
    return digest is None or bool(digest == wanted["metadata"]["annotations"][HASH])


def _ended(job: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the conditions by which a Job has ended."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return {one["type"]: one for one in conditions if one["type"] in _ENDS and one.get("status") == "True"}


def _state(job: Mapping[str, Any], seen: DownloadSeen) -> dict[str, Any]:
    ended = _ended(job)
    if "Complete" in ended:
        return {"state": DownloadState.DOWNLOADED, "percent": 100}
    words = next((end for pod in seen.pods if (end := pod.container(PORT).last_end) and pod.gone), "")
    if "Failed" in ended:
        return {"state": DownloadState.FAILED, "message": words or str(ended["Failed"].get("message") or "")}
    return {"percent": seen.percent, "message": words}


def waits_for(record: Download, pods: Sequence[PodView]) -> str:
    """Say how far a download is that is under way."""
    return f"{record.model} is downloaded{_how_far(record, pods)}"


def holds_back(record: Download, pods: Sequence[PodView]) -> str:
    """Say what an update waits for whose model is not there yet."""
    if record.state is DownloadState.FAILED:
        return f"the download of {record.model} has failed: {record.message}"
    return f"downloading {record.model}{_how_far(record, pods)}"


def _how_far(record: Download, pods: Sequence[PodView]) -> str:
    if record.percent is not None:
        return f": {record.percent} %"
    waiting = next((why_waiting(pod) for pod in pods if pod.stays and not pod.ready and pod.waiting_for), "")
    return f" ({waiting})" if waiting else ""


def _job(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> Object:
    name = job_name(fleet, resolved)
    spec = without_volume(pod_template(fleet, resolved, around)["spec"], TOKEN_VOLUME)
    container = next((one for one in spec["containers"] if one["name"] == CONTAINER), None)
    if container is None:
        raise PatchError(f"spec.podTemplate.spec.containers must keep {CONTAINER}, which cache.download has to imitate")
    revision = _revision(fleet, resolved)
    variables = [one for one in container.get("env") or [] if one["name"] not in _NOT_FOR_DOWNLOADS]
    own: Object = {
        **{field: container[field] for field in _OF_THE_CONTAINER if field in container},
        "name": "download",
        "command": ["python3", "-m", "vllm_poc", "download"],
        "args": [resolved.model, *([f"--revision={revision}"] if revision is not None else []), f"--port={PORT}"],
        "env": variables,
        "ports": [{"name": "progress", "containerPort": PORT, "protocol": "TCP"}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: Object = {
        **{field: spec[field] for field in _OF_THE_POD if field in spec},
        "containers": [own],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
    }
    template = {"metadata": {"labels": {DOWNLOAD_LABEL: name}}, "spec": pod}
    body = {"backoffLimit": _TRIES, "ttlSecondsAfterFinished": _TTL_SECONDS, "template": template}
    job = object_of("batch/v1", "Job", name, fleet, body)
    # How often it is tried, and how long it is kept, are no reason to begin anew.
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
    return {**job, "metadata": {**job["metadata"], "annotations": {HASH: digest}}}
