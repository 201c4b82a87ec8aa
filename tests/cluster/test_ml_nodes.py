# SPDX-License-Identifier: Apache-2.0
"""The gateway's process with two ML nodes and a real API server, which alone knows their rounds."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from hack.images.site import ROOT
from hack.toolchain.common import wait_until
from tests.support.servers.api_server import ApiServer
from tests.support.servers.http_server import free_port
from tests.unit.poc_gateway.node_api.requests import INIT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

NODE = "api/v1/inference/pow"
#: Which pods the ML nodes have: those with a label, and those of a fleet.
PODS: dict[str, dict[str, Any]] = {
    "first": {"selector": {"matchLabels": {"app": "first"}}},
    "second": {"fleetRef": {"name": "second"}},
}


def ml_node(name: str) -> dict[str, Any]:
    spec = {**PODS[name], "model": {"name": "tiny"}}
    return {"name": name, "template": {"namespace": "default", "spec": spec}}


@pytest.fixture
def network(api: ApiServer, tmp_path: Path) -> Iterator[str]:
    """Run the gateway; the address of its network port."""
    (tmp_path / "kubeconfig").write_text(json.dumps(api.kubeconfig()))
    (tmp_path / "ml-nodes.json").write_text(json.dumps([ml_node("first"), ml_node("second")]))
    ports = [free_port() for _ in range(3)]
    names = ("PORT", "METRICS_PORT", "NETWORK_PORT")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}/operator:{ROOT}/image",
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "POC_GATEWAY_DATABASE": f"sqlite:///{tmp_path}/gateway.db",
        "POC_GATEWAY_ML_NODES": str(tmp_path / "ml-nodes.json"),
        **{f"POC_GATEWAY_{name}": str(port) for name, port in zip(names, ports, strict=True)},
    }
    address = f"http://127.0.0.1:{ports[2]}"
    with subprocess.Popen([sys.executable, "-m", "poc_gateway"], env=environment) as process:
        try:
            assert wait_until(lambda: answers(address), 60), process.poll()
            yield address
        finally:
            process.terminate()
            assert process.wait(30) == 0


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def is_stopped(client: httpx.Client, path: str) -> bool:
    told: dict[str, Any] = client.get(path).json()
    return told.get("state") == "STOPPED"


def test_each_ml_node_has_rounds_of_its_own(api: ApiServer, network: str) -> None:
    with httpx.Client(base_url=network, trust_env=False, timeout=60) as client:
        for name in ("first", "second"):
            # Right after a CRD is there, the API server says 429 for a moment.
            assert wait_until(partial(is_stopped, client, f"/nodes/{name}/v3.0.8/api/v1/state"), 30)
            started = client.post(f"/nodes/{name}/{NODE}/init/generate", content=json.dumps(INIT))
            assert (started.status_code, started.json()["status"]) == (200, "OK"), started.text
        other = INIT | {"block_height": 4712}
        assert client.post(f"/nodes/first/{NODE}/init/generate", json=other).status_code == 409
        rounds = "/apis/poc.gonka.ai/v1alpha1/namespaces/default/pocrounds"
        items = api.request("GET", rounds, labelSelector="poc.gonka.ai/ml-node")[1]["items"]  # no other tests'
        found = {one["metadata"]["labels"]["poc.gonka.ai/ml-node"]: one for one in items}
        assert found.keys() == {"first", "second"}
        for name in ("first", "second"):
            body = found[name]
            assert body["metadata"]["labels"]["poc.gonka.ai/origin"] == "network"
            assert {field: body["spec"].get(field) for field in PODS[name]} == PODS[name]
            # In an operator's place.
            assert api.write_status("PoCRound", body["metadata"]["name"], {"state": "Complete"})[0] == 200
            stopped = client.post(f"/nodes/{name}/{NODE}/stop", content=b"{}")
            assert (stopped.status_code, stopped.json()["errors"]) == (200, [])
        no_pods = client.post("/nodes/first/v1/chat/completions", json={})
        assert (no_pods.status_code, no_pods.json()["reason"]) == (503, "NoBackends")
