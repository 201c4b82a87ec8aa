# SPDX-License-Identifier: Apache-2.0
"""The files of values in docs/examples: helm takes them, and they do what they are for."""

from pathlib import Path
from typing import Any

import pytest

from hack.images.site import ROOT
from tests.chart.rendered import ensure, objects, pods, text

pytestmark = pytest.mark.timeout(60, func_only=True)

FOLDER = ROOT / "docs" / "examples" / "values"
PAGE = ROOT / "docs" / "operate" / "chart.md"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    ensure()


def gateway(name: str) -> Any:  # noqa: ANN401 - a Kubernetes object
    found = [body for body in objects(FOLDER / f"{name}.yaml") if body["kind"] == "Deployment"]
    (deployment,) = [body for body in found if body["metadata"]["name"].endswith("-gateway")]
    return deployment["spec"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_renders_and_is_described(path: Path) -> None:
    assert objects(path)
    assert f"(../examples/values/{path.name})" in PAGE.read_text()


def test_several_gateways_are_spread_and_have_a_budget() -> None:
    spec = gateway("high-availability")
    assert spec["replicas"] == 3
    assert len(spec["template"]["spec"]["topologySpreadConstraints"]) == 2
    assert any(body["kind"] == "PodDisruptionBudget" for body in objects(FOLDER / "high-availability.yaml"))


def test_gitops_renders_the_same_each_time_and_no_secret() -> None:
    path = FOLDER / "gitops.yaml"
    assert text(path) == text(path)
    assert not [body for body in objects(path) if body["kind"] == "Secret"]
    hooks = {body["metadata"].get("annotations", {}).get("helm.sh/hook") for body in objects(path)}
    assert hooks == {None, "test"}


def test_without_the_internet_every_image_is_pinned_in_one_registry() -> None:
    bodies = objects(FOLDER / "air-gap.yaml")
    images = [one["image"] for spec in pods(bodies).values() for one in spec["containers"]]
    operator = next(one for name, one in pods(bodies).items() if name.endswith("/fresh-vllm-poc-operator"))
    images += [one.split("=", 1)[1] for one in operator["containers"][0]["args"] if one.startswith("--worker-image=")]
    assert len(images) == 5  # operator, gateway, worker, and what helm runs at tests and at the end
    assert all(image.startswith("registry.example.org/mirror/vllm-poc-") for image in images)
    assert all("@sha256:" in image for image in images)
    assert all(spec["imagePullSecrets"] == [{"name": "registry"}] for spec in pods(bodies).values())


@pytest.mark.parametrize("name", ["postgresql", "high-availability"])
def test_postgresql_needs_no_volume(name: str) -> None:
    container = gateway(name)["template"]["spec"]["containers"][0]
    (variable,) = [one for one in container["env"] if one["name"] == "POC_GATEWAY_DATABASE"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "gateway-database", "key": "url"}
    assert not [body for body in objects(FOLDER / f"{name}.yaml") if body["kind"] == "PersistentVolumeClaim"]


def test_the_network_node_comes_by_tls_and_alone() -> None:
    bodies = objects(FOLDER / "cert-manager.yaml")
    volumes = gateway("cert-manager")["template"]["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": "gateway-tls"}} in volumes
    (policy,) = [body for body in bodies if body["kind"] == "NetworkPolicy" and "gateway" in body["metadata"]["name"]]
    (network,) = [one for one in policy["spec"]["ingress"] if one["ports"] == [{"port": "network"}]]
    assert network["from"] == [{"ipBlock": {"cidr": "192.0.2.10/32"}}]


def test_the_network_node_comes_by_the_ingress_controller_alone() -> None:
    bodies = objects(FOLDER / "ingress.yaml")
    (ingress,) = [body["spec"] for body in bodies if body["kind"] == "Ingress"]
    assert ingress["tls"] == [{"hosts": [rule["host"] for rule in ingress["rules"]], "secretName": "poc-tls"}]
    (policy,) = [body for body in bodies if body["kind"] == "NetworkPolicy" and "gateway" in body["metadata"]["name"]]
    (network,) = [one for one in policy["spec"]["ingress"] if one["ports"] == [{"port": "network"}]]
    labels = {"kubernetes.io/metadata.name": ingress["ingressClassName"]}
    assert network["from"] == [{"namespaceSelector": {"matchLabels": labels}}]
