# SPDX-License-Identifier: Apache-2.0
"""From docker-compose: the network node takes both configs, and the second one leads to the gateway's ML node."""

import json
from typing import Any
from urllib.parse import urlsplit

import yaml

from poc_gateway.node_api.base_url import split
from poc_operator.fleets.resolve import Preset, packaged
from tests.docs.pages import Block, blocks

BEFORE, AFTER = "node-config.json before", "node-config.json after"
#: Ways in which the network node names a place: it takes one of them, never both.
PLACES = ({"host", "inference_port", "poc_port"}, {"base_url"})


def _blocks() -> list[Block]:
    return [block for block in blocks() if block.page.name == "docker-compose.md"]


def _file(title: str) -> Any:  # noqa: ANN401 - JSON or YAML
    (found,) = [block.text for block in _blocks() if block.title == title]
    return json.loads(found) if ".json" in title else yaml.safe_load(found)


def _node(title: str) -> dict[str, Any]:
    (node,) = _file(title)
    assert isinstance(node, dict)
    return node


def test_each_config_names_the_place_in_one_way() -> None:
    for title, wanted in zip((BEFORE, AFTER), PLACES, strict=True):
        node = _node(title)
        assert [place for place in PLACES if place & set(node)] == [wanted]
        assert node["max_concurrent"] > 0
        assert node["models"]


def test_the_rest_of_the_node_stays() -> None:
    kept = [{key: node[key] for key in ("id", "max_concurrent", "models")} for node in map(_node, (BEFORE, AFTER))]
    assert kept[0] == kept[1]
    assert "auth_token" in _node(AFTER)


def test_the_base_url_leads_to_the_ml_node() -> None:
    (ml_node,) = _file("operator-values.yaml")["gateway"]["mlNodes"]
    url = urlsplit(_node(AFTER)["base_url"])
    assert url.scheme == "https"
    # The network node puts the version before the path or after it.
    for path in (f"{url.path}/api/v1/state", f"{url.path}/v3.0.8/api/v1/state", f"/v3.0.8{url.path}/api/v1/state"):
        assert split(path) == (ml_node["name"], "/api/v1/state")
    checks = [command for block in _blocks() for command in block.commands if command.startswith("BASE=")]
    assert checks == [f"BASE={_node(AFTER)['base_url']}"]


def test_the_fleet_serves_the_model_of_the_node() -> None:
    (ml_node,) = _file("operator-values.yaml")["gateway"]["mlNodes"]
    fleet = _file("fleet.yaml")
    assert ml_node["template"]["spec"]["fleetRef"]["name"] == fleet["metadata"]["name"]
    preset = packaged()[fleet["spec"]["model"]["preset"]]
    assert isinstance(preset, Preset)
    assert list(_node(AFTER)["models"]) == [preset.model]
    gpu = fleet["spec"]["gpu"]
    assert any(one.product in gpu["product"] and one.count == gpu["count"] for one in preset.gpus)


def test_results_may_go_to_the_callback_address() -> None:
    gateway = _file("operator-values.yaml")["gateway"]
    (line,) = [c for block in _blocks() for c in block.commands if c.startswith("export DAPI_API__POC_CALLBACK_URL=")]
    assert gateway["receivers"]["allow"] == [urlsplit(line.partition("=")[2]).hostname]
    assert gateway["receivers"]["private"]
