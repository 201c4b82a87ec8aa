# SPDX-License-Identifier: Apache-2.0
"""Both protocols over HTTP, with a receiver of callbacks."""

import pytest

from tests.support.fakes.receiver import Receiver
from tests.vllm.client import ROUND, Client, decode
from tests.vllm.device import BATCH_TOLERANCE, DISTANCE_TOLERANCE

SLOT = {"node_id": 1, "node_count": 3, "group_id": 1, "n_groups": 2}


def slot_nonces(count: int) -> list[int]:
    return [1 + 3 + index * 6 for index in range(count)]


def test_an_artifact_round_delivers_its_slot_in_order(qwen3: Client, receiver: Receiver) -> None:
    qwen3.start(**SLOT, url=receiver.url)
    assert receiver.wait_for(2)
    stopped = qwen3.stop()["pow_status"]
    artifacts = [artifact for body in receiver.bodies for artifact in body["artifacts"]]
    nonces = [artifact["nonce"] for artifact in artifacts]
    assert nonces == slot_nonces(len(nonces))
    assert stopped["status"] == "STOPPED"
    assert stopped["delivered_index"] == stopped["next_index"] == len(nonces)
    assert {body["block_hash"] for body in receiver.bodies} == {ROUND["block_hash"]}
    found = [decode(artifact["vector_b64"]) for artifact in artifacts[:8]]
    again = qwen3.artifacts(nonces[:8], batch_size=8)
    assert [x for row in found for x in row] == pytest.approx([x for row in again for x in row], abs=BATCH_TOLERANCE)


def test_a_distance_round_delivers_the_valid_nonces(qwen3: Client, receiver: Receiver) -> None:
    qwen3.start(**SLOT, params=None, r_target=1.41, seq_len=64, callback_url=receiver.url)
    assert receiver.wait_for(2)
    status = qwen3.status()
    assert status["state"] == "GENERATING"
    assert status["total_checked"] >= status["total_valid"] > 0
    qwen3.stop()
    found = {
        nonce: distance
        for body in receiver.bodies
        for nonce, distance in zip(body["nonces"], body["dist"], strict=True)
    }
    assert all((nonce - 4) % 6 == 0 and distance < 1.41 for nonce, distance in found.items())
    sample = list(found)[:8]
    again = qwen3.distances(sample, seq_len=64)
    assert [found[nonce] for nonce in sample] == pytest.approx(again, abs=DISTANCE_TOLERANCE)


def test_status_tells_the_round(qwen3: Client, receiver: Receiver) -> None:
    qwen3.start(**SLOT, url=receiver.url, round_id="round-1")
    status = qwen3.status()
    qwen3.stop()
    assert status["status"] == "GENERATING"
    assert status["round_id"] == "round-1"
    assert {name: status["config"][name] for name in SLOT} == SLOT
    assert status["model"]["hidden_size"] == 128
