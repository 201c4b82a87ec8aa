# SPDX-License-Identifier: Apache-2.0
"""The objects of a simulation: nodes, pods on them, and rounds."""

from datetime import UTC, datetime
from typing import Any

from hack.cluster.kwok import NODE_ANNOTATION, TAINT
from poc_operator.apis.v1alpha1.meta import API_VERSION
from poc_operator.apis.v1alpha1.round import PoCRound

#: Simulated nodes have this label, and simulated pods go there.
NODE_LABEL = {"poc.gonka.ai/simulated": "true"}
#: Name of a pod's only container, and of its image, which nobody pulls.
CONTAINER = "vllm"
#: Pods of one Deployment share the value of this label.
LABEL = "fleet"

Manifest = dict[str, Any]


def node(number: int) -> Manifest:
    """Return a node for simulated pods."""
    metadata = {"name": f"simulated-{number}", "annotations": NODE_ANNOTATION, "labels": NODE_LABEL}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [TAINT]}}


_POD_SPEC = {
    "nodeSelector": NODE_LABEL,
    "tolerations": [{"operator": "Exists"}],
    "terminationGracePeriodSeconds": 0,
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
    "containers": [{"name": CONTAINER, "image": CONTAINER, "imagePullPolicy": "Never"}],
}


def pod(name: str) -> Manifest:
    """Return a simulated pod of its own."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": _POD_SPEC}


def deployment(name: str, replicas: int) -> Manifest:
    """Return a Deployment of simulated pods with the label ``fleet=NAME``."""
    labels = {LABEL: name}
    template = {"metadata": {"labels": labels}, "spec": _POD_SPEC}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def pod_status(uid: str, restarts: int, *, ready: bool) -> Manifest:
    """Return what a kubelet says about a pod whose container has restarted so often."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = {"running": {"startedAt": now}} if ready else {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {
        "name": CONTAINER,
        "image": CONTAINER,
        "imageID": "",
        "containerID": f"simulated://{uid}-{restarts}",
        "restartCount": restarts,
        "ready": ready,
        "started": ready,
        "state": state,
    }
    conditions = [
        {"type": kind, "status": str(ready), "lastTransitionTime": now} for kind in ("Ready", "ContainersReady")
    ]
    return {"conditions": conditions, "containerStatuses": [container]}


def round_manifest(name: str, number: int, **spec: Any) -> Manifest:  # noqa: ANN401
    """Return an artifact round on the pods of the Deployment ``name``, told from others by ``number``.

    It is of the prefill scheme, unless ``spec`` has ``decode``.
    """
    fields = {
        "blockHash": f"{number:064x}",
        "blockHeight": 1,
        "publicKey": "02a1b2c3d4",
        "nodes": {"first": 0, "last": 0, "count": 1},
        **({} if "decode" in spec else {"artifact": {"kDim": 4}}),
        "model": {"name": "tiny", "seqLen": 64},
        "selector": {"matchLabels": {LABEL: name}},
        "batchSize": 16,
        # A chaos test may lose a slot more often than a user would accept.
        "retry": {"backoffLimitPerSlot": 1000, "backoffLimit": 100_000},
        **spec,
    }
    return {"apiVersion": API_VERSION, "kind": PoCRound.KIND.kind, "metadata": {"name": name}, "spec": fields}
