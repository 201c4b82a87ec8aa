# SPDX-License-Identifier: Apache-2.0
"""The gateway's Ingress: what it exposes, and that the NetworkPolicy lets its controller in."""

from typing import Any

import pytest

from hack.deploy.releases import OPERATOR, SYSTEM_NAMESPACE
from hack.toolchain.common import UserError
from tests.chart.cases import BASE
from tests.chart.rendered import RELEASE, Values, ensure, merged, objects, text

pytestmark = pytest.mark.timeout(60, func_only=True)

NAME = f"{RELEASE}-{OPERATOR}-gateway"
HOSTS = [{"host": "poc.example.org"}]
CONTROLLER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "traefik"}}}
NETWORK_NODE = {"ipBlock": {"cidr": "192.0.2.10/32"}}


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    ensure()


def values(*, policy: Values | None = None, gateway: Values | None = None, **ingress: object) -> Values:
    options: Values = {"ingress": {"enabled": True, "hosts": HOSTS, **ingress}, "networkPolicy": policy or {}}
    return merged(BASE, {"gateway": {**options, **(gateway or {})}})


def ingress(given: Values) -> Any:  # noqa: ANN401 - a Kubernetes object
    (found,) = [one for one in objects(given) if one["kind"] == "Ingress"]
    return found


def paths(rule: Values) -> list[tuple[str, str]]:
    return [(one["path"], one["pathType"]) for one in rule["http"]["paths"]]


def network_peers(given: Values) -> object:
    """Return who may use the port of the network's routes; None for everybody."""
    (policy,) = [one for one in objects(given) if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", NAME)]
    (rule,) = [one for one in policy["spec"]["ingress"] if one["ports"] == [{"port": "network"}]]
    return rule.get("from")


@pytest.mark.parametrize("given", [{}, {"gateway": {"enabled": False, "ingress": {"enabled": True}}}], ids=str)
def test_there_is_none_unless_asked_for(given: Values) -> None:
    assert not [one for one in objects(merged(BASE, given)) if one["kind"] == "Ingress"]


def test_it_has_what_the_values_say() -> None:
    tls = [{"hosts": ["poc.example.org"], "secretName": "poc-tls"}]
    found = ingress(values(className="traefik", annotations={"example.org/note": "text"}, tls=tls))
    assert (found["metadata"]["name"], found["metadata"]["namespace"]) == (NAME, SYSTEM_NAMESPACE)
    assert found["metadata"]["annotations"] == {"example.org/note": "text"}
    assert (found["spec"]["ingressClassName"], found["spec"]["tls"]) == ("traefik", tls)
    least = ingress(values())
    assert set(least["spec"]) == {"rules"}
    assert "annotations" not in least["metadata"]


def test_nothing_but_the_networks_port_is_behind_it() -> None:
    hosts = [*HOSTS, {"host": "b.example.org", "paths": [{"path": "/nodes/a"}, {"path": "/nodes/b"}]}]
    bodies = objects(values(hosts=hosts, gateway={"networkService": {"port": 8443}}))
    (found,) = [one for one in bodies if one["kind"] == "Ingress"]
    backends = [one["backend"]["service"] for rule in found["spec"]["rules"] for one in rule["http"]["paths"]]
    assert backends == [{"name": f"{NAME}-network", "port": {"number": 8443}}] * 3
    (service,) = [one for one in bodies if (one["kind"], one["metadata"]["name"]) == ("Service", f"{NAME}-network")]
    assert service["spec"]["ports"] == [{"name": "network", "port": 8443, "targetPort": "network"}]


def test_hosts_and_paths_have_defaults() -> None:
    exact = {"path": "/nodes/h200", "pathType": "Exact"}
    given = values(hosts=[{"host": "*.example.org"}, {"host": "a.org", "paths": [exact, {"path": "/nodes/b"}]}, {}])
    every_path, some_paths, every_host = ingress(given)["spec"]["rules"]
    assert (every_path["host"], paths(every_path)) == ("*.example.org", [("/", "Prefix")])
    assert (some_paths["host"], paths(some_paths)) == ("a.org", [("/nodes/h200", "Exact"), ("/nodes/b", "Prefix")])
    assert "host" not in every_host
    assert paths(every_host) == [("/", "Prefix")]


def test_hosts_of_ml_nodes_are_added_once() -> None:
    template = {"namespace": "poc", "spec": {"fleetRef": {"name": "a"}}}
    nodes = [
        {"name": "a", "host": "a.example.org", "template": template},
        {"name": "b", "host": "poc.example.org", "template": template},
        {"name": "c", "template": template},
    ]
    rules = ingress(values(gateway={"mlNodes": nodes}))["spec"]["rules"]
    assert [(rule["host"], paths(rule)) for rule in rules] == [
        ("poc.example.org", [("/", "Prefix")]),
        ("a.example.org", [("/", "Prefix")]),
    ]
    alone = ingress(values(hosts=[], gateway={"mlNodes": nodes[:1]}))["spec"]["rules"]
    assert [rule["host"] for rule in alone] == ["a.example.org"]


def test_without_a_host_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"name one in gateway\.ingress\.hosts, or the host of an ML node"):
        text(values(hosts=[]))


def test_a_policy_that_keeps_the_controller_out_is_refused() -> None:
    says = r"networkFrom keeps the ingress controller .* out: name .* in gateway\.networkPolicy\.ingressFrom"
    with pytest.raises(UserError, match=says):
        text(values(policy={"networkFrom": [NETWORK_NODE]}))


def test_every_other_policy_lets_the_controller_in() -> None:
    both = {"networkFrom": [NETWORK_NODE], "ingressFrom": [CONTROLLER]}
    assert network_peers(values(policy=both)) == [NETWORK_NODE, CONTROLLER]
    assert network_peers(values(policy={"ingressFrom": [CONTROLLER]})) == [CONTROLLER]
    assert network_peers(values()) is None
    assert ingress(values(policy={"enabled": False, "networkFrom": [NETWORK_NODE]}))


def test_without_an_ingress_no_controller_is_asked_for() -> None:
    assert network_peers(values(enabled=False, policy={"networkFrom": [NETWORK_NODE]})) == [NETWORK_NODE]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"hosts": ["poc.example.org"]}, "/gateway/ingress/hosts/0"),
        ({"hosts": [{"host": "https://poc.example.org"}]}, "/gateway/ingress/hosts/0/host"),
        ({"hosts": [{"host": "a.org", "paths": ["/"]}]}, "/gateway/ingress/hosts/0/paths/0"),
        ({"hosts": [{"host": "a.org", "paths": [{"path": "nodes"}]}]}, "/gateway/ingress/hosts/0/paths/0/path"),
        ({"hosts": [{"host": "a.org", "paths": [{"path": "/", "pathType": "Regex"}]}]}, "paths/0/pathType"),
        ({"tls": [{"secret": "poc-tls"}]}, "/gateway/ingress/tls/0"),
        ({"annotations": {"a": True}}, "/gateway/ingress/annotations/a"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: Values, where: str) -> None:
    with pytest.raises(UserError, match=where):
        text(values(**wrong))
