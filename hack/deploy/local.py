# SPDX-License-Identifier: Apache-2.0
"""Chart values and a fleet for the local cluster: images built here, vLLM and tiny models mounted from the machine."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hack.cluster.images import is_loaded, load
from hack.cluster.layout import POD_RANGE, SERVICE_RANGE, folder
from hack.images.build import build
from hack.images.site import ROOT, Role
from hack.models.store import models
from hack.toolchain.common import cache
from hack.vllm.environment import environment

OPERATOR_CHART = ROOT / "charts" / "vllm-poc-operator"
#: The fleet and the model's name that the example round asks for.
FLEET = "demo"
SERVED_NAME = "demo"
#: The ML node that the demo's pods are.
ML_NODE = "demo"
_VLLM = "/opt/vllm"
_STORAGE_CLASS = "local"
_STORAGE_SIZE = "10Gi"
_GATEWAY_USER = 65532
_MODELS = "/models"
#: What vLLM finds out about a model's class, for which it starts a process: once for all pods.
_VLLM_CACHE = "/cache/vllm"

Values = Mapping[str, Any]


def _image(role: Role) -> Values:
    name = build(role)
    # The tag is a hash of the content: what is there is the same.
    if not is_loaded(name):
        load(name)
    repository, tag = name.rsplit(":", 1)
    return {"repository": repository, "tag": tag, "pullPolicy": "Never"}


def operator_values(namespace: str) -> Values:
    """Build and load the operator's and the gateway's image; return the chart values that use them.

    The gateway has one ML node, whose rounds are made in ``namespace``.
    """
    template = {"fleetRef": {"name": FLEET}}
    gateway = _image(Role.GATEWAY)
    return {
        "image": _image(Role.OPERATOR),
        "rbac": {"deletePods": True},
        "gateway": {
            "image": {"repository": gateway["repository"], "tag": gateway["tag"]},
            "storage": {"className": _STORAGE_CLASS, "size": _STORAGE_SIZE},
            "receivers": {"private": [POD_RANGE, SERVICE_RANGE]},
            "mlNodes": [{"name": ML_NODE, "template": {"namespace": namespace, "spec": template}}],
        },
    }


def gateway_volume() -> Values:
    """Make a folder for the gateway's database; return the volume that its claim gets."""
    path = folder("gateway")
    os.chown(path, _GATEWAY_USER, _GATEWAY_USER)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "poc-gateway"},
        "spec": {
            "capacity": {"storage": _STORAGE_SIZE},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": _STORAGE_CLASS,
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }


def fleet_spec(*, replicas: int, model: str = "qwen3-tiny") -> Values:
    """Build and load the worker's image; return the spec of a fleet of ``replicas`` CPU pods with a tiny model."""
    found = cache() / "vllm-cache"
    found.mkdir(parents=True, exist_ok=True)
    mounts = {"vllm": (environment(), _VLLM), "models": (models(), _MODELS), "vllm-cache": (found, _VLLM_CACHE)}
    image = _image(Role.WORKER)
    vllm = {
        "name": "vllm",
        "command": [f"{_VLLM}/bin/python", "-m", "vllm_poc", "serve"],
        "volumeMounts": [
            {"name": name, "mountPath": target, "readOnly": target != _VLLM_CACHE}
            for name, (_, target) in mounts.items()
        ],
    }
    volumes = [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]
    volumes += [{"name": name, **_host_path(path)} for name, (path, _) in mounts.items()]
    return {
        "image": f"{image['repository']}:{image['tag']}",
        "replicas": replicas,
        "model": {"path": f"{_MODELS}/{model}"},
        "servedName": SERVED_NAME,
        # Without AVX-512 a CPU computes products of 16 bits four times as slowly.
        "engineArgs": ["--max-model-len=1024", "--enforce-eager", "--dtype=float32"],
        "env": [{"name": name, "value": value} for name, value in _CPU_ENVIRONMENT.items()],
        "podTemplate": {"spec": {"containers": [vllm], "volumes": volumes}},
    }


def _host_path(path: Path) -> dict[str, Any]:
    return {"hostPath": {"path": str(path), "type": "Directory"}}


# What vLLM needs to run beside others on a small machine without a GPU and without a network.
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
