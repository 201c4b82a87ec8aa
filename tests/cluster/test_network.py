# SPDX-License-Identifier: Apache-2.0
"""What the network's node sends in an epoch, against the gateway, the operator and real vLLM pods."""

import logging
from collections.abc import Iterator
from time import monotonic
from typing import Any

import httpx
import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import SERVED_NAME
from hack.deploy.releases import PODS
from hack.toolchain.common import wait_until
from tests.cluster.gateway import delete_network_rounds, network_of, network_rounds, wait_until_forwarded
from tests.cluster.results import elsewhere, items
from tests.support.fakes.receiver import Receiver

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240, func_only=True)]

log = logging.getLogger(__name__)

NODE = "/api/v1/inference/pow"
SAMPLE = 200
BLOCK: dict[str, Any] = {
    "block_hash": "ab" * 32,
    "block_height": 4711,
    "public_key": "AqBX",
    "node_id": 1,
    "node_count": 3,
    "params": {"model": SERVED_NAME, "seq_len": 64},
    "poc_stronger_rng": True,
}
#: As the chain sends them: the threshold under the name that the reference ignores.
STAT_TEST = {"dist_threshold": 0.2, "p_mismatch": 0.1, "p_value_threshold": 0.05}
PORTS = [5001 + number for number in range(PODS)]


@pytest.fixture
def network(kube: Kube) -> Iterator[httpx.Client]:
    """A client of the network's routes; rounds that it asked for are removed."""
    delete_network_rounds(kube)
    with network_of(kube) as client:
        yield client
    delete_network_rounds(kube)


def backends(status: str) -> list[dict[str, Any]]:
    return [{"port": port, "status": status} for port in PORTS]


def statuses(client: httpx.Client) -> tuple[str, list[dict[str, Any]]]:
    """The status of all, and of each backend without its rate."""
    told = get(client, f"{NODE}/status")
    return told["status"], [{"port": one["port"], "status": one["status"]} for one in told["backends"]]


def post(client: httpx.Client, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def get(client: httpx.Client, path: str) -> dict[str, Any]:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def validate(client: httpx.Client, sample: dict[int, str], url: str) -> dict[str, Any]:
    """Let the node check artifacts of a foreign prover; return the verdict once it is there."""
    received = [{"nonce": nonce, "vector_b64": vector} for nonce, vector in sample.items()]
    foreign = {**BLOCK, "node_id": 2, "node_count": 5, "nonces": list(sample), "url": url}
    queued = post(
        client, f"{NODE}/generate", {**foreign, "validation": {"artifacts": received}, "stat_test": STAT_TEST}
    )
    assert (queued["status"], queued["queued_count"]) == ("queued", len(sample))
    told: dict[str, Any] = {}

    def over() -> bool:
        told.update(get(client, f"{NODE}/generate/{queued['request_id']}"))
        return told["status"] not in ("queued", "running")

    assert wait_until(over, 120), told
    return told


def test_an_epoch_as_the_networks_node_drives_it(kube: Kube, network: httpx.Client, receiver: Receiver) -> None:
    assert get(network, "/readyz") == {"status": "healthy", "ready": True}
    assert get(network, "/health")["managers"]["inference"] == {"running": True, "healthy": True}
    assert get(network, "/api/v1/state")["state"] == "INFERENCE"
    assert get(network, "/api/v1/state")["loaded_model"] == SERVED_NAME
    assert get(network, "/api/v1/state")["poc_validation_inference"] is True
    assert statuses(network) == ("IDLE", backends("IDLE"))

    started = {"status": "OK", "backends": PODS, "n_groups": PODS, "results": backends("OK"), "errors": []}
    for _ in range(2):  # the node repeats what it is not sure of
        assert post(network, f"{NODE}/init/generate", {**BLOCK, "url": receiver.url}) == started
    assert wait_until(lambda: statuses(network) == ("GENERATING", backends("GENERATING")), 30)
    assert get(network, "/api/v1/state")["state"] == "POW"
    assert receiver.wait_for(3)
    stopped = post(network, f"{NODE}/stop")
    assert stopped == {"status": "OK", "results": backends("OK"), "errors": []}
    assert get(network, f"{NODE}/status")["status"] == "IDLE"

    (found,) = network_rounds(kube)
    assert found["status"]["state"] == "Complete"
    wait_until_forwarded(kube, found["metadata"]["name"])
    values = {nonce: str(vector) for nonce, vector in items(receiver.bodies)}
    assert len(values) == found["status"]["totals"]["delivered"] > SAMPLE
    assert {nonce % 3 for nonce in values} == {1}
    assert {body["node_id"] for body in receiver.bodies} == {1}

    sample = dict(list(values.items())[:SAMPLE])
    honest = validate(network, sample, receiver.url)
    assert (honest["status"], honest["n_total"], honest["n_mismatch"]) == ("completed", SAMPLE, 0)
    assert honest["fraud_detected"] is False
    made_up = {**sample, **{nonce: elsewhere(sample[nonce], STAT_TEST) for nonce in list(sample)[:40]}}
    caught = validate(network, made_up, receiver.url)
    assert (caught["n_total"], caught["mismatch_nonces"]) == (SAMPLE, list(sample)[:40])
    assert caught["fraud_detected"] is True
    for verdict in (honest, caught):
        (told,) = receiver.verdicts_of(verdict["request_id"])
        assert told.items() >= {"node_id": 2, "public_key": "AqBX", "n_total": SAMPLE}.items()
        assert told["fraud_detected"] is verdict["fraud_detected"]


def test_a_challenge_goes_on_with_a_new_block_at_once(network: httpx.Client, receiver: Receiver) -> None:
    """The network stops and begins anew whenever a block ends; how long that takes is logged."""

    def begin(height: int) -> float:
        """Ask for the nonces of a block; return the seconds until some were delivered."""
        begun = monotonic()
        block = {**BLOCK, "block_hash": f"{height:064x}", "block_height": height, "url": receiver.url}
        assert post(network, f"{NODE}/init/generate", block)["status"] == "OK"
        assert wait_until(lambda: any(body["block_height"] == height for body in receiver.bodies), 60)
        return monotonic() - begun

    firsts = [begin(1)]
    for height in (2, 3):
        began = monotonic()
        post(network, f"{NODE}/stop")
        assert get(network, f"{NODE}/status")["status"] == "IDLE"
        log.info("stopped and drained in %.2f s", monotonic() - began)
        firsts.append(begin(height))
    log.info("first artifacts after %s s", ", ".join(f"{first:.2f}" for first in firsts))
    post(network, f"{NODE}/stop")
    items_of = {
        height: dict(items([b for b in receiver.bodies if b["block_height"] == height])) for height in (1, 2, 3)
    }
    assert all(items_of.values())
    for one, other in ((1, 2), (2, 3)):
        assert all(items_of[one][nonce] != items_of[other][nonce] for nonce in items_of[one].keys() & items_of[other])


def test_what_this_cluster_cannot_do_is_refused_with_a_sentence(network: httpx.Client) -> None:
    decode = {**BLOCK["params"], "decode": True, "max_tokens": 8}
    answer = network.post(f"{NODE}/init/generate", json={**BLOCK, "params": decode})
    assert answer.status_code == 422
    assert "the decode scheme, which none of the ready pods offers" in answer.json()["detail"]
    for key in ("two words", "k" * 300):
        answer = network.post(f"{NODE}/init/generate", json={**BLOCK, "public_key": key})
        assert answer.status_code == 422
        assert [error["field"] for error in answer.json()["errors"]] == ["public_key"]
    assert network.post("/api/v1/inference/up", json={"model": "another"}).status_code == 409
    assert post(network, "/api/v1/inference/up", {"model": SERVED_NAME}) == {"status": "OK"}
    assert httpx.get(str(network.base_url.join("/api/v1/state")), trust_env=False, timeout=30).status_code == 401
