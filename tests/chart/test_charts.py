# SPDX-License-Identifier: Apache-2.0
"""The chart: linted, accepted by a real API server, and clear about wrong values."""

import re

import pytest
import yaml

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import NAMESPACE, SYSTEM_NAMESPACE
from hack.images.site import ROOT
from hack.toolchain.common import UserError
from tests.chart.helm import ALL_VALUES, RELEASE, Values, deployment, lint, objects, render

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

CASES = pytest.mark.parametrize("values", [{}, ALL_VALUES[OPERATOR_CHART]], ids=["operator", "operator-all"])
CRDS = sorted((ROOT / "crds").glob("*.yaml"))


def ml_node(**spec: object) -> Values:
    """Values with one ML node whose rounds have this spec."""
    return {"gateway": {"mlNodes": [{"name": "a", "template": {"namespace": "a", "spec": spec}}]}}


#: What is wrong: (values, what helm says).
WRONG: dict[str, tuple[Values, tuple[str, ...]]] = {
    "typo": ({"watchNamespace": ["a"]}, ("'watchNamespace' not allowed",)),
    "typo below": ({"image": {"tags": "1"}}, ("/image", "'tags' not allowed")),
    "format": ({"logFormat": "xml"}, ("/logFormat", "'json', 'plain'")),
    "empty repository": ({"image": {"repository": ""}}, ("/image/repository", "minLength")),
    "digest": ({"image": {"digest": "sha256:1"}}, ("/image/digest", "pattern")),
    "pull policy": ({"image": {"pullPolicy": "Sometimes"}}, ("/image/pullPolicy", "'IfNotPresent'")),
    "namespaces as text": ({"watchNamespaces": "a"}, ("/watchNamespaces", "want array")),
    "namespace twice": ({"watchNamespaces": ["a", "a"]}, ("/watchNamespaces", "equal")),
    "monitor without service": ({"metrics": {"serviceMonitor": True}}, ("/metrics/service",)),
    "env without a name": ({"extraEnv": [{"value": "a"}]}, ("/extraEnv/0", "'name'")),
    "no account": (
        {"serviceAccount": {"create": False}},
        ("serviceAccount.name is required when serviceAccount.create is false",),
    ),
    "gateway typo": ({"gateway": {"enable": True}}, ("/gateway", "'enable' not allowed")),
    "private host": (
        {"gateway": {"receivers": {"private": ["example.org"]}}},
        ("/gateway/receivers/private/0", "pattern"),
    ),
    "ML node without a template": (
        {"gateway": {"mlNodes": [{"name": "a"}]}},
        ("/gateway/mlNodes/0", "'template'"),
    ),
    "ML node's name": (
        {"gateway": {"mlNodes": [{"name": "A.b", "template": {"namespace": "a", "spec": {"selector": {}}}}]}},
        ("/gateway/mlNodes/0/name", "pattern"),
    ),
    "ML node without pods": (
        ml_node(),
        ('gateway.mlNodes: set exactly one of fleetRef and selector in template.spec of "a"',),
    ),
    "ML node with a fleet and labels": (
        ml_node(fleetRef={"name": "a"}, selector={"matchLabels": {"a": "b"}}),
        ('gateway.mlNodes: set exactly one of fleetRef and selector in template.spec of "a"',),
    ),
    "ML node with a fleet without a name": (
        ml_node(fleetRef={}),
        ("/gateway/mlNodes/0/template/spec/fleetRef", "'name'"),
    ),
    "ML node with a fleet and a port": (
        ml_node(fleetRef={"name": "a"}, port=9000),
        ('gateway.mlNodes: template.spec.port of "a" is that of the fleet: remove port, or fleetRef',),
    ),
    "ML node elsewhere": (
        {
            "watchNamespaces": ["a"],
            "gateway": {"mlNodes": [{"name": "n", "template": {"namespace": "b", "spec": {"selector": {}}}}]},
        },
        ('gateway.mlNodes: the namespace "b" of "n" is not watched: add it to watchNamespaces',),
    ),
}


@CASES
def test_helm_lint_finds_nothing(kube: Kube, values: Values) -> None:
    assert "0 chart(s) failed" in lint(kube, OPERATOR_CHART, values)


@CASES
def test_the_api_server_accepts_what_is_rendered(kube: Kube, values: Values) -> None:
    rendered = render(kube, OPERATOR_CHART, values)
    # Of a pod that stands alone the API server looks up the service account, which a dry run does not make.
    rendered = re.sub(r"serviceAccountName: \S+-test$", "serviceAccountName: default", rendered, flags=re.MULTILINE)
    applied = kube.kubectl("apply", "--dry-run=server", "-f", "-", stdin=rendered).splitlines()
    assert len(applied) == len(objects(kube, OPERATOR_CHART, values))
    assert all(line.endswith("(server dry run)") for line in applied)


@pytest.mark.parametrize(("values", "says"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused(kube: Kube, values: Values, says: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        render(kube, OPERATOR_CHART, values)
    for words in says:
        assert words in str(refusal.value)


def test_the_table_of_all_values_is_complete() -> None:
    values = yaml.safe_load((OPERATOR_CHART / "values.yaml").read_text())
    assert ALL_VALUES[OPERATOR_CHART].keys() == values.keys()


def test_objects_lie_in_the_releases_namespace(kube: Kube) -> None:
    found = {body["metadata"].get("namespace") for body in objects(kube, OPERATOR_CHART, {})}
    # All operators of all namespaces see one Lease.
    assert found <= {SYSTEM_NAMESPACE, None, "kube-system"}


def test_the_charts_crds_are_the_files_of_the_repository(kube: Kube) -> None:
    rendered = [body for body in objects(kube, OPERATOR_CHART, {}) if body["kind"] == "CustomResourceDefinition"]
    wanted = [yaml.safe_load(crd.read_text()) for crd in CRDS]
    assert len(wanted) == 4
    assert sorted(rendered, key=lambda body: str(body["metadata"]["name"])) == wanted


def test_the_cluster_has_the_crds_of_the_repository(kube: Kube) -> None:
    for crd in CRDS:
        kube.kubectl("diff", "-f", crd)


def test_watched_namespaces_reach_the_operator(kube: Kube) -> None:
    pod = deployment(kube, OPERATOR_CHART, ALL_VALUES[OPERATOR_CHART])["spec"]["template"]["spec"]
    namespaces = [f"--namespace={NAMESPACE}", "--namespace=default"]
    address = f"--gateway-url=http://{RELEASE}-vllm-poc-operator-gateway.{SYSTEM_NAMESPACE}.svc:8080"
    rate = "--max-nonces-per-second=12345"
    own = ["--log-format=plain", "--identity=$(POD_NAME)", "--lease-namespace=kube-public", *namespaces]
    pods = ["--pod-lease-seconds=600", "--pod-token-secret=pod-token"]
    fleets = "--worker-image=mirror.example.org/registry.example.org/worker:2"
    assert pod["containers"][0]["args"] == [*own, *pods, fleets, address, rate]


def test_metrics_are_scraped_if_asked_for(kube: Kube) -> None:
    metrics = {"service": True, "serviceMonitor": True, "serviceMonitorLabels": {"release": "prometheus"}}
    rendered = objects(kube, OPERATOR_CHART, {"metrics": metrics})
    monitor = next(body for body in rendered if body["kind"] == "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"] == [{"port": "metrics", "interval": "30s"}]
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    ports = {
        body["spec"]["selector"]["app.kubernetes.io/name"]: port["port"]
        for body in rendered
        if body["kind"] == "Service" and selected <= body["metadata"]["labels"].items()
        for port in body["spec"]["ports"]
        if port["name"] == "metrics"
    }
    assert ports == {"vllm-poc-operator": 8081, "vllm-poc-operator-gateway": 8081}
    least = objects(kube, OPERATOR_CHART, {})
    assert not any("metrics" in body["metadata"]["name"] or body["kind"] == "ServiceMonitor" for body in least)
