# SPDX-License-Identifier: Apache-2.0
"""Names, labels and objects that users choose: they are everywhere, and nothing that finds objects breaks."""

from typing import Any

import pytest
import yaml

from hack.deploy.releases import OPERATOR, SYSTEM_NAMESPACE
from hack.toolchain.common import UserError
from poc_operator.cli import gateway_proxy, looking
from tests.chart.cases import BASE
from tests.chart.rendered import RELEASE, Values, ensure, merged, objects, text

pytestmark = pytest.mark.timeout(60, func_only=True)

_NODE = {"name": "h200", "host": "a.org", "template": {"namespace": "poc", "spec": {"fleetRef": {"name": "h200"}}}}
#: All objects that the chart can have, with the tokens and the volume claim of the gateway.
ALL: Values = {
    "gateway": {
        "ingress": {"enabled": True},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "chatPastGateway": True},
        "mlNodes": [_NODE],
    },
    "metrics": {
        "service": True,
        "serviceMonitor": True,
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "runbookUrl": "https://docs.example.org/alerts"},
        "dashboards": {"enabled": True},
    },
}
#: Values, and how all names begin with them.
NAMES: dict[str, tuple[Values, str]] = {
    "defaults": ({}, f"{RELEASE}-{OPERATOR}"),
    "name": ({"nameOverride": "poc"}, f"{RELEASE}-poc"),
    "name in the release's": ({"nameOverride": "res"}, RELEASE),
    "full name": ({"fullnameOverride": "poc"}, "poc"),
    "both": ({"nameOverride": "unused", "fullnameOverride": "poc"}, "poc"),
}
EVERY_NAME = pytest.mark.parametrize(("given", "name"), NAMES.values(), ids=NAMES)
LABELS = {"example.org/team": "a", "app.kubernetes.io/part-of": "poc"}

Objects = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    ensure()


def everything(given: Values) -> list[dict[str, Any]]:
    """Return all objects but the CRDs, whose names are those of the kinds."""
    return objects(merged(merged(ALL, {"crds": {"enabled": False}}), given))


def of(bodies: list[dict[str, Any]], kind: str) -> Objects:
    return {body["metadata"]["name"]: body for body in bodies if body["kind"] == kind}


def container(deployment: dict[str, Any]) -> Any:  # noqa: ANN401 - of a Kubernetes object
    return deployment["spec"]["template"]["spec"]["containers"][0]


@EVERY_NAME
def test_every_name_follows(given: Values, name: str) -> None:
    bodies = everything(given)
    found = {body["metadata"]["name"] for body in bodies}
    assert [one for one in found if one != name and not one.startswith((f"{name}-", f"{name}:"))] == []
    assert of(bodies, "Deployment").keys() == {name, f"{name}-gateway"}
    # No object names another one as it was.
    assert (f"{RELEASE}-{OPERATOR}" in yaml.safe_dump_all(bodies)) is (not given)


@EVERY_NAME
def test_who_calls_the_gateway_knows_its_service(given: Values, name: str) -> None:
    bodies = everything(given)
    assert f"{name}-gateway" in of(bodies, "Service")
    url = f"--gateway-url=http://{name}-gateway.{SYSTEM_NAMESPACE}.svc:8080"
    assert url in container(of(bodies, "Deployment")[name])["args"]
    assert url in of(bodies, "Pod")[f"{name}-test"]["spec"]["containers"][0]["args"]
    (ingress,), (route,) = (of(bodies, kind)[f"{name}-gateway"]["spec"]["rules"] for kind in ("Ingress", "HTTPRoute"))
    backends = [ingress["http"]["paths"][0]["backend"]["service"], *route["backendRefs"]]
    assert [one["name"] for one in backends] == [f"{name}-gateway-network"] * 2
    assert f"{name}-gateway-network" in of(bodies, "Service")


@EVERY_NAME
def test_the_gateway_finds_its_tokens_and_its_volume(given: Values, name: str) -> None:
    bodies = everything(given)
    secrets = {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for deployment in of(bodies, "Deployment").values()
        for variable in container(deployment)["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    assert secrets == of(bodies, "Secret").keys() == {f"{name}-gateway-tokens"}
    volumes = of(bodies, "Deployment")[f"{name}-gateway"]["spec"]["template"]["spec"]["volumes"]
    claims = {one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one}
    assert claims == of(bodies, "PersistentVolumeClaim").keys() == {f"{name}-gateway"}


@EVERY_NAME
def test_kubectl_poc_finds_operator_and_gateway_under_every_name(given: Values, name: str) -> None:
    bodies = everything({**given, "commonLabels": LABELS})
    for selector, kind, wanted in (
        (looking.OPERATOR_SELECTOR, "Deployment", {name}),
        (gateway_proxy.SELECTOR, "Deployment", {f"{name}-gateway"}),
        (gateway_proxy.SELECTOR, "Service", {f"{name}-gateway{end}" for end in ("", "-network", "-metrics")}),
    ):
        label, _, value = selector.partition("=")
        found = {one for one, body in of(bodies, kind).items() if body["metadata"]["labels"][label] == value}
        assert {one for one in found if "-chat-" not in one} == wanted


@pytest.mark.parametrize("given", [{"fullnameOverride": "poc"}, {"nameOverride": "poc"}, {"commonLabels": LABELS}])
def test_selectors_stay(given: Values) -> None:
    """The API server refuses a Deployment whose selector changes."""

    def selectors(values: Values) -> list[object]:
        return [one["spec"]["selector"] for _, one in sorted(of(everything(values), "Deployment").items())]

    assert selectors(given) == selectors({})


def test_the_longest_name_is_kept_and_none_is_too_long() -> None:
    longest = "n" * 47
    services = of(everything({"fullnameOverride": longest}), "Service")
    assert f"{longest}-gateway-network" in services
    assert max(map(len, services)) == 63
    with pytest.raises(UserError, match=r"/fullnameOverride.*maxLength"):
        text({"fullnameOverride": f"{longest}n"})


def test_services_of_a_longer_name_have_a_length_that_the_api_server_takes() -> None:
    services = of(everything({"nameOverride": "n" * 63}), "Service")
    assert len(services) == 5
    assert max(map(len, services)) <= 63


@pytest.mark.parametrize("name", ["Poc", "poc_", "-poc", "1poc", "poc.a"])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"/fullnameOverride.*pattern"):
        text({"fullnameOverride": name})


def test_common_labels_are_on_every_object_and_every_pod() -> None:
    bodies = objects(merged(ALL, {"commonLabels": LABELS}))
    templates = [body["spec"]["template"] for body in bodies if body["kind"] in {"Deployment", "Job"}]
    assert len(templates) == 3
    assert of(bodies, "CustomResourceDefinition")
    without = [
        body for body in [*bodies, *templates] if not body["metadata"].get("labels", {}).items() >= LABELS.items()
    ]
    assert without == []


def test_crds_differ_in_the_labels_alone() -> None:
    plain, labelled = (of(objects(given), "CustomResourceDefinition") for given in ({}, {"commonLabels": LABELS}))
    for body in labelled.values():
        assert body["metadata"].pop("labels") == LABELS
    assert labelled == plain


def test_labels_of_one_place_win_over_common_ones_and_the_charts_over_both() -> None:
    given: Values = {"commonLabels": {"team": "all"}, "podLabels": {"team": "pods", "app.kubernetes.io/name": "other"}}
    operator = of(objects(merged(BASE, given)), "Deployment")[f"{RELEASE}-{OPERATOR}"]
    assert operator["metadata"]["labels"]["team"] == "all"
    pod = operator["spec"]["template"]["metadata"]["labels"]
    assert (pod["team"], pod["app.kubernetes.io/name"]) == ("pods", OPERATOR)


@pytest.mark.parametrize(
    "label",
    [
        "app.kubernetes.io/name",
        "app.kubernetes.io/managed-by",
        "helm.sh/chart",
        "rbac.authorization.k8s.io/aggregate-to-admin",
        "poc.gonka.ai/worker",
    ],
)
def test_common_labels_are_none_by_which_objects_are_found(label: str) -> None:
    with pytest.raises(UserError, match=f'commonLabels: .* find objects by "{label}": leave it out'):
        text(merged(BASE, {"commonLabels": {label: "true"}}))


def test_extra_objects_are_rendered() -> None:
    service = '{{ include "gateway.fullname" . }}'
    written = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{service}-a"}, "data": {"of": service}}
    several = "\n---\n".join(
        f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: {{{{ .Release.Namespace }}}}}}"
        for name in ("first", "second")
    )
    found = of(objects(merged(BASE, {"fullnameOverride": "poc", "extraObjects": [written, several]})), "ConfigMap")
    assert found.keys() == {"poc-gateway-a", "first", "second"}
    assert found["poc-gateway-a"]["data"] == {"of": "poc-gateway"}
    assert found["second"]["metadata"]["namespace"] == SYSTEM_NAMESPACE


@pytest.mark.parametrize("wrong", [1, {"kind": "ConfigMap"}], ids=str)
def test_extra_objects_are_objects_or_text(wrong: object) -> None:
    with pytest.raises(UserError, match="/extraObjects/0"):
        text({"extraObjects": [wrong]})


def test_values_of_an_older_installation_are_enough() -> None:
    """As `helm upgrade --reuse-values` has them, which the runbooks use."""
    missing: Values = dict.fromkeys(("nameOverride", "fullnameOverride", "commonLabels", "extraObjects"))
    missing["gateway"] = {"ingress": None, "networkPolicy": {"ingressFrom": None}}
    assert text(merged(BASE, missing)) == text(BASE)
