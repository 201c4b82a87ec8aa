# SPDX-License-Identifier: Apache-2.0
"""The rights that the operator's chart gives are enough for fleets, and without them fleets say what is missing."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import yaml

from hack.deploy.local import OPERATOR_CHART
from hack.generate.__main__ import KINDS
from hack.generate.crds import crd
from hack.toolchain.tools import tool_path
from tests.cluster.test_process import running
from tests.support.servers.api_server import ApiServer, api_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

SYSTEM, RELEASE = "poc-system", "vllm-poc-operator"
ACCOUNT = f"{SYSTEM}:{RELEASE}"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
PLURALS = {
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Role": "roles",
    "RoleBinding": "rolebindings",
}
FLEETS = "/apis/poc.gonka.ai/v1alpha1/namespaces/default/pocfleets"

Body = dict[str, Any]


@pytest.fixture(scope="module")
def guarded() -> Iterator[ApiServer]:
    """An API server that gives the operator's account the rights of its roles alone."""
    with api_server(ACCOUNT) as server:
        for kind in KINDS:
            server.install(crd(kind))
        assert server.request("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})[0] == 201
        labels = {"nvidia.com/gpu.product": "NVIDIA-H200"}
        assert server.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu", "labels": labels}})[0] == 201
        yield server


def grant(api: ApiServer, **values: Any) -> None:  # noqa: ANN401 - values of the chart
    """Give the operator the rights that its chart renders, and no others."""
    helm = [str(tool_path("helm")), "template", RELEASE, str(OPERATOR_CHART), f"--namespace={SYSTEM}", "--values=-"]
    text = subprocess.run(helm, input=json.dumps(values), capture_output=True, check=True, text=True).stdout
    for body in yaml.safe_load_all(text):
        if body and body["kind"] in PLURALS and "-gateway" not in body["metadata"]["name"]:
            namespace = body["metadata"].get("namespace")
            where = f"/namespaces/{namespace}" if namespace else ""
            path = f"{RBAC}{where}/{PLURALS[body['kind']]}"
            api.request("DELETE", f"{path}/{body['metadata']['name']}")
            assert api.request("POST", path, body)[0] == 201


def revoke(api: ApiServer) -> None:
    """Take all rights from the operator."""
    for plural in ("clusterrolebindings", f"namespaces/{SYSTEM}/rolebindings", "namespaces/default/rolebindings"):
        for body in api.request("GET", f"{RBAC}/{plural}")[1]["items"]:
            if RELEASE in body["metadata"]["name"]:
                api.request("DELETE", f"{RBAC}/{plural}/{body['metadata']['name']}")


async def until(api: ApiServer, name: str, holds: Callable[[Body], bool]) -> Body:
    """Return the status of a fleet once it is as wanted."""
    end = monotonic() + 40
    while True:
        status: Body = api.request("GET", f"{FLEETS}/{name}")[1].get("status") or {}
        if holds(status):
            return status
        assert monotonic() < end, status
        await asyncio.sleep(0.2)


CASES: dict[str, tuple[Body, tuple[str, ...], str]] = {
    "all namespaces": ({}, (), "ReplicasNotReady"),
    "one namespace": ({"watchNamespaces": ["default"]}, ("--namespace=default",), "GpuUnknown"),
    "no fleets": ({"fleets": {"enabled": False}}, (), "GpuUnknown"),
}


@pytest.mark.parametrize(("values", "flags", "reason"), CASES.values(), ids=CASES)
async def test_fleets_with_the_rights_of_the_chart(
    guarded: ApiServer, tmp_path: Path, values: Body, flags: tuple[str, ...], reason: str
) -> None:
    revoke(guarded)
    grant(guarded, **values)
    config = tmp_path / "kubeconfig"
    kubeconfig = guarded.kubeconfig(ACCOUNT)
    kubeconfig["contexts"][0]["context"]["namespace"] = SYSTEM
    config.write_text(json.dumps(kubeconfig))
    environment = {**os.environ, "KUBECONFIG": str(config), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    lease = "kube-system" if not flags else SYSTEM
    own = f"rights-{reason.lower()}-{len(flags)}"
    image = {"image": "registry.example.org/worker:1"}
    async with running(environment, tmp_path, f"--lease-namespace={lease}", *flags):
        preset = {**image, "model": {"preset": "minimax-m2.7"}}
        assert guarded.create("PoCFleet", f"{own}-preset", preset)[0] == 201
        path = {**image, "model": {"path": "org/model"}, "cache": {"size": "1Gi"}}
        assert guarded.create("PoCFleet", own, path)[0] == 201
        await until(guarded, f"{own}-preset", lambda status: status.get("reason") == reason)
        wanted = "ObjectRefused" if "fleets" in values else "ReplicasNotReady"
        status = await until(guarded, own, lambda status: status.get("reason") == wanted)
        code, _ = guarded.request("GET", f"/apis/apps/v1/namespaces/default/statefulsets/{own}")
        if "fleets" in values:
            assert "install the chart with fleets.enabled=true" in status["message"]
            assert code == HTTPStatus.NOT_FOUND
        else:
            assert code == HTTPStatus.OK
            assert guarded.request("GET", "/api/v1/namespaces/default/secrets/vllm-poc-token")[0] == HTTPStatus.OK
    assert "Traceback" not in (tmp_path / "operator.log").read_text()
