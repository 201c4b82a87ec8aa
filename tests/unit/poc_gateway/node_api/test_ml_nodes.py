# SPDX-License-Identifier: Apache-2.0
"""The file of the ML nodes: what it may say, and what is said of one that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from poc_gateway.node_api.ml_nodes import load_ml_nodes
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import running_pod
from tests.unit.poc_gateway.node_api.cluster import FLEET as FLEET_NAME
from tests.unit.poc_gateway.node_api.cluster import OF_FLEET, running_world
from tests.unit.poc_gateway.node_api.requests import INIT, validation

SPEC: dict[str, Any] = {"selector": {"matchLabels": {"a": "b"}}}
FLEET: dict[str, Any] = {"fleetRef": {"name": "h200"}}
ENTRY: dict[str, Any] = {"name": "a", "template": {"namespace": "ns", "spec": SPEC}}


def other(**fields: object) -> dict[str, Any]:
    """An ML node that differs from `ENTRY` in all that must differ."""
    template = {"namespace": "ns", "spec": {"selector": {"matchLabels": {"a": "c"}}}}
    return {"name": "b", "template": template} | fields


def load(folder: Path, entries: object) -> Any:  # noqa: ANN401
    file = folder / "ml-nodes.json"
    file.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return load_ml_nodes(file)


def test_ml_nodes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(" first, newer\n")
    monkeypatch.setenv("SECOND", " one, with a comma\n")
    token, chat = {"file": str(tmp_path / "token")}, {"env": "SECOND"}
    spec = SPEC | {"port": 9000, "nodes": {"groups": 4}, "model": {"name": "tiny"}}
    full = {"name": "a-1", "number": 0, "host": "A.Example.org.", "token": token, "chatToken": chat}
    first, second = load(tmp_path, [full | {"template": {"namespace": "ns", "spec": spec}}, other()])
    assert (first.name, first.number, first.host) == ("a-1", 0, "a.example.org")
    assert [one.get_secret_value() for one in first.token.read_several()] == ["first", "newer"]
    assert first.chat_token.read().get_secret_value() == "one, with a comma"
    assert first.labels == {"poc.gonka.ai/origin": "network", "poc.gonka.ai/ml-node": "a-1"}
    template = first.template
    assert (template.namespace, str(template.selector), template.port, template.model) == ("ns", "a=b", 9000, "tiny")
    assert template.spec_of({"nodes": {"first": 1, "last": 1, "count": 2}})["nodes"] == {
        "first": 1,
        "last": 1,
        "count": 2,
        "groups": 4,
    }
    assert (second.number, second.host, second.token, second.chat_token) == (None, None, None, None)
    assert (second.template.port, second.template.model) == (8000, None)


def test_chains_are_not_compared_between_pods(tmp_path: Path) -> None:
    (one,) = load(tmp_path, of_spec(SPEC | {"crossCheck": {}}))
    nodes = {"first": 1, "last": 1, "count": 2}
    assert "crossCheck" in one.template.spec_of({"nodes": nodes, "artifact": {}})
    assert "crossCheck" not in one.template.spec_of({"nodes": nodes, "decode": {"maxTokens": 256}})


def of_spec(spec: dict[str, Any], **fields: object) -> list[dict[str, Any]]:
    return [ENTRY | {"template": {"namespace": "ns", "spec": spec}} | fields]


def with_spec(**fields: object) -> list[dict[str, Any]]:
    return of_spec(SPEC | fields)


def test_an_ml_node_may_be_a_fleet(tmp_path: Path) -> None:
    (one,) = load(tmp_path, of_spec(FLEET | {"model": {"name": "tiny"}}))
    template = one.template
    assert (str(template.selector), template.port, template.model) == ("poc.gonka.ai/fleet=h200", None, "tiny")
    spec = template.spec_of({"nodes": {"first": 1, "last": 1, "count": 2}})
    assert spec == FLEET | {"model": {"name": "tiny"}, "nodes": {"first": 1, "last": 1, "count": 2}}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("{", "while parsing"),
        ({"name": "a"}, "valid list"),
        ([{"name": "a"}], "0.template: Field required"),
        ([ENTRY | {"name": "A.b"}], "0.name: String should match pattern"),
        ([ENTRY | {"name": "a" * 64}], "0.name: String should match pattern"),
        ([ENTRY | {"number": -1}], "0.number: Input should be greater"),
        ([ENTRY | {"hosts": "x"}], "0.hosts: Extra inputs are not permitted"),
        ([ENTRY | {"token": {}}], "0.token: Value error, set either file or env"),
        ([ENTRY | {"template": {"spec": SPEC}}], "0.template.namespace: Field required"),
        (of_spec({}), "set exactly one of fleetRef and selector"),
        (with_spec(**FLEET), "set exactly one of fleetRef and selector"),
        (of_spec({"fleetRef": {}}), "fleetRef must have the name of a PoCFleet, as in {name: h200}"),
        (of_spec({"fleetRef": {"name": "A_b"}}), "fleetRef must have the name of a PoCFleet"),
        (of_spec({"fleetRef": "h200"}), "fleetRef must have the name of a PoCFleet"),
        (of_spec(FLEET | {"port": 8000}), "port is that of the fleet: remove port, or fleetRef"),
        (with_spec(rTarget="1.4"), "rTarget come with each request"),
        (with_spec(callbackSecretRef={"name": "s"}), "callbackSecretRef cannot be used with addresses of requests"),
        (with_spec(nodes={"count": 4}), "nodes may only have groups"),
        (with_spec(selector={}), "selector is empty and would take every pod"),
        (with_spec(onBusy="Wait"), "a PoCRound's spec has no onBusy"),
        ([ENTRY, other(name="a")], "name: a is that of several ML nodes"),
        ([ENTRY | {"host": "x.org"}, other(host="X.org")], "host: x.org is that of several ML nodes"),
        ([ENTRY | {"number": 1}, other(number=1)], "number: 1 is that of several ML nodes"),
        ([ENTRY, ENTRY | {"name": "b"}], "template: ns: a=b is that of several ML nodes"),
        (
            [*of_spec(FLEET), *of_spec(FLEET, name="b")],
            "template: ns: poc.gonka.ai/fleet=h200 is that of several ML nodes",
        ),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, entries: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"POC_GATEWAY_ML_NODES=.*ml-nodes\.json") as caught:
        load(tmp_path, entries)
    assert message in str(caught.value)


def test_a_token_that_is_not_there_is_explained(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for source, message in (
        ({"file": str(tmp_path / "none")}, "none cannot be read"),
        ({"file": str(tmp_path / "empty")}, "empty holds no token: write one into it"),
        ({"env": "POC_NO_SUCH_VARIABLE"}, "the environment variable POC_NO_SUCH_VARIABLE holds no token"),
    ):
        (one,) = load(tmp_path, [ENTRY | {"token": source}])
        with pytest.raises(ValueError, match=message):
            one.token.read()


async def test_the_pods_of_a_fleet_are_found_by_its_name(tmp_path: Path) -> None:
    """Whatever port they have; a pod of another fleet is none of the ML node's."""
    async with running_world(tmp_path, pods=1, one={"template": OF_FLEET}) as world, running_pod() as other:
        port = free_port()
        async with serve(other.app, "127.0.0.2", port):
            world.announce("127.0.0.2", port=port)
            world.announce("127.0.0.3", fleet="other")
            assert (await world.http.get("/health")).json()["service_state"] == "INFERENCE"
            assert (await world.get("state")).json()["loaded_model"] == "tiny"
            assert (await world.get("versions")).json()["vllm_version"] is not None
            assert (await world.post("models/status", {"hf_repo": "tiny"})).json()["status"] == "DOWNLOADED"
            assert (await world.get("inference/pow/status")).json()["status"] == "IDLE"
            started = (await world.post("inference/pow/init/generate", INIT)).json()
            assert (started["status"], started["backends"]) == ("OK", 2)
            (spec,) = world.cluster.specs
            assert (spec["fleetRef"], spec.keys() & {"selector", "port"}) == ({"name": FLEET_NAME}, set())
            told = (await world.post("inference/pow/generate", validation(wait=True))).json()
            assert (told["n_total"], told["n_mismatch"]) == (200, 0)
