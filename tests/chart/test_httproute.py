# SPDX-License-Identifier: Apache-2.0
"""Routes of the Gateway API: to the gateway, and for chat past it to the pods."""

import copy
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART
from hack.toolchain.common import UserError
from hack.toolchain.tools import tool_path
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from tests.chart.helm import RELEASE, objects, render

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

NAME = f"{RELEASE}-vllm-poc-operator-gateway"
PARENTS = [{"name": "public", "sectionName": "https"}]
ML_NODE: dict[str, Any] = {
    "name": "h200",
    "host": "h200.example.org",
    "template": {"namespace": "poc-demo", "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "port": 9000}},
}


def values(**route: object) -> dict[str, Any]:
    options = {"enabled": True, "parentRefs": PARENTS, "hostnames": ["poc.example.org"]} | route
    return copy.deepcopy({"gateway": {"mlNodes": [ML_NODE], "httpRoute": options}})


@pytest.fixture(scope="module")
def helm() -> Kube:
    """Helm alone: no cluster is asked."""
    return Kube(kubectl_path=tool_path("kubectl"), helm_path=tool_path("helm"))


def routes(helm: Kube, given: dict[str, Any]) -> dict[str, Any]:
    found = [one for one in objects(helm, OPERATOR_CHART, given) if one["kind"] == "HTTPRoute"]
    return {one["metadata"]["name"]: one for one in found}


def test_there_are_no_routes_unless_asked_for(helm: Kube) -> None:
    assert routes(helm, {}) == {}
    assert routes(helm, values(enabled=False, chatPastGateway=True)) == {}


def test_everything_goes_to_the_gateway(helm: Kube) -> None:
    (route,) = routes(helm, values(annotations={"a": "b"})).values()
    assert (route["metadata"]["name"], route["metadata"]["namespace"]) == (NAME, "poc-system")
    assert route["metadata"]["annotations"] == {"a": "b"}
    assert route["spec"] == {
        "parentRefs": PARENTS,
        "hostnames": ["poc.example.org", "h200.example.org"],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [{"name": f"{NAME}-network", "port": 80}],
            }
        ],
    }


def test_chat_goes_past_the_gateway_without_its_token(helm: Kube) -> None:
    given = values(chatPastGateway=True)
    found = routes(helm, given)
    (chat, by_host) = (one for name, one in found.items() if name != NAME)
    assert {one["metadata"]["namespace"] for one in (chat, by_host)} == {"poc-demo"}
    assert chat["spec"]["parentRefs"] == [PARENTS[0] | {"namespace": "poc-system"}]
    (rule,), (other,) = chat["spec"]["rules"], by_host["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/nodes/h200/v1"}}]
    assert rule["filters"][0]["urlRewrite"]["path"] == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/v1"}
    assert (by_host["spec"]["hostnames"], other["matches"][0]["path"]["value"]) == (["h200.example.org"], "/v1")
    for one in (rule, other):
        assert {"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["Authorization"]}} in one[
            "filters"
        ]
        (backend,) = one["backendRefs"]
        (service,) = [
            o
            for o in objects(helm, OPERATOR_CHART, given)
            if (o["kind"], o["metadata"]["name"]) == ("Service", backend["name"])
        ]
        assert (service["metadata"]["namespace"], service["spec"]["selector"]) == ("poc-demo", {"app": "vllm"})
        assert service["spec"]["ports"] == [{"name": "http", "port": backend["port"], "targetPort": 9000}]


def test_chat_goes_past_the_gateway_to_a_fleet(helm: Kube) -> None:
    given = values(chatPastGateway=True)
    given["gateway"]["mlNodes"][0]["template"]["spec"] = {"fleetRef": {"name": "h200"}}
    (service,) = [
        one["spec"]
        for one in objects(helm, OPERATOR_CHART, given)
        if one["kind"] == "Service" and one["metadata"]["namespace"] == "poc-demo"
    ]
    assert service["selector"] == {FLEET_LABEL: "h200"}
    assert service["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]


def test_long_names_stay_names(helm: Kube) -> None:
    given = values(chatPastGateway=True)
    other = copy.deepcopy(ML_NODE) | {"name": "n" * 62, "host": "b200.example.org"}
    given["gateway"]["mlNodes"][0]["name"] = "n" * 63
    given["gateway"]["mlNodes"].append(other)
    names = [one["metadata"]["name"] for one in objects(helm, OPERATOR_CHART, given) if one["kind"] == "HTTPRoute"]
    assert len(set(names)) == 5
    assert all(len(name) <= 63 for name in names)


def test_what_does_not_go_together_is_refused(helm: Kube) -> None:
    tls, key, expressions = values(), values(chatPastGateway=True), values(chatPastGateway=True)
    tls["gateway"]["tls"] = {"existingSecret": "tls"}
    key["gateway"]["mlNodes"][0]["chat"] = {"existingSecret": "key"}
    selector = {"matchExpressions": [{"key": "a", "operator": "Exists"}]}
    expressions["gateway"]["mlNodes"][0]["template"]["spec"]["selector"] = selector
    parentless = values(parentRefs=[])
    for given, message in (
        (tls, "leave one of them out"),
        (key, "cannot send the token"),
        (expressions, "needs matchLabels alone"),
        (parentless, "/gateway/httpRoute/parentRefs"),
    ):
        with pytest.raises(UserError, match=message):
            render(helm, OPERATOR_CHART, given)
