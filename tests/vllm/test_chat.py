# SPDX-License-Identifier: Apache-2.0
"""Chat beside PoC: same tokens, and PoC never writes into chat's KV cache."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.fakes.receiver import Receiver, receiving
from tests.vllm.client import Client
from tests.vllm.families import CHECKSUMS, FAMILIES, Family

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


def test_chat_has_the_same_tokens_before_during_and_after_poc(family: Family) -> None:
    client = family.client
    answers(client)  # fills the prefix cache: what is found there is rounded as it was computed then
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


@pytest.mark.parametrize("family", [name for name in FAMILIES if CHECKSUMS[0] in FAMILIES[name]], indirect=True)
def test_poc_leaves_the_kv_cache_as_it_is(family: Family) -> None:
    client = family.client
    client.chat(PROMPTS[2])
    filled = client.worker("poc_test_kv_checksum")
    client.artifacts(range(40), seq_len=130, batch_size=8)
    client.artifacts(range(40), seq_len=1)
    client.distances(range(40), seq_len=64, batch_size=8)
    assert client.worker("poc_test_kv_checksum") == filled
    client.chat("A question that was not asked before.")
    assert client.worker("poc_test_kv_checksum") != filled, "the checksum must see chat's writes"


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_batches_of_the_look_go_beyond_the_models_window(family: Family) -> None:
    """It is of 32 tokens in the layers of this model but one."""
    (left_alone,) = [one for one in family.client.worker("poc_describe")["findings"] if "chat's KV cache" in one]
    assert f"x {2 * 32 + 1}" in left_alone


def test_poc_calls_the_builders_of_chats_metadata_in_chats_own_thread(qwen3: Client) -> None:
    """They are not made for two threads, and what orders them is that a worker does one thing after the other."""
    qwen3.worker("poc_test_watch_builders")
    chats_then_pocs = []
    for ask in (lambda: qwen3.chat(PROMPTS[0]), lambda: qwen3.artifacts(range(4))):
        qwen3.worker("poc_test_builder_threads")
        ask()
        chats_then_pocs.append(set(qwen3.worker("poc_test_builder_threads")))
    chats, pocs = chats_then_pocs
    assert len(chats) == 1
    assert pocs == chats


def test_poc_calls_the_builders_of_chats_metadata_when_chat_has_read_what_they_write(qwen3: Client) -> None:
    """They write into memory that a step of chat may still read from."""
    if not qwen3.worker("poc_test_watch_input_preparation"):
        pytest.skip("this release of vLLM prepares one step after the other")
    qwen3.worker("poc_test_watch_builders")
    qwen3.worker("poc_forget")  # PoC keeps the method that it found
    qwen3.artifacts(range(4))
    found = qwen3.worker("poc_test_builders_in_order")
    assert found
    assert all(found)
