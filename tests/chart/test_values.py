# SPDX-License-Identifier: Apache-2.0
"""Every value of the chart does something, has a type, and reaches the objects that it is for."""

import base64
import hashlib
import json
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml

from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import OPERATOR, SYSTEM_NAMESPACE
from hack.generate.values import paths
from hack.images.site import ROOT
from hack.toolchain.tools import tool_path
from tests.chart.cases import BASE, CASES
from tests.chart.rendered import Values, ensure, merged, nested, objects, pods, text

pytestmark = pytest.mark.timeout(60, func_only=True)

PREFIX = f"fresh-{OPERATOR}"


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    ensure()


def by_name(values: Values, kind: str) -> dict[str, Any]:
    return {body["metadata"]["name"]: body for body in objects(values) if body["kind"] == kind}


@cache
def rendered_once(values: str) -> str:
    """Return what helm prints for values as JSON: many cases have the same surroundings."""
    return text(json.loads(values))


def test_every_value_has_a_case_and_every_case_a_value() -> None:
    assert sorted(CASES) == sorted(paths(OPERATOR_CHART))


@pytest.mark.parametrize("path", CASES)
def test_every_value_has_an_effect(path: str) -> None:
    case = CASES[path]
    without = merged(BASE, case.beside)
    assert text(merged(without, nested(path, case.value))) != rendered_once(json.dumps(without))


@pytest.mark.parametrize("path", CASES)
def test_every_value_has_a_type(path: str) -> None:
    schema = json.loads((OPERATOR_CHART / "values.schema.json").read_text())
    # Kubernetes knows best what resources may be.
    for name in path.removesuffix(".requests").removesuffix(".limits").split("."):
        schema = schema["properties"][name]
    assert {"type", "enum"} & schema.keys()


def test_two_renderings_without_a_cluster_are_equal() -> None:
    # As GitOps tools need it: nothing is made up where the Secrets are named.
    assert text({**BASE, "crds": {"enabled": True}}) == text({**BASE, "crds": {"enabled": True}})


def test_releases_of_one_name_in_two_namespaces_share_no_cluster_wide_object() -> None:
    namespaced = {"watchNamespaces": ["poc"]}
    for values in (BASE, merged(BASE, namespaced)):
        found = []
        for namespace in ("one", "two"):
            bodies = objects(values, namespace=namespace)
            wide = [body for body in bodies if body["kind"] in {"ClusterRole", "ClusterRoleBinding"}]
            found.append({(body["kind"], body["metadata"]["name"]) for body in wide})
        assert found[0]
        assert not found[0] & found[1]


@pytest.mark.parametrize("namespaces", [[], ["poc"]], ids=["cluster", "roles"])
def test_every_binding_is_of_a_role_and_an_account_of_the_chart(namespaces: list[str]) -> None:
    bodies = objects(merged(BASE, {"watchNamespaces": namespaces}))
    named = {(body["kind"], body["metadata"].get("namespace"), body["metadata"]["name"]) for body in bodies}
    bindings = [body for body in bodies if body["kind"].endswith("RoleBinding")]
    for body in bindings:
        namespace = None if body["roleRef"]["kind"] == "ClusterRole" else body["metadata"]["namespace"]
        assert (body["roleRef"]["kind"], namespace, body["roleRef"]["name"]) in named
        assert {(one["kind"], one["namespace"], one["name"]) for one in body["subjects"]} <= named
    assert bindings


def test_pods_restart_when_the_charts_tokens_change() -> None:
    bodies = objects({"crds": {"enabled": False}})
    (secret,) = [body for body in bodies if body["kind"] == "Secret"]
    assert {len(base64.b64decode(value)) for value in secret["data"].values()} == {40}
    written = json.dumps(secret["data"], sort_keys=True, separators=(",", ":"))
    wanted = hashlib.sha256(written.encode()).hexdigest()
    found = [body for body in bodies if body["kind"] == "Deployment"]
    annotations = [body["spec"]["template"]["metadata"]["annotations"] for body in found]
    assert [one["checksum/tokens"] for one in annotations] == [wanted, wanted]
    # helm may not be allowed to read a Secret of yours.
    assert "checksum/tokens" not in text(BASE)


def test_the_gateway_may_be_scheduled_apart_from_the_operator() -> None:
    own: Values = {
        "podAnnotations": {"note": "gateway"},
        "podLabels": {"part": "gateway"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "storage", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
    }
    operators: Values = {**{name: type(value)() for name, value in own.items()}, "nodeSelector": {"pool": "system"}}
    apart = by_name(merged(BASE, {**operators, "gateway": own}), "Deployment")
    template = apart[f"{PREFIX}-gateway"]["spec"]["template"]
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert template["spec"][name] == own[name]
    assert template["metadata"]["annotations"].items() >= own["podAnnotations"].items()
    assert template["metadata"]["labels"].items() >= own["podLabels"].items()
    assert apart[PREFIX]["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "system"}
    shared = by_name(merged(BASE, {"nodeSelector": {"pool": "system"}}), "Deployment")
    assert shared[f"{PREFIX}-gateway"]["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "system"}


def test_a_registry_is_put_before_every_image() -> None:
    values: Values = {"global": {"imageRegistry": "registry.example.org/mirror/"}}
    bodies = objects(merged(BASE, values))
    images = [one["image"] for spec in pods(bodies).values() for one in spec["containers"]]
    operator = by_name(merged(BASE, values), "Deployment")[PREFIX]["spec"]["template"]["spec"]["containers"][0]
    images += [one.split("=", 1)[1] for one in operator["args"] if one.startswith("--worker-image=")]
    assert len(images) >= 4
    assert all(image.startswith("registry.example.org/mirror/vllm-poc-") for image in images)


def test_network_policies_close_what_nobody_uses() -> None:
    policies = by_name(BASE, "NetworkPolicy")
    assert policies[PREFIX]["spec"]["policyTypes"] == ["Ingress"]
    ports = {name: [one["ports"][0]["port"] for one in body["spec"]["ingress"]] for name, body in policies.items()}
    assert ports[f"{PREFIX}-gateway"] == ["inside", "metrics", "network"]
    assert "metrics" in ports[PREFIX]
    # Pods of all namespaces deliver, and API servers pass requests of `kubectl poc` on.
    assert "from" not in policies[f"{PREFIX}-gateway"]["spec"]["ingress"][0]


def test_watched_namespaces_alone_deliver() -> None:
    peers = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
    values = {"watchNamespaces": ["poc"], "gateway": {"networkPolicy": {"insideFrom": peers}}}
    inside = by_name(merged(BASE, values), "NetworkPolicy")[f"{PREFIX}-gateway"]["spec"]["ingress"][0]
    namespace = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["poc"]}
    assert inside["from"] == [
        {"podSelector": {}},
        {"namespaceSelector": {"matchExpressions": [namespace]}},
        *peers,
    ]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, ("Secret fresh-vllm-poc-operator-gateway-tokens", "the volume claim fresh-", "http://fresh-", "503")),
        ({"gateway": {"tls": {"existingSecret": "tls"}}}, ("https://fresh-vllm-poc-operator-gateway-network",)),
        (
            {"gateway": {"ingress": {"enabled": True, "hosts": [{"host": "a.org"}], "tls": [{"secretName": "a"}]}}},
            ("Ingress:        https://a.org",),
        ),
        ({"gateway": {"database": {"existingSecret": "database"}}}, ("the PostgreSQL of the Secret database",)),
        ({"watchNamespaces": ["poc"]}, ("gateway.networkPolicy.insideFrom",)),
        ({"gateway": {"enabled": False}}, ("There is no gateway: each round needs a callbackURL",)),
    ],
    ids=["defaults", "TLS", "Ingress", "PostgreSQL", "namespaces", "no gateway"],
)
def test_the_notes_tell_of_the_gateway(values: Values, says: tuple[str, ...]) -> None:
    argv = [str(tool_path("helm")), "install", "fresh", str(OPERATOR_CHART), f"--namespace={SYSTEM_NAMESPACE}"]
    done = subprocess.run(
        [*argv, "--dry-run=client", "--hide-secret", "--values=-"],
        input=json.dumps(values), capture_output=True, check=True, text=True, timeout=30,
    )  # fmt: skip
    notes = done.stdout.split("NOTES:\n")[1]
    assert [words for words in says if words not in notes] == []


def test_the_charts_metadata_name_what_registries_show() -> None:
    about = yaml.safe_load((OPERATOR_CHART / "Chart.yaml").read_text())
    shown = yaml.safe_load(about["annotations"]["artifacthub.io/crds"])
    served = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")]
    assert {(one["name"], one["kind"], one["version"]) for one in shown} == {
        (body["metadata"]["name"], body["spec"]["names"]["kind"], version["name"])
        for body in served
        for version in body["spec"]["versions"]
    }
    changes = yaml.safe_load(about["annotations"]["artifacthub.io/changes"])
    assert {one["kind"] for one in changes} <= {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert f"## [{about['version']}]" in (ROOT / "CHANGELOG.md").read_text()
