# SPDX-License-Identifier: Apache-2.0
"""Chat's blocks may move to the CPU's memory and back while PoC computes: neither sees anything of the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import FLAGS
from tests.support.builders.batches import a_batch
from tests.vllm.server import serving
from tests.vllm.test_beside_chat import LENGTHS, LONG, NONCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.vllm.client import Client

#: Tokens of prompts that a connector had, and the engine's own cache had not.
FOUND = "vllm:external_prefix_cache_hits_total"
FOUND_SECONDS = 15
TOKENS = 200


@pytest.fixture(scope="module", params=["0", "1"], ids=["OffloadingConnector", "SimpleCPUOffloadConnector"])
def offloading(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A server whose chats' blocks are kept in the CPU's memory, in each of vLLM's own two ways."""
    log, flags = tmp_path_factory.mktemp("offloading") / "server.log", [*FLAGS, "--kv-offloading-size", "1"]
    environment = {"VLLM_USE_SIMPLE_KV_OFFLOAD": str(request.param)}
    with serving(model_folder / "qwen3-tiny", log, flags, environment) as client:
        yield client


def found_again(client: Client, chat: Callable[[], list[int]]) -> list[int]:
    """Return what a chat says whose prompt is found in the CPU's memory alone."""
    before = client.metric(FOUND)
    client.forget_prompts()
    answer = chat()
    end = monotonic() + FOUND_SECONDS
    while client.metric(FOUND) <= before:
        assert monotonic() < end, "the prompt must be found in the CPU's memory"
        sleep(0.1)
    return answer


def test_results_are_those_of_a_server_without(small_client: Client, offloading: Client) -> None:
    assert offloading.worker("poc_describe")["refusal"] is None
    for seq_len in LENGTHS:
        assert offloading.artifacts(NONCES, seq_len=seq_len) == small_client.artifacts(NONCES, seq_len=seq_len)
    assert offloading.distances(NONCES) == small_client.distances(NONCES)


def test_chats_blocks_come_back_as_they_went(offloading: Client) -> None:
    request = a_batch(list(NONCES), seq_len=64)
    offloading.chat(LONG, tokens=TOKENS)  # its last blocks go with the next step of the engine
    offloading.chat("x", tokens=4)
    expected = found_again(offloading, lambda: offloading.chat(LONG, tokens=TOKENS))
    computed = offloading.computed(request)[0]
    with ThreadPoolExecutor(1) as beside:
        chat = beside.submit(found_again, offloading, lambda: offloading.chat(LONG, tokens=TOKENS))
        found = []
        while not chat.done():
            found.append(offloading.computed(request)[0])
    assert len(found) > 2, "PoC must have run between the tokens of that chat"
    assert all(one == computed for one in found)
    assert chat.result() == expected
    # And once more, with what went to the CPU's memory while PoC computed.
    assert found_again(offloading, lambda: offloading.chat(LONG, tokens=TOKENS)) == expected
