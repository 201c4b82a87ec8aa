# SPDX-License-Identifier: Apache-2.0
"""The objects of a fleet, as they should be: plain JSON for server-side apply.

Each has only the fields that the operator cares about; what others set beside them stays. The annotation `HASH` tells
an object that has everything that is wanted from one that has more, of an earlier spec.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_pod import AccessMode
from poc_operator.apis.v1alpha1.meta import API_VERSION, GROUP
from poc_operator.fleets.pod import Object, cache_claim, labels, pod_template, selector_labels
from poc_operator.fleets.resolve import Resolved, Surroundings

#: Annotation of every object of a fleet: a digest of what was wanted when it was applied last.
HASH = f"{GROUP}/wanted"
#: Port of the Service for chat.
CHAT_PORT = 80


def render(fleet: PoCFleet, resolved: Resolved, around: Surroundings) -> Sequence[Object]:
    """Return all objects of the fleet, in the order in which they are to be created. PatchError of ``podTemplate``."""
    own = [
        *_claims(fleet),
        _headless_service(fleet),
        _chat_service(fleet),
        _network_policy(fleet),
        _disruption_budget(fleet),
        _stateful_set(fleet, resolved, around),
    ]
    return [_signed(body) for body in own]


def _object(api_version: str, kind: str, name: str, fleet: PoCFleet, spec: Object) -> Object:
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


def _signed(body: Object) -> Object:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    return {**body, "metadata": {**body["metadata"], "annotations": {HASH: digest}}}


def headless_service(fleet: PoCFleet) -> str:
    """Return the name of the Service that gives each pod a name of its own."""
    return f"{fleet.metadata.name}-pods"


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
    return _object("apps/v1", "StatefulSet", fleet.metadata.name, fleet, spec)


def _headless_service(fleet: PoCFleet) -> Object:
    # Pods that still load have a name too.
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector_labels(fleet),
        "ports": [{"name": "http", "port": fleet.spec.port, "targetPort": "http", "protocol": "TCP"}],
    }
    return _object("v1", "Service", headless_service(fleet), fleet, spec)


def _chat_service(fleet: PoCFleet) -> Object:
    ports = [{"name": "http", "port": CHAT_PORT, "targetPort": "http", "protocol": "TCP"}]
    return _object("v1", "Service", fleet.metadata.name, fleet, {"selector": selector_labels(fleet), "ports": ports})


def _disruption_budget(fleet: PoCFleet) -> Object:
    # A pod that is not ready has nothing to lose, and must not keep a Kubernetes node from being drained.
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector_labels(fleet)},
    }
    return _object("policy/v1", "PodDisruptionBudget", fleet.metadata.name, fleet, spec)


def _network_policy(fleet: PoCFleet) -> Object:
    spec = {
        "podSelector": {"matchLabels": selector_labels(fleet)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "http", "protocol": "TCP"}]}],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", fleet.metadata.name, fleet, spec)


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
    return [_object("v1", "PersistentVolumeClaim", cache_claim(fleet), fleet, spec)]
