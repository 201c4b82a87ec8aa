# SPDX-License-Identifier: Apache-2.0
"""From docker-compose: the network node takes both configs, and the second one leads to the gateway's ML node."""

import json
import re
import shlex
import ssl
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from poc_gateway.node_api.base_url import split
from poc_operator.fleets.resolve import Preset, packaged
from tests.docs.pages import SHELL, Block, blocks
from tests.docs.schemas import values_errors
from tests.unit.poc_gateway.node_api.cluster import running_world
from tests.unit.poc_gateway.node_api.requests import INIT, error_of

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


def test_the_answer_of_the_admin_port_has_the_names_and_numbers_of_the_page() -> None:
    (answer,) = [json.loads(b.text) for b in _blocks() if b.language == "json" and b.title is None]
    (ml_node,) = _file("operator-values.yaml")["gateway"]["mlNodes"]
    assert [(one["node"]["id"], one["node"]["node_num"]) for one in answer] == [
        (_node(BEFORE)["id"], ml_node["number"])
    ]


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


def _rows(start: str) -> list[str]:
    """The first cells of the page's tables that begin so."""
    return re.findall(rf"^\| ({re.escape(start)}.+?) \|", _blocks()[0].page.read_text(), re.MULTILINE)


async def test_each_refusal_of_a_round_has_a_row_of_its_own(tmp_path: Path) -> None:
    """A wrong number, and callbacks that still have docker's name for the api container."""
    gateway = _file("operator-values.yaml")["gateway"]
    (ml_node,), (allowed,) = gateway["mlNodes"], gateway["receivers"]["allow"]
    rows = [re.escape(row.partition(": `")[2].rstrip("`")).replace("…", ".+") for row in _rows("422 in")]
    number, receiver = ml_node["number"], f"http://{allowed}:9100/v2/poc-batches/tiny"
    docker = {"node_id": number, "url": receiver.replace(allowed, "api")}
    also = {ml_node["name"]: {"number": number}}
    path = f"{urlsplit(_node(AFTER)['base_url']).path}/api/v1/inference/pow/init/generate"
    async with running_world(tmp_path, pods=0, also=also, POC_GATEWAY_RECEIVER_ALLOW=allowed) as world:
        for wrong in ({"node_id": number + 1, "url": receiver}, docker):
            error = error_of(await world.http.post(path, json=INIT | wrong), 422, "InvalidRequest")
            assert [row for row in rows if re.search(row, error.detail)] == [rows.pop(0)]
        assert rows == []
        right = await world.http.post(path, json=INIT | {"node_id": number, "url": receiver})
        assert right.status_code == 200


def _host() -> str:
    return str(urlsplit(_node(AFTER)["base_url"]).hostname)


def _commands(start: str) -> list[list[str]]:
    """The page's commands that begin so, each as a shell splits it."""
    return [shlex.split(c) for block in _blocks() for c in block.commands if c.startswith(start)]


def test_cert_manager_writes_the_secret_that_the_chart_reads() -> None:
    certificate = _file("certificate.yaml")
    assert certificate["spec"]["secretName"] == _file("operator-values.yaml")["gateway"]["tls"]["existingSecret"]
    assert certificate["spec"]["dnsNames"] == [_host()]
    assert certificate["metadata"]["namespace"] == "poc-system"


def test_a_certificate_by_hand_is_one_that_the_network_node_accepts(tmp_path: Path) -> None:
    (make,), (store,) = _commands("openssl req"), _commands("kubectl -n poc-system create secret tls")
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    options = dict(pairwise(store))
    assert options["tls"] == _file("operator-values.yaml")["gateway"]["tls"]["existingSecret"]
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / options["--cert"], tmp_path / options["--key"])
    # curl and the api container trust the same file.
    curls = [dict(pairwise(words)) for words in _commands("curl") if words[-1].startswith("$BASE")]
    assert curls
    (trusted,) = {words["--cacert"] for words in curls}
    # Without it, a refusal's detail is not shown.
    assert all("--fail-with-body" in words for words in _commands("curl -sS"))
    (mount,) = _file("docker-compose.gateway.yml")["services"]["api"]["volumes"]
    source, target, _ = mount.split(":")
    assert Path(source) == Path(trusted)
    # Go reads all files of this folder; SSL_CERT_FILE would take the place of the public authorities.
    assert Path(target).parent == Path("/etc/ssl/certs")
    _shake_hands(server, ssl.create_default_context(cafile=str(tmp_path / trusted)), _host())


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Let a client that asks for ``host`` verify the server; SSLError if it does not believe."""
    wires = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(wires[0], wires[1], server_hostname=host), server.wrap_bio(wires[1], wires[0], True)]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert sides[0].version()


def test_the_name_of_the_base_url_is_the_one_that_docker_compose_knows() -> None:
    (entry,) = _file("docker-compose.gateway.yml")["services"]["api"]["extra_hosts"]
    assert entry.split(":")[0] == _host()


def test_the_steps_are_numbered_and_those_that_are_named_exist() -> None:
    text = _blocks()[0].page.read_text()
    steps = [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1))
    assert {int(number) for number in re.findall(r"\bsteps? (\d+)", text)} <= set(steps)


def test_the_weights_are_there_before_the_pod() -> None:
    """So that GPUs which move are away for minutes."""
    fleet = _file("fleet.yaml")
    assert fleet["spec"]["cache"]["download"] is True
    (scale,) = _commands("kubectl -n poc scale")
    assert scale[-2:] == [f"pocfleet/{fleet['metadata']['name']}", f"--replicas={fleet['spec']['replicas']}"]


def test_the_network_nodes_machine_needs_no_kubectl() -> None:
    """It has docker; kubectl and the kubeconfig are elsewhere."""
    mixed = [b.where for b in _blocks() if b.language == SHELL and "kubectl" in b.text and "curl" in b.text]
    assert mixed == []


def test_the_files_of_values_for_tls_agree() -> None:
    example = yaml.safe_load((Path(_blocks()[0].page).parents[1] / "examples/values/cert-manager.yaml").read_text())
    gateway = _file("operator-values.yaml")["gateway"]
    assert values_errors("vllm-poc-operator", example) == []
    assert {key: gateway[key] for key in example["gateway"]} == example["gateway"]
