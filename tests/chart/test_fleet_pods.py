# SPDX-License-Identifier: Apache-2.0
"""The pods of a fleet are those of the chart ``vllm-poc-worker``: what is proven of one holds for the other."""

import json
import subprocess
from typing import Any

import pytest
import yaml

from hack.deploy.local import WORKER_CHART
from hack.toolchain.tools import tool_path
from poc_operator.apis.v1alpha1.meta import COMPONENT, FLEET_LABEL
from poc_operator.fleets.render import pod_template
from poc_operator.fleets.resolve import Resolved, resolve
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60, func_only=True)]

IMAGE = {"repository": "registry/worker", "tag": "1"}

#: Values of the chart, and the spec that says the same.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "least": ({"auth": {"existingSecret": "vllm-poc-token"}}, {}),
    "open": (
        {"auth": {"open": True}, "poc": {"callbackAllow": ["a", "*.b"]}},
        {"auth": {"open": True}, "callbackAllow": ["a", "*.b"]},
    ),
    "full": (
        {
            "auth": {"existingSecret": "vllm-poc-token"},
            "model": {"path": "org/model", "name": "served"},
            "host": "::",
            "port": 9000,
            "extraArgs": ["--max-model-len=8192"],
            "extraEnv": [{"name": "A", "value": "1"}],
            "huggingFace": {"tokenSecret": "hub"},
            "cache": {"existingClaim": "weights"},
            "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "64Gi", "nvidia.com/gpu": "1"}},
            "startupSeconds": 600,
            "terminationGracePeriodSeconds": 90,
            "priorityClassName": "gpu",
            "imagePullSecrets": [{"name": "pull"}],
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        },
        {
            "servedName": "served",
            "host": "::",
            "port": 9000,
            "engineArgs": ["--max-model-len=8192"],
            "env": [{"name": "A", "value": "1"}],
            "huggingFace": {"tokenSecret": "hub"},
            "cache": {"existingClaim": "weights"},
            "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "64Gi"}},
            "gpu": {"product": "NVIDIA-H200", "count": 1},
            "startupSeconds": 600,
            "terminationGracePeriodSeconds": 90,
            "priorityClassName": "gpu",
            "imagePullSecrets": [{"name": "pull"}],
            "podTemplate": {"spec": {"tolerations": [{"operator": "Exists"}]}},
        },
    ),
}


def of_the_chart(values: dict[str, Any]) -> dict[str, Any]:
    """The pods' template that helm renders."""
    own = {"model": {"path": "org/model"}, "image": IMAGE} | values
    helm = [str(tool_path("helm")), "template", "demo", str(WORKER_CHART), "--namespace=ns", "--values=-"]
    text = subprocess.run(helm, input=json.dumps(own), capture_output=True, check=True, text=True).stdout
    (found,) = [body for body in yaml.safe_load_all(text) if body and body["kind"] == "Deployment"]
    template: dict[str, Any] = found["spec"]["template"]
    return template


def normal(template: dict[str, Any]) -> dict[str, Any]:
    """The template without what only one writes though it is the default, and with variables in order."""
    pod = json.loads(json.dumps(template["spec"]))
    (vllm,) = pod["containers"]
    vllm["env"].sort(key=lambda one: one["name"])
    for port in vllm["ports"]:
        port.pop("protocol", None)
    vllm["resources"] = {name: value for name, value in vllm["resources"].items() if value}
    labels = {name: value for name, value in template["metadata"]["labels"].items() if name.startswith("poc.gonka.ai/")}
    labels.pop(FLEET_LABEL, None)
    return {"labels": labels, "spec": pod}


@pytest.mark.parametrize(("values", "spec"), SAME.values(), ids=SAME)
def test_a_fleets_pods_are_those_of_the_chart(values: dict[str, Any], spec: dict[str, Any]) -> None:
    fleet = a_fleet(**spec)
    resolved = resolve(fleet.spec, AROUND)
    assert isinstance(resolved, Resolved)
    own = pod_template(fleet, resolved, AROUND)
    assert normal(own) == normal(of_the_chart(values))
    assert own["metadata"]["labels"]["app.kubernetes.io/managed-by"] == COMPONENT
