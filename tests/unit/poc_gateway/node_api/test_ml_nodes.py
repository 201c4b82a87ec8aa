# SPDX-License-Identifier: Apache-2.0
"""The file of the ML nodes: what it may say, and what is said of one that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from poc_gateway.node_api.ml_nodes import load_ml_nodes

SPEC: dict[str, Any] = {"selector": {"matchLabels": {"a": "b"}}}
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


def with_spec(**fields: object) -> list[dict[str, Any]]:
    return [ENTRY | {"template": {"namespace": "ns", "spec": SPEC | fields}}]


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
        ([ENTRY | {"template": {"namespace": "ns", "spec": {}}}], "selector is missing"),
        (with_spec(rTarget="1.4"), "rTarget come with each request"),
        (with_spec(callbackSecretRef={"name": "s"}), "callbackSecretRef cannot be used with addresses of requests"),
        (with_spec(nodes={"count": 4}), "nodes may only have groups"),
        (with_spec(selector={}), "selector is empty and would take every pod"),
        (with_spec(onBusy="Wait"), "a PoCRound's spec has no onBusy"),
        ([ENTRY, other(name="a")], "name: a is that of several ML nodes"),
        ([ENTRY | {"host": "x.org"}, other(host="X.org")], "host: x.org is that of several ML nodes"),
        ([ENTRY | {"number": 1}, other(number=1)], "number: 1 is that of several ML nodes"),
        ([ENTRY, ENTRY | {"name": "b"}], "template: ns: a=b is that of several ML nodes"),
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
