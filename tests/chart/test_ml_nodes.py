# SPDX-License-Identifier: Apache-2.0
"""The ML nodes of the operator's chart: what the gateway reads is what it understands."""

from pathlib import Path
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART
from hack.toolchain.tools import tool_path
from poc_gateway.node_api.ml_nodes import load_ml_nodes
from tests.chart.helm import ALL_VALUES, gateway, objects

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

ALL = ALL_VALUES[OPERATOR_CHART]
TOKENS = ("/etc/poc-gateway-tokens/h200", "/etc/poc-gateway-chat-tokens/h200")


@pytest.fixture(scope="module")
def helm() -> Kube:
    """Helm alone: no cluster is asked."""
    return Kube(kubectl_path=tool_path("kubectl"), helm_path=tool_path("helm"))


def find(helm: Kube, kind: str, end: str) -> list[Any]:
    return [o for o in objects(helm, OPERATOR_CHART, ALL) if o["kind"] == kind and o["metadata"]["name"].endswith(end)]


def test_the_gateway_understands_the_charts_file(helm: Kube, tmp_path: Path) -> None:
    (config,) = find(helm, "ConfigMap", "-gateway")
    file = tmp_path / "ml-nodes.json"
    file.write_text(config["data"]["ml-nodes.json"])
    first, second = load_ml_nodes(file)
    assert (first.name, first.number, first.host) == ("h200", 1, "h200.example.org")
    assert first.token is not None
    assert first.chat_token is not None
    assert [str(source.file) for source in (first.token, first.chat_token)] == [f"{folder}/token" for folder in TOKENS]
    assert (second.name, second.token, second.chat_token) == ("b200", None, None)
    assert [one.template.namespace for one in (first, second)] == ["poc-demo", "default"]
    assert [str(one.template.selector) for one in (first, second)] == ["app=vllm", "poc.gonka.ai/fleet=b200"]


def test_tokens_are_mounted_where_the_file_says(helm: Kube) -> None:
    pod = gateway(helm, ALL)["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    assert [secrets[mounts[folder]] for folder in TOKENS] == ["h200-token", "h200-api-key"]
    assert mounts["/etc/poc-gateway"] == "config"
    assert secrets[mounts["/etc/poc-gateway-tls"]] == "gateway-tls"


def test_each_namespace_gets_one_role(helm: Kube) -> None:
    namespaces = [role["metadata"]["namespace"] for role in find(helm, "Role", "-network")]
    assert sorted(namespaces) == ["default", "poc-demo"]


def test_changed_ml_nodes_restart_the_gateway(helm: Kube) -> None:
    none: dict[str, Any] = {**ALL, "gateway": {**ALL["gateway"], "mlNodes": []}}
    checksums = {
        gateway(helm, values)["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for values in (ALL, none)
    }
    assert len(checksums) == 2
