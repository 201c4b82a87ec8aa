# SPDX-License-Identifier: Apache-2.0
"""While vLLM sleeps or is paused a round stands still, and it computes the same afterwards."""

import json
import time
import urllib.request

import pytest

from tests.support.fakes.receiver import Receiver
from tests.vllm.client import Client
from vllm_poc.server.vllm_routes import DISCARDED, SLEEP

SECONDS = 1.0


@pytest.mark.parametrize(
    ("begin", "ends", "reason"),
    [
        ("/pause", ["/resume"], "vLLM is paused"),
        # vLLM for CPU refuses --enable-sleep-mode, and its workers have no memory to give back. All the rest of its
        # sleep is as on a GPU: the routes, the engine's scheduler, and what the engine says of itself.
        ("/sleep", ["/wake_up"], "vLLM sleeps"),
        ("/sleep?level=2&mode=wait", ["/wake_up", "/collective_rpc"], f"{DISCARDED}; {SLEEP}"),
    ],
)
def test_a_round_stands_still_while_vllm_does(
    qwen3: Client, receiver: Receiver, begin: str, ends: list[str], reason: str
) -> None:
    alone = qwen3.artifacts([1, 2])
    qwen3.start(url=receiver.url)
    assert receiver.wait_for(1)
    command(qwen3, begin)
    before, computed = qwen3.status(), computed_by(qwen3)
    time.sleep(SECONDS)
    after = qwen3.status()
    assert computed_by(qwen3) == computed, "not even a slice that nobody counts"
    for end in ends:
        assert computed_by(qwen3) == computed
        command(qwen3, end)
    assert receiver.wait_for(len(receiver.bodies) + 2), "the round goes on"
    delivered = qwen3.stop()["pow_status"]["delivered_index"]
    assert before["next_index"] == after["next_index"] > 0
    assert [seen["activity"] for seen in (before, after)] == ["Paused"] * 2
    assert [seen["paused_by"] for seen in (before, after, qwen3.status())] == [reason, reason, None]
    nonces = [artifact["nonce"] for body in receiver.bodies for artifact in body["artifacts"]]
    assert nonces == list(range(len(nonces))), "none is lost or doubled"
    assert len(nonces) == delivered > after["next_index"]
    assert qwen3.artifacts([1, 2]) == alone


def test_what_was_made_of_the_weights_is_made_anew(qwen3: Client) -> None:
    alone = qwen3.artifacts([1, 2])
    assert qwen3.worker("poc_forget") == {"forgotten": True}
    assert qwen3.artifacts([1, 2]) == alone


def command(client: Client, path: str) -> None:
    """Give one of vLLM's own commands."""
    body = json.dumps({"method": "reload_weights"}).encode() if path == "/collective_rpc" else b""
    request = urllib.request.Request(client.base + path, body, method="POST")  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        assert answer.status == 200


def computed_by(client: Client) -> int:
    """Return how often the worker was asked to compute, for whatever purpose."""
    calls: int = client.worker("poc_test_computed")
    return calls
