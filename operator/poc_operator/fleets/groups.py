# SPDX-License-Identifier: Apache-2.0
"""Replicas that span several Kubernetes nodes: groups of pods that a LeaderWorkerSet keeps. Pure.

The first pod of a group, its leader, has vLLM's server and is the replica's PoC pod. The others, its workers, have
engine processes alone: they have neither the fleet's label nor that of PoC pods, so no round and no Service takes them.
LeaderWorkerSet gives each pod the variables that the flags refer to.

LeaderWorkerSet makes a StatefulSet of the leaders, and another of each leader's workers. The former cannot have
``OnDelete``. Its ``partition`` keeps it from replacing leaders: those with smaller numbers stay, and are made anew from
the template of before. So leaders get a new template by their numbers, the highest first. `partition_of` follows them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from poc_operator.apis.v1alpha1.fleet import MAX_REPLICAS, PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.apis.v1alpha1.fleet_upkeep import UpdateStrategy
from poc_operator.apis.v1alpha1.meta import COMPONENT, FLEET_LABEL, GROUPS_LABEL
from poc_operator.fleets.merge import PatchError, without_volume
from poc_operator.fleets.resolve import TOKEN_VOLUME
from poc_operator.observed import PodView

Object = dict[str, Any]

#: A partition that keeps every leader as it is.
HELD = MAX_REPLICAS
#: Phases of an update whose template has passed, or is the last good one.
_TRIED = (UpdatePhase.ROLLING, UpdatePhase.STOPPED, UpdatePhase.FAILED)
#: Labels and annotations that LeaderWorkerSet gives to leaders.
_OF_SETS = "leaderworkerset.sigs.k8s.io/"
_RANK = "--node-rank"
_LEADER_RANK = f"{_RANK}=0"
#: Variables of the PoC routes, which workers do not serve.
_NOT_FOR_WORKERS = frozenset({"VLLM_POC_TOKEN", "VLLM_POC_TOKEN_FILE", "VLLM_POC_OPEN", "VLLM_POC_CALLBACK_ALLOW"})
#: Fields of the container that are about its server.
_OF_THE_SERVER = frozenset({"lifecycle", "ports", "startupProbe", "readinessProbe", "livenessProbe"})


def group_labels(name: str) -> dict[str, str]:
    """Return the label that all pods of a fleet's groups have, and no others."""
    return {GROUPS_LABEL: name}


def leader_flags(nodes: int) -> list[str]:
    """Return vLLM's flags for the leader of a group of so many pods; none for a single pod."""
    if nodes == 1:
        return []
    address = "--master-addr=$(LWS_LEADER_ADDRESS)"
    return [f"--nnodes={nodes}", _LEADER_RANK, address, "--distributed-executor-backend=mp"]


def group_spec(template: Object, container: str, nodes: int, replicas: int) -> Object:
    """Return the spec of a LeaderWorkerSet whose leaders have this template, with every leader held as it is.

    ``container`` is the name of vLLM's. PatchError if workers cannot be made from the template.
    """
    return {
        "replicas": replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            # The partition alone says which leaders may be replaced.
            "rollingUpdateConfiguration": {"maxUnavailable": "100%", "maxSurge": 0, "partition": HELD},
        },
        # A Service for each group: that of the fleet's name is for chat.
        "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
        "leaderWorkerTemplate": both_templates(template, container, nodes),
    }


def both_templates(leader: Object, container: str, nodes: int) -> Object:
    """Return the field of a LeaderWorkerSet with the templates of leaders and workers. PatchError as above."""
    return {
        "size": nodes,
        # vLLM's processes do not find each other again when one of them was restarted.
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": _worker_template(leader, container),
    }


def leader_template(revision: Object) -> Object:
    """Return the template of leaders as it was wanted, of that which their StatefulSet has."""
    metadata = dict(revision["metadata"])
    for field in ("labels", "annotations"):
        own = {key: value for key, value in (metadata.pop(field, None) or {}).items() if not key.startswith(_OF_SETS)}
        metadata |= {field: own} if own else {}
    return {**revision, "metadata": metadata}


def _worker_template(leader: Object, container: str) -> Object:
    pod = without_volume(leader["spec"], TOKEN_VOLUME)
    if all(one["name"] != container for one in pod["containers"]):
        raise PatchError(f"spec.podTemplate.spec.containers must keep {container}, from which workers are made")
    spec = {
        **pod,
        "containers": [_worker(one) if one["name"] == container else one for one in pod["containers"]],
    }
    spread = [one for one in pod.get("topologySpreadConstraints") or [] if not _spreads_leaders(one)]
    spec.pop("topologySpreadConstraints", None)
    # Labels of the user select pods that serve.
    labels = {"app.kubernetes.io/name": "vllm-poc-group", "app.kubernetes.io/managed-by": COMPONENT}
    metadata = {key: value for key, value in leader["metadata"].items() if key == "annotations"}
    return {
        "metadata": {**metadata, "labels": labels},
        "spec": {**spec, **({"topologySpreadConstraints": spread} if spread else {})},
    }


def _spreads_leaders(constraint: Mapping[str, Any]) -> bool:
    return FLEET_LABEL in ((constraint.get("labelSelector") or {}).get("matchLabels") or {})


def _worker(container: Object) -> Object:
    args = container.get("args") or []
    if _LEADER_RANK not in args:
        raise PatchError(
            f"spec.podTemplate.spec.containers must not replace the args of {container['name']} while "
            "parallelism.kubernetesNodes is more than 1: use engineArgs"
        )
    rank = f"{_RANK}=$(LWS_WORKER_INDEX)"
    own = {key: value for key, value in container.items() if key not in _OF_THE_SERVER}
    return {
        **own,
        "args": [*(rank if one == _LEADER_RANK else one for one in args), "--headless"],
        "env": [one for one in container.get("env") or [] if one["name"] not in _NOT_FOR_WORKERS],
    }


def group_ingress(name: str) -> list[Object]:
    """Return what the pods of a fleet's groups may be reached by: by each other at any port, as NCCL takes any."""
    return [{"from": [{"podSelector": {"matchLabels": group_labels(name)}}]}]


def partition_of(
    fleet: PoCFleet,
    leaders: Mapping[str, Any] | None,
    present: int,
    pods: Iterable[tuple[int, PodView]],
    *,
    evicted: frozenset[str],
    names: Mapping[str, str],
    digest: str | None,
) -> int:
    """Return the partition for a LeaderWorkerSet whose template is as it is wanted.

    ``leaders`` is its StatefulSet of leaders, ``present`` its partition so far, and ``pods`` are the leaders with their
    numbers. ``digest`` is that of the template that the spec asks for, if it is to be had now. The partition goes down
    past leaders that have the newest revision or are on their way out. ``evicted`` are those that were evicted a moment
    ago, and ``names`` has their names, with the revisions for which they went: one that came back since has the
    template of before, and goes once more. It never goes past a leader that is not seen: what is not seen may serve. It
    goes up again for one that came back and serves by now. Until the canary has passed, leaders that go by themselves
    come back with the template of before.
    """
    status = (leaders or {}).get("status") or {}
    newest = status.get("updateRevision")
    if not newest or status.get("currentRevision") == newest:
        return HELD
    seen, tried = dict(pods), _tried(fleet, digest)
    for number in reversed(range(fleet.spec.replicas)):
        pod = seen.get(number)
        if pod is None:
            stays = number < present
        elif pod.revision == newest or (number >= present and not pod.ready):
            stays = False
        else:
            goes = names.get(pod.name) == newest and (pod.uid in evicted or not pod.ready)
            stays = not goes and (pod.stays or tried not in (None, pod.name))
        if stays:
            return number + 1 if number + 1 < fleet.spec.replicas else HELD
    return 0


def _tried(fleet: PoCFleet, digest: str | None) -> str | None:
    """Return the name of the leader on which a template is tried; None if all may have it.

    Nobody has tried a template yet that the status does not tell of.
    """
    spec, told = fleet.spec.update, fleet.status.update
    if not spec.canary or spec.strategy is UpdateStrategy.NEVER:
        return None
    if digest not in (None, told.digest):
        return ""
    return None if told.phase in _TRIED else told.canary


def with_partition(body: Object, partition: int) -> Object:
    """Return a LeaderWorkerSet with another partition."""
    spec, strategy = body["spec"], body["spec"]["rolloutStrategy"]
    rolling = {**strategy["rollingUpdateConfiguration"], "partition": partition}
    return {**body, "spec": {**spec, "rolloutStrategy": {**strategy, "rollingUpdateConfiguration": rolling}}}


def partition_in(body: Mapping[str, Any]) -> int:
    """Return the partition that a LeaderWorkerSet has."""
    rolling = (body["spec"].get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}
    return int(rolling.get("partition") or 0)


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return JSON without the fields that are null, which revisions have and the CRD of LeaderWorkerSets refuses."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return (
        [without_nulls(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
    )
