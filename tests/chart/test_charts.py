# SPDX-License-Identifier: Apache-2.0
"""Both charts: linted, accepted by a real API server, and clear about wrong values."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART, WORKER_CHART
from hack.deploy.releases import NAMESPACE, OPEN, SYSTEM_NAMESPACE
from hack.images.site import ROOT
from hack.toolchain.common import UserError
from tests.chart.helm import (
    ALL_VALUES,
    LEAST_VALUES,
    MODEL,
    NAMESPACES,
    RELEASE,
    Values,
    deployment,
    lint,
    objects,
    render,
)
from vllm_poc.server.admission import Access, Answered
from vllm_poc.server.settings import Settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

CHARTS = [OPERATOR_CHART, WORKER_CHART]
LEAST_AND_ALL = [(chart, values[chart]) for chart in CHARTS for values in (LEAST_VALUES, ALL_VALUES)]
CASES = pytest.mark.parametrize(
    ("chart", "values"), LEAST_AND_ALL, ids=["operator", "operator-all", "worker", "worker-all"]
)
CRDS = sorted((ROOT / "crds").glob("*.yaml"))


def ml_node(**spec: object) -> Values:
    """Values with one ML node whose rounds have this spec."""
    return {"gateway": {"mlNodes": [{"name": "a", "template": {"namespace": "a", "spec": spec}}]}}


#: What is wrong: (chart, values, what helm says).
WRONG: dict[str, tuple[Path, Values, tuple[str, ...]]] = {
    "typo": (OPERATOR_CHART, {"watchNamespace": ["a"]}, ("'watchNamespace' not allowed",)),
    "typo below": (OPERATOR_CHART, {"image": {"tags": "1"}}, ("/image", "'tags' not allowed")),
    "format": (OPERATOR_CHART, {"logFormat": "xml"}, ("/logFormat", "'json', 'plain'")),
    "empty repository": (OPERATOR_CHART, {"image": {"repository": ""}}, ("/image/repository", "minLength")),
    "digest": (OPERATOR_CHART, {"image": {"digest": "sha256:1"}}, ("/image/digest", "pattern")),
    "pull policy": (OPERATOR_CHART, {"image": {"pullPolicy": "Sometimes"}}, ("/image/pullPolicy", "'IfNotPresent'")),
    "namespaces as text": (OPERATOR_CHART, {"watchNamespaces": "a"}, ("/watchNamespaces", "want array")),
    "namespace twice": (OPERATOR_CHART, {"watchNamespaces": ["a", "a"]}, ("/watchNamespaces", "equal")),
    "monitor without service": (OPERATOR_CHART, {"metrics": {"serviceMonitor": True}}, ("/metrics/service",)),
    "env without a name": (OPERATOR_CHART, {"extraEnv": [{"value": "a"}]}, ("/extraEnv/0", "'name'")),
    "no account": (
        OPERATOR_CHART,
        {"serviceAccount": {"create": False}},
        ("serviceAccount.name is required when serviceAccount.create is false",),
    ),
    "gateway typo": (OPERATOR_CHART, {"gateway": {"enable": True}}, ("/gateway", "'enable' not allowed")),
    "private host": (
        OPERATOR_CHART,
        {"gateway": {"receivers": {"private": ["example.org"]}}},
        ("/gateway/receivers/private/0", "pattern"),
    ),
    "ML node without a template": (
        OPERATOR_CHART,
        {"gateway": {"mlNodes": [{"name": "a"}]}},
        ("/gateway/mlNodes/0", "'template'"),
    ),
    "ML node's name": (
        OPERATOR_CHART,
        {"gateway": {"mlNodes": [{"name": "A.b", "template": {"namespace": "a", "spec": {"selector": {}}}}]}},
        ("/gateway/mlNodes/0/name", "pattern"),
    ),
    "ML node without pods": (
        OPERATOR_CHART,
        ml_node(),
        ('gateway.mlNodes: set exactly one of fleetRef and selector in template.spec of "a"',),
    ),
    "ML node with a fleet and labels": (
        OPERATOR_CHART,
        ml_node(fleetRef={"name": "a"}, selector={"matchLabels": {"a": "b"}}),
        ('gateway.mlNodes: set exactly one of fleetRef and selector in template.spec of "a"',),
    ),
    "ML node with a fleet without a name": (
        OPERATOR_CHART,
        ml_node(fleetRef={}),
        ("/gateway/mlNodes/0/template/spec/fleetRef", "'name'"),
    ),
    "ML node with a fleet and a port": (
        OPERATOR_CHART,
        ml_node(fleetRef={"name": "a"}, port=9000),
        ('gateway.mlNodes: template.spec.port of "a" is that of the fleet: remove port, or fleetRef',),
    ),
    "ML node elsewhere": (
        OPERATOR_CHART,
        {
            "watchNamespaces": ["a"],
            "gateway": {"mlNodes": [{"name": "n", "template": {"namespace": "b", "spec": {"selector": {}}}}]},
        },
        ('gateway.mlNodes: the namespace "b" of "n" is not watched: add it to watchNamespaces',),
    ),
    "no model": (
        WORKER_CHART,
        {},
        ("model.path is required: the hub id or the path of the model that vLLM shall serve",),
    ),
    "neither token nor open": (
        WORKER_CHART,
        {**MODEL, "auth": {"existingSecret": ""}, "poc": {"callbackAllow": ["*"]}},
        ("auth.existingSecret is required: name the Secret", "or set auth.open to true, and whoever reaches a pod"),
    ),
    "open for any receiver": (
        WORKER_CHART,
        {**MODEL, "auth": {"existingSecret": "", "open": True}},
        ("poc.callbackAllow is required where auth.existingSecret is empty: name the hosts", 'or "*" for any'),
    ),
    "open as text": (WORKER_CHART, {**MODEL, "auth": {"open": "yes"}}, ("/auth/open", "want boolean")),
    "auth typo": (WORKER_CHART, {**MODEL, "auth": {"token": "a"}}, ("/auth", "'token' not allowed")),
    "worker typo": (WORKER_CHART, {**MODEL, "replica": 2}, ("'replica' not allowed",)),
    "negative replicas": (WORKER_CHART, {**MODEL, "replicas": -1}, ("/replicas", "minimum")),
    "replicas as text": (WORKER_CHART, {**MODEL, "replicas": "two"}, ("/replicas", "want integer")),
    "port": (WORKER_CHART, {**MODEL, "port": 70000}, ("/port", "maximum")),
    "arguments as text": (WORKER_CHART, {**MODEL, "extraArgs": "--a=b"}, ("/extraArgs", "want array")),
    "shared memory": (WORKER_CHART, {**MODEL, "sharedMemory": "much"}, ("/sharedMemory", "pattern")),
    "empty callback host": (
        WORKER_CHART,
        {**MODEL, "poc": {"callbackAllow": [""]}},
        ("/poc/callbackAllow/0", "minLength"),
    ),
    "hasty start": (WORKER_CHART, {**MODEL, "startupSeconds": 1}, ("/startupSeconds", "minimum")),
}


@CASES
def test_helm_lint_finds_nothing(kube: Kube, chart: Path, values: Values) -> None:
    assert "0 chart(s) failed" in lint(kube, chart, values)


@CASES
def test_the_api_server_accepts_what_is_rendered(kube: Kube, chart: Path, values: Values) -> None:
    rendered = render(kube, chart, values)
    applied = kube.kubectl("apply", "--dry-run=server", "-f", "-", stdin=rendered).splitlines()
    assert len(applied) == len(objects(kube, chart, values))
    assert all(line.endswith("(server dry run)") for line in applied)


@pytest.mark.parametrize(("chart", "values", "says"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused(kube: Kube, chart: Path, values: Values, says: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        render(kube, chart, values)
    for words in says:
        assert words in str(refusal.value)


@pytest.mark.parametrize("chart", CHARTS, ids=["operator", "worker"])
def test_the_table_of_all_values_is_complete(chart: Path) -> None:
    assert ALL_VALUES[chart].keys() == yaml.safe_load((chart / "values.yaml").read_text()).keys()


@pytest.mark.parametrize("chart", CHARTS, ids=["operator", "worker"])
def test_objects_lie_in_the_releases_namespace(kube: Kube, chart: Path) -> None:
    found = {body["metadata"].get("namespace") for body in objects(kube, chart, LEAST_VALUES[chart])}
    # All operators of all namespaces see one Lease.
    assert found <= {NAMESPACES[chart], None, "kube-system"}


def test_the_charts_crds_are_the_files_of_the_repository(kube: Kube) -> None:
    rendered = [body for body in objects(kube, OPERATOR_CHART, {}) if body["kind"] == "CustomResourceDefinition"]
    wanted = [yaml.safe_load(crd.read_text()) for crd in CRDS]
    assert len(wanted) == 4
    assert sorted(rendered, key=lambda body: str(body["metadata"]["name"])) == wanted


def test_the_cluster_has_the_crds_of_the_repository(kube: Kube) -> None:
    for crd in CRDS:
        kube.kubectl("diff", "-f", crd)


def test_values_reach_the_worker(kube: Kube) -> None:
    pod = deployment(kube, WORKER_CHART, ALL_VALUES[WORKER_CHART])["spec"]["template"]["spec"]
    vllm: dict[str, Any] = pod["containers"][0]
    assert vllm["image"] == f"registry.example.org/poc@sha256:{'0' * 64}"
    assert vllm["args"] == [
        "some/model",
        "--enable-poc",
        "--host=::",
        "--port=9000",
        "--served-model-name=served",
        "--tensor-parallel-size=2",
    ]
    environment = {variable["name"]: variable.get("value") for variable in vllm["env"]}
    assert environment["VLLM_POC_CALLBACK_ALLOW"] == "*.example.org,example.com"
    assert {"VLLM_POC_TOKEN", "HF_TOKEN", "HTTPS_PROXY"} <= environment.keys()
    assert vllm["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "10"]}}}


@pytest.mark.parametrize(
    ("values", "answered"),
    [
        (MODEL, Answered.WITH_TOKEN),
        ({**MODEL, "auth": {"existingSecret": "pod-token", "open": True}}, Answered.WITH_TOKEN),
        ({**MODEL, **OPEN}, Answered.EVERYBODY),
    ],
    ids=["token", "token and open", "open"],
)
def test_a_pod_answers_whom_the_values_name(kube: Kube, values: Values, answered: Answered) -> None:
    (vllm,) = deployment(kube, WORKER_CHART, values)["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "from-a-secret") for entry in vllm["env"]}
    access = Access.decide(Settings.from_environment(variables), None, {})
    assert access.answered is answered
    assert access.allows_callback_to("collector.example.org")


def test_a_pod_has_time_to_end(kube: Kube) -> None:
    pod = deployment(kube, WORKER_CHART, MODEL)["spec"]["template"]["spec"]
    (pause,) = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert int(pause) + Settings().drain_seconds + 10 < pod["terminationGracePeriodSeconds"]
    without = deployment(kube, WORKER_CHART, {**MODEL, "preStopSeconds": 0})["spec"]["template"]["spec"]
    assert "lifecycle" not in without["containers"][0]


def test_watched_namespaces_reach_the_operator(kube: Kube) -> None:
    pod = deployment(kube, OPERATOR_CHART, ALL_VALUES[OPERATOR_CHART])["spec"]["template"]["spec"]
    namespaces = [f"--namespace={NAMESPACE}", "--namespace=default"]
    address = f"--gateway-url=http://{RELEASE}-vllm-poc-operator-gateway.{SYSTEM_NAMESPACE}.svc:8080"
    rate = "--max-nonces-per-second=12345"
    own = ["--log-format=plain", "--identity=$(POD_NAME)", "--lease-namespace=kube-public", *namespaces]
    pods = ["--pod-lease-seconds=600", "--pod-token-secret=pod-token"]
    fleets = "--worker-image=registry.example.org/worker:2"
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
