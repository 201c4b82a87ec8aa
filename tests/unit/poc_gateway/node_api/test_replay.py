# SPDX-License-Identifier: Apache-2.0
"""What the chain's client sends in an epoch, in its order, and what it reads from the answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from poc_gateway.store import schema
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import INIT, NONCES, URL, error_of, validation

NODE = "inference/pow"
PORTS = [5001, 5002]


def backends(*status: str) -> list[dict[str, Any]]:
    return [{"port": port, "status": word} for port, word in zip(PORTS, status, strict=True)]


def told(*status: str) -> list[dict[str, Any]]:
    """What GET status says of pods that have computed nothing yet."""
    nothing = {"nonces_per_second": 0.0, "stats": {"total_processed": 0, "nonces_per_second": 0.0}}
    return [one | nothing for one in backends(*status)]


async def finished(world: World, request_id: str, base: str = "") -> dict[str, Any]:
    """Poll a job until it is over."""
    async with asyncio.timeout(20):
        while True:
            body: dict[str, Any] = (await world.http.get(f"{base}/api/v1/{NODE}/generate/{request_id}")).json()
            if body["status"] not in ("queued", "running"):
                return body
            await asyncio.sleep(0.02)


async def test_an_epoch(world: World) -> None:
    state = (await world.get("state")).json()
    assert (state["state"], state["poc_status"], state["loaded_model"]) == ("INFERENCE", "IDLE", "tiny")
    assert state["inference_healthy"] is True
    assert (await world.get(f"{NODE}/status")).json() == {"status": "IDLE", "backends": told("IDLE", "IDLE")}

    started = {"status": "OK", "backends": 2, "n_groups": 2, "results": backends("OK", "OK"), "errors": []}
    for _ in range(2):  # the client repeats what it is not sure of
        answer = await world.post(f"{NODE}/init/generate", INIT)
        assert (answer.status_code, answer.json()) == (200, started)
    assert world.cluster.specs == [
        {
            **world.ml_node.template.spec,
            "blockHash": "ab" * 32,
            "blockHeight": 4711,
            "publicKey": "AqBX",
            "nodes": {"first": 1, "last": 1, "count": 3},
            "model": {"name": "tiny", "seqLen": 64, "strongRng": True},
            "artifact": {"kDim": 12},
            "callbackURL": URL,
        }
    ]
    status = (await world.get(f"{NODE}/status")).json()
    assert status == {"status": "GENERATING", "backends": told("GENERATING", "GENERATING")}
    assert (await world.get("state")).json()["state"] == "POW"

    assert (await world.post(f"{NODE}/stop")).json() == {"status": "OK", "results": backends("OK", "OK"), "errors": []}
    assert (await world.get(f"{NODE}/status")).json()["status"] == "IDLE"

    queued = (await world.post(f"{NODE}/generate", validation())).json()
    assert (queued["status"], queued["queued_count"]) == ("queued", 200)
    assert queued["request_id"].startswith("5001:")
    body = await finished(world, queued["request_id"])
    verdict = {"n_total": 200, "n_mismatch": 0, "mismatch_nonces": [], "p_value": 1.0, "fraud_detected": False}
    assert body == {"status": "completed", "request_id": queued["request_id"], "not_computed": []} | verdict

    (callback,) = world.rows(select(schema.callbacks))
    assert (callback["url"], callback["state"]) == (f"{URL}/validated", "waiting")
    assert json.loads(callback["body"]) == {
        "request_id": queued["request_id"],
        "block_hash": "ab" * 32,
        "block_height": 4711,
        "public_key": "A+foreign/key=",
        "node_id": 2,
        "not_computed": [],
        **verdict,
    }
    computed = sorted(nonce for pod in world.pods.values() for nonce in pod.engine.computed)
    assert computed == NONCES
    assert all(pod.engine.computed for pod in world.pods.values())


@pytest.mark.parametrize(("rule", "least"), [("ignore", 31), ("apply", 28)])
async def test_the_chains_threshold_counts_only_when_told(tmp_path: Path, rule: str, least: int) -> None:
    # Of 200, so many are fraud at 0.01, by which the reference judges whatever the chain says, and at the chain's 0.05.
    async with running_world(tmp_path, pods=1, POC_GATEWAY_P_VALUE_THRESHOLD=rule) as world:
        for changed, fraud in ((least - 1, False), (least, True)):
            body = (await world.post(f"{NODE}/generate", validation(changed, wait=True))).json()
            assert (body["n_mismatch"], body["fraud_detected"]) == (changed, fraud)
        assert world.rows(select(schema.callbacks)) == []


async def test_a_stopped_round_can_be_asked_for_anew(world: World) -> None:
    for _ in range(2):
        assert (await world.post(f"{NODE}/init/generate", INIT)).status_code == 200
        assert (await world.post("stop")).status_code == 200
    first, second = world.cluster.rounds
    assert first.startswith("network-4711-")
    assert second == f"{first}-2"


async def test_another_round_is_refused_while_one_runs(world: World) -> None:
    await world.post(f"{NODE}/init/generate", INIT)
    answer = await world.post(f"{NODE}/init/generate", INIT | {"block_height": 4712})
    error = error_of(answer, 409, "RoundConflict")
    assert error.detail.startswith(f"Already generating: round {next(iter(world.cluster.rounds))} at height 4711")
    assert len(world.cluster.rounds) == 1


async def test_a_model_that_is_not_served_is_refused(world: World) -> None:
    body = {"model": "tiny", "dtype": "auto", "additional_args": ["--max-model-len", "1024"]}
    assert (await world.post("inference/up", body)).json() == {"status": "OK"}
    error = error_of(await world.post("inference/up", {"model": "huge"}), 409, "ModelMismatch")
    assert error.detail.startswith("model: this cluster serves /models/tiny, tiny;")
    params = {"model": "huge", "seq_len": 64}
    error_of(await world.post(f"{NODE}/init/generate", INIT | {"params": params}), 409, "ModelMismatch")
    assert world.cluster.rounds == {}
