# SPDX-License-Identifier: Apache-2.0
"""Chat beside PoC: same tokens, and PoC never writes into chat's KV cache."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.receiver import Receiver, receiving
from tests.vllm.client import Client

PROMPTS = (
    "What is a license?",
    "Count: one two three four five six seven.",
    "You may obtain a copy of the License at the usual place. " * 12,
)


@contextmanager
def poc_running(client: Client) -> Iterator[Receiver]:
    with receiving() as receiver:
        client.start(url=receiver.url)
        try:
            assert receiver.wait_for(1), "PoC delivers nothing"
            yield receiver
        finally:
            client.stop()


def answers(client: Client) -> list[list[int]]:
    return [ask(prompt) for prompt in PROMPTS for ask in (client.chat, client.stream_chat)]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_chat_has_the_same_tokens_before_during_and_after_poc(name: str, request: pytest.FixtureRequest) -> None:
    client: Client = request.getfixturevalue(name)
    before = answers(client)
    with poc_running(client):
        start = client.status()["next_index"]
        during = answers(client)
        made = client.status()["next_index"] - start
    after = answers(client)
    assert during == before
    assert after == before
    assert made > 0, "PoC must have run between the chats"
    assert len({tuple(ids) for ids in before}) == len(PROMPTS), "prompts must lead to different answers"


def test_poc_leaves_the_kv_cache_as_it_is(qwen3: Client) -> None:
    qwen3.chat(PROMPTS[2])
    filled = qwen3.worker("poc_test_kv_checksum")
    qwen3.artifacts(range(40), seq_len=130, batch_size=8)
    qwen3.distances(range(40), seq_len=64, batch_size=8)
    assert qwen3.worker("poc_test_kv_checksum") == filled
    qwen3.chat("A question that was not asked before.")
    assert qwen3.worker("poc_test_kv_checksum") != filled, "the checksum must see chat's writes"
