# SPDX-License-Identifier: Apache-2.0
"""Pods, fleets and a gateway of the cluster that have a fault each, in a namespace of their own."""

import base64
import json
from pathlib import Path
from typing import Any

from hack.deploy.kube import Kube
from hack.deploy.local import fleet_spec, operator_values
from hack.deploy.releases import NAMESPACE as DEMO_NAMESPACE
from hack.images.site import ROOT
from poc_operator.apis.v1alpha1.meta import API_VERSION
from tests.chart import rendered
from tests.cluster import simulated_pod
from tests.cluster.simulated_pod import MODEL, PORT, Ill
from tests.support.builders.certificates import issue_expired

Manifest = dict[str, Any]

NAMESPACE = "poc-faults"
LABEL = "poc-test-pod"
#: The PVC and the model that are not there.
MISSING_CLAIM, MISSING_MODEL = "weights-of-nobody", "org/modell"
#: What a pod has that belongs to another operator.
OTHER_TOKEN = "of another operator"  # noqa: S105
#: What a container says that cannot load its model.
CRASH = f"ValueError: No supported config format found in {MISSING_MODEL}"
#: The gateway whose volume and certificate are at their end.
GATEWAY = f"{rendered.RELEASE}-vllm-poc-operator-gateway"
_GATEWAY_LABEL = ("app.kubernetes.io/name", "vllm-poc-operator-gateway")
_GATEWAY_KINDS = {"Secret", "ServiceAccount", "Service", "Deployment"}
_CERTIFICATE = "old-certificate"
#: Less than the room that a gateway keeps for itself.
_VOLUME = {"medium": "Memory", "sizeLimit": "32Mi"}
_TESTS = "/simulated"

# Its queue of connections is full: what else comes is dropped, as by a network policy.
_DROPPING = f"""
import socket, time
server = socket.create_server(("", {PORT}), backlog=0)
held = [socket.socket() for _ in range(4)]
for one in held:
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", {PORT}))
time.sleep(86400)
"""


def simulated_pod_of(name: str, ill: Ill, token: str = "") -> Manifest:
    """Return a pod with a simulated engine; without ``token`` it answers everybody."""
    template = _container(["-m", simulated_pod.__name__, ill])
    access = {"VLLM_POC_TOKEN": token} if token else {"VLLM_POC_OPEN": "true"}
    env = {**access, "VLLM_POC_CALLBACK_ALLOW": "*"}
    template["containers"][0] |= {
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1},
        "env": [*_ENVIRONMENT, *({"name": key, "value": value} for key, value in env.items())],
    }
    return _pod(name, template)


def dropping_pod(name: str) -> Manifest:
    """Return a pod that counts as ready, and to which no packet gets through."""
    return _pod(name, _container(["-c", _DROPPING]))


def fleet(name: str, arguments: list[str], **spec: Any) -> Manifest:  # noqa: ANN401
    """Return a fleet whose containers run Python with these arguments in place of vLLM."""
    made = {**fleet_spec(replicas=1), "servedName": MODEL, "healing": {"enabled": False}, **spec}
    template = _container(arguments)
    template["containers"][0]["env"] = _ENVIRONMENT
    made["podTemplate"] = {"spec": template}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": API_VERSION, "kind": "PoCFleet", "metadata": metadata, "spec": made}


def gateway(folder: Path) -> list[Manifest]:
    """Return the chart's gateway, with a small volume in memory and a certificate that has expired."""
    values = {**operator_values(DEMO_NAMESPACE)}
    values["gateway"] = {**values["gateway"], "mlNodes": [], "tls": {"existingSecret": _CERTIFICATE}}
    key, value = _GATEWAY_LABEL
    found = [
        body
        for body in rendered.objects(values, namespace=NAMESPACE)
        if body["kind"] in _GATEWAY_KINDS and body["metadata"].get("labels", {}).get(key) == value
    ]
    (deployment,) = (body for body in found if body["kind"] == "Deployment")
    (data,) = (one for one in deployment["spec"]["template"]["spec"]["volumes"] if one["name"] == "data")
    data["emptyDir"] = _VOLUME
    del data["persistentVolumeClaim"]
    return [_certificate(folder), *found]


def apply(kube: Kube, *manifests: Manifest) -> None:
    """Create objects, all at once."""
    listed = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
    kube.kubectl("--namespace", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(listed))


_ENVIRONMENT = [
    {"name": "PYTHONPATH", "value": f"/opt/vllm-poc:{_TESTS}"},
    {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
]


def _pod(name: str, template: Manifest) -> Manifest:
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {LABEL: name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template}


def _container(arguments: list[str]) -> Manifest:
    """Return the spec of a pod that runs Python with these arguments, in the worker's image."""
    demo = fleet_spec(replicas=1)
    spec = demo["podTemplate"]["spec"]
    container = {
        "name": "vllm",
        "image": demo["image"],
        "imagePullPolicy": "Never",
        "command": [spec["containers"][0]["command"][0], *arguments],
        "volumeMounts": [
            *spec["containers"][0]["volumeMounts"],
            {"name": "tests", "mountPath": f"{_TESTS}/tests", "readOnly": True},
        ],
    }
    tests = {"name": "tests", "hostPath": {"path": str(ROOT / "tests"), "type": "Directory"}}
    volumes = [*spec["volumes"], tests]
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}


def _certificate(folder: Path) -> Manifest:
    issue_expired(folder, "gateway")
    data = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in ("tls.crt", "tls.key")}
    metadata = {"name": _CERTIFICATE, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}
