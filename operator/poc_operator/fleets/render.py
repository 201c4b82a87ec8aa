# SPDX-License-Identifier: Apache-2.0
"""The objects of a fleet, as they should be: plain JSON for server-side apply.

Each has only the fields that the operator cares about; what others set beside them stays. The annotation `HASH` tells
an object that has everything that is wanted from one that has more, of an earlier spec.

The pods are those of ``docs/examples/deployment.yaml``, with the fleet's fields put in. What the spec has no field for,
users change by ``spec.podTemplate``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_pod import GPU_RESOURCE, PRODUCT_LABEL, AccessMode, EnvVar
from poc_operator.apis.v1alpha1.meta import (
    API_VERSION,
    COMPONENT,
    FLEET_LABEL,
    GROUP,
    GROUPS_API_VERSION,
    GROUPS_KIND,
    WORKER_LABELS,
)
from poc_operator.fleets import decode
from poc_operator.fleets.groups import group_ingress, group_labels, group_spec, leader_flags
from poc_operator.fleets.merge import PatchError, merged
from poc_operator.fleets.resolve import TOKEN_VOLUME, Resolved, Surroundings

Object = dict[str, Any]

#: Name of the container that runs vLLM.
CONTAINER = "vllm"
#: The pod serves on for so long while Services forget it.
PRE_STOP_SECONDS = 5
_SHARED_MEMORY = "8Gi"
#: Where pods have the token of their PoC routes: in a folder, since a file that is mounted alone never changes.
_TOKEN_FOLDER = "/etc/vllm-poc-operator/token"  # noqa: S105 - a path
_PROBE_SECONDS = 5
#: Annotation of every object of a fleet: a digest of what was wanted when it was applied last.
HASH = f"{GROUP}/wanted"
#: Port of the Service for chat.
CHAT_PORT = 80


def render(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> Sequence[Object]:
    """Return all objects of the fleet, in the order in which they are to be created. PatchError of ``podTemplate``."""
    return [*render_beside(fleet, around), signed(_workload(fleet, resolved, around))]


def render_beside(fleet: PoCFleet, around: Surroundings) -> Sequence[Object]:
    """Return the objects beside the workload, for which it does not matter what the fleet serves."""
    own = [
        *_claims(fleet),
        # LeaderWorkerSet gives pods names of its own.
        *([_headless_service(fleet)] if fleet.spec.kubernetes_nodes == 1 else []),
        _chat_service(fleet),
        _network_policy(fleet),
        _disruption_budget(fleet),
        *([_pod_monitor(fleet)] if fleet.spec.metrics.pod_monitor and around.pod_monitors else []),
    ]
    return [signed(body) for body in own]


def object_of(api_version: str, kind: str, name: str, fleet: PoCFleet, spec: Object) -> Object:
    """Return an object that belongs to the fleet."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": fleet.KIND.kind,
        "name": fleet.metadata.name,
        "uid": fleet.metadata.uid,
        "controller": True,
    }
    metadata = {
        "name": name,
        "namespace": fleet.metadata.namespace,
        "labels": labels(fleet),
        "ownerReferences": [owner],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def signed(body: Object) -> Object:
    """Return the object with its digest in the annotation `HASH`, instead of that which it had."""
    body = {**body, "metadata": {key: value for key, value in body["metadata"].items() if key != "annotations"}}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    return {**body, "metadata": {**body["metadata"], "annotations": {HASH: digest}}}


def headless_service(fleet: PoCFleet) -> str:
    """Return the name of the Service that gives each pod a name of its own."""
    return f"{fleet.metadata.name}-pods"


def _workload(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> Object:
    nodes = fleet.spec.kubernetes_nodes
    if nodes == 1:
        return _stateful_set(fleet, resolved, around)
    template = pod_template(fleet, resolved, around)
    # What leaves the template changes it too, which the fields that are left do not show.
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
    annotations = {**template["metadata"].get("annotations", {}), HASH: digest}
    template = {**template, "metadata": {**template["metadata"], "annotations": annotations}}
    spec = group_spec(template, CONTAINER, nodes, fleet.spec.replicas)
    return object_of(GROUPS_API_VERSION, GROUPS_KIND, fleet.metadata.name, fleet, spec)


def _stateful_set(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> Object:
    spec: dict[str, Any] = {
        "replicas": fleet.spec.replicas,
        "serviceName": headless_service(fleet),
        # Pods load their model side by side, and none is replaced while a round may run on it.
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": selector_labels(fleet)},
        "template": pod_template(fleet, resolved, around),
    }
    return object_of("apps/v1", "StatefulSet", fleet.metadata.name, fleet, spec)


def _headless_service(fleet: PoCFleet) -> Object:
    # Pods that still load have a name too.
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector_labels(fleet),
        "ports": [{"name": "http", "port": fleet.spec.port, "targetPort": "http", "protocol": "TCP"}],
    }
    return object_of("v1", "Service", headless_service(fleet), fleet, spec)


def _chat_service(fleet: PoCFleet) -> Object:
    ports = [{"name": "http", "port": CHAT_PORT, "targetPort": "http", "protocol": "TCP"}]
    return object_of("v1", "Service", fleet.metadata.name, fleet, {"selector": selector_labels(fleet), "ports": ports})


def _disruption_budget(fleet: PoCFleet) -> Object:
    # A pod that is not ready has nothing to lose, and must not keep a Kubernetes node from being drained.
    spec = {
        "maxUnavailable": fleet.spec.disruption_budget.max_unavailable or fleet.spec.update.max_unavailable,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": _all_pods(fleet)},
    }
    return object_of("policy/v1", "PodDisruptionBudget", fleet.metadata.name, fleet, spec)


def _pod_monitor(fleet: PoCFleet) -> Object:
    spec = {
        "selector": {"matchLabels": selector_labels(fleet)},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
    }
    body = object_of("monitoring.coreos.com/v1", "PodMonitor", fleet.metadata.name, fleet, spec)
    body["metadata"]["labels"] = {**(fleet.spec.metrics.labels or {}), **body["metadata"]["labels"]}
    return body


def _network_policy(fleet: PoCFleet) -> Object:
    among = group_ingress(fleet.metadata.name) if fleet.spec.kubernetes_nodes > 1 else []
    spec = {
        "podSelector": {"matchLabels": _all_pods(fleet)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "http", "protocol": "TCP"}]}, *among],
    }
    return object_of("networking.k8s.io/v1", "NetworkPolicy", fleet.metadata.name, fleet, spec)


def _claims(fleet: PoCFleet) -> list[Object]:
    cache = fleet.spec.cache
    if cache.size is None:
        return []
    spec: Object = {
        "accessModes": [str(cache.access_mode or AccessMode.READ_WRITE_MANY)],
        "resources": {"requests": {"storage": cache.size}},
    }
    if cache.storage_class is not None:
        spec["storageClassName"] = cache.storage_class
    return [object_of("v1", "PersistentVolumeClaim", cache_claim(fleet), fleet, spec)]


def selector_labels(fleet: PoCFleet) -> dict[str, str]:
    """Return the labels that all pods of the fleet have that serve, whatever its spec, and no others."""
    return {FLEET_LABEL: fleet.metadata.name}


def _all_pods(fleet: PoCFleet) -> dict[str, str]:
    """Return the labels of all pods that work for the fleet. A group is lost with any of its pods."""
    return selector_labels(fleet) if fleet.spec.kubernetes_nodes == 1 else group_labels(fleet.metadata.name)


def labels(fleet: PoCFleet) -> dict[str, str]:
    """Return the labels of all that belongs to the fleet."""
    return {
        "app.kubernetes.io/name": "vllm-poc-worker",
        "app.kubernetes.io/instance": fleet.metadata.name,
        "app.kubernetes.io/managed-by": COMPONENT,
        **selector_labels(fleet),
    }


def pod_template(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> Object:
    """Return the pods' template. PatchError if ``spec.podTemplate`` does not fit."""
    base = {"metadata": {"labels": {**labels(fleet), **WORKER_LABELS}}, "spec": _pod(fleet, resolved, around)}
    patch = fleet.spec.pod_template
    if patch is None:
        return base
    more = patch.metadata.model_dump(exclude_none=True) if patch.metadata is not None else {}
    spec = merged(base["spec"], patch.spec or {}, "spec.podTemplate.spec")
    _check_containers(spec)
    return {"metadata": merged(base["metadata"], more, "spec.podTemplate.metadata"), "spec": spec}


def _check_containers(spec: Object) -> None:
    """PatchError unless the patched spec has containers with names, whose variables are a list of named ones."""
    where = "spec.podTemplate.spec.containers"
    containers = spec.get("containers")
    if not isinstance(containers, list):
        raise PatchError(f"{where} must be a list: it cannot be removed")
    for index, container in enumerate(containers):
        if not isinstance(container, dict) or not isinstance(container.get("name"), str):
            raise PatchError(f"{where}[{index}] must be an object with a name")
        variables = container.get("env", [])
        if not isinstance(variables, list) or not all(isinstance(one, dict) and "name" in one for one in variables):
            raise PatchError(f"{where}[{index}].env must be a list of objects with names")


def _pod(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> Object:
    spec = fleet.spec
    pod: Object = {
        "automountServiceAccountToken": False,
        # A Service named "vllm" would otherwise inject VLLM_PORT, which vLLM reads as its own setting.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.termination_grace_period_seconds,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(fleet, resolved, around)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}},
            {"name": "cache", **_cache(fleet)},
            *_token_volumes(fleet, around),
            *decode.volumes(spec),
        ],
    }
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in spec.image_pull_secrets]
    if spec.priority_class_name is not None:
        pod["priorityClassName"] = spec.priority_class_name
    if resolved.gpu_product is not None:
        pod["nodeSelector"] = {PRODUCT_LABEL: resolved.gpu_product}
    if spec.spread is not None:
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": spec.spread.topology_key,
                "whenUnsatisfiable": str(spec.spread.when_unsatisfiable),
                "labelSelector": {"matchLabels": selector_labels(fleet)},
            }
        ]
    return pod


def cache_claim(fleet: PoCFleet) -> str:
    """Return the name of the PVC that the operator makes for the fleet."""
    return f"{fleet.metadata.name}-cache"


def claim_of(fleet: PoCFleet) -> str | None:
    """Return the name of the PVC that the pods use, if they use one."""
    cache = fleet.spec.cache
    return cache_claim(fleet) if cache.size is not None else cache.existing_claim


def _cache(fleet: PoCFleet) -> Object:
    claim = claim_of(fleet)
    return {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}


def _token_volumes(fleet: PoCFleet, around: Surroundings) -> list[Object]:
    if fleet.spec.auth.open:
        return []
    # Whatever user the image has may read it: that is the default mode.
    secret = {"secretName": around.token_secret, "items": [{"key": "token", "path": "token"}]}
    return [{"name": TOKEN_VOLUME, "secret": secret}]


def _token_mounts(fleet: PoCFleet) -> list[Object]:
    return [] if fleet.spec.auth.open else [{"name": TOKEN_VOLUME, "mountPath": _TOKEN_FOLDER, "readOnly": True}]


def _container(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> Object:
    spec = fleet.spec
    return {
        "name": CONTAINER,
        "image": spec.image or around.image,
        "imagePullPolicy": "IfNotPresent",
        "args": _args(fleet, resolved),
        "env": _env(fleet, resolved, around),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        "ports": [{"name": "http", "containerPort": spec.port, "protocol": "TCP"}],
        # Loading takes minutes: only the startup probe is patient.
        "startupProbe": _probe(periodSeconds=5, failureThreshold=resolved.startup_seconds // _PROBE_SECONDS),
        "readinessProbe": _probe(periodSeconds=5, timeoutSeconds=5, failureThreshold=3),
        "livenessProbe": _probe(periodSeconds=10, timeoutSeconds=10, failureThreshold=6),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # Where it crashes, its last words stand in the pod's status, and so in the fleet's.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(fleet, resolved),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
            {"name": "cache", "mountPath": "/cache"},
            *_token_mounts(fleet),
            *decode.mounts(spec),
        ],
    }


def _probe(**fields: int) -> Object:
    return {"httpGet": {"path": "/health", "port": "http"}, **fields}


def _args(fleet: PoCFleet, resolved: Resolved) -> list[str]:
    spec = fleet.spec
    own = {
        "--host": spec.host,
        "--port": spec.port,
        "--served-model-name": spec.served_name,
        "--tensor-parallel-size": resolved.tensor if resolved.tensor > 1 else None,
        "--pipeline-parallel-size": resolved.pipeline if resolved.pipeline > 1 else None,
    }
    flags = [f"{flag}={value}" for flag, value in own.items() if value is not None]
    group = leader_flags(spec.kubernetes_nodes)
    return [resolved.model, "--enable-poc", *flags, *group, *resolved.args, *(spec.engine_args or [])]


def _env(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> list[Object]:
    spec = fleet.spec
    found: dict[str, Object] = {"HF_HOME": _value("/cache/huggingface"), "VLLM_CACHE_ROOT": _value("/cache/vllm")}
    if allowed := spec.callback_allow or ([around.gateway_host] if around.gateway_host is not None else []):
        found["VLLM_POC_CALLBACK_ALLOW"] = _value(",".join(allowed))
    if spec.auth.open:
        found["VLLM_POC_OPEN"] = _value("1")
    else:
        found["VLLM_POC_TOKEN_FILE"] = _value(f"{_TOKEN_FOLDER}/token")
    if spec.hugging_face.offline:
        found["HF_HUB_OFFLINE"] = _value("1")
    if spec.hugging_face.token_secret is not None:
        found["HF_TOKEN"] = _secret(spec.hugging_face.token_secret, "token")
    found |= {name: _value(value) for name, value in decode.variables(spec, resolved.reserve_bytes).items()}
    found |= {name: _value(value) for name, value in resolved.env.items()}
    found |= {variable.name: _of_user(variable) for variable in spec.env or []}
    return [{"name": name, **value} for name, value in found.items()]


def _value(text: str) -> Object:
    return {"value": text}


def _secret(name: str, key: str) -> Object:
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _of_user(variable: EnvVar) -> Object:
    if variable.value_from is None:
        return _value(variable.value or "")
    return _secret(variable.value_from.secret_key_ref.name, variable.value_from.secret_key_ref.key)


def _resources(fleet: PoCFleet, resolved: Resolved) -> Object:
    asked = fleet.spec.resources
    gpus: Mapping[str, str] = {GPU_RESOURCE: str(resolved.gpu_count)} if resolved.gpu_count else {}
    found = {"requests": dict(asked.requests or {}), "limits": {**(asked.limits or {}), **gpus}}
    return {name: quantities for name, quantities in found.items() if quantities}
