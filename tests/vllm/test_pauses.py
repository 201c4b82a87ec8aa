# SPDX-License-Identifier: Apache-2.0
"""While vLLM is paused a round stands still, and it computes the same afterwards."""

import time
import urllib.request

from tests.support.fakes.receiver import Receiver
from tests.vllm.client import Client

SECONDS = 1.0


def test_a_round_stands_still_while_vllm_is_paused(qwen3: Client, receiver: Receiver) -> None:
    alone = qwen3.artifacts([1, 2])
    qwen3.start(url=receiver.url)
    assert receiver.wait_for(1)
    command(qwen3, "/pause")
    before = qwen3.status()
    time.sleep(SECONDS)
    after = qwen3.status()
    command(qwen3, "/resume")
    assert receiver.wait_for(len(receiver.bodies) + 2), "the round goes on"
    qwen3.stop()
    assert before["next_index"] == after["next_index"] > 0
    assert (before["paused_by"], qwen3.status()["paused_by"]) == ("vLLM is paused", None)
    assert qwen3.artifacts([1, 2]) == alone


def test_what_was_made_of_the_weights_is_made_anew(qwen3: Client) -> None:
    alone = qwen3.artifacts([1, 2])
    assert qwen3.worker("poc_forget") == {"forgotten": True}
    assert qwen3.artifacts([1, 2]) == alone


def command(client: Client, path: str) -> None:
    """Give one of vLLM's own commands."""
    request = urllib.request.Request(client.base + path, b"", method="POST")  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        assert answer.status == 200
