# SPDX-License-Identifier: Apache-2.0
"""Chat's blocks may move to the CPU's memory and back while PoC computes: neither sees anything of the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import FLAGS, WHOLE
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
TOKENS, SHORT = 200, "x"


@pytest.fixture(scope="module", params=["0", "1"], ids=["OffloadingConnector", "SimpleCPUOffloadConnector"])
def offloading(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A server whose chats' blocks are kept in the CPU's memory, in each of vLLM's own two ways."""
    log, flags = tmp_path_factory.mktemp("offloading") / "server.log", [*FLAGS, "--kv-offloading-size", "1"]
    environment = {"VLLM_USE_SIMPLE_KV_OFFLOAD": str(request.param)}
    with serving(model_folder / "qwen3-tiny", log, flags, environment) as client:
        yield client


def kept(client: Client, beside: Callable[[], None]) -> tuple[list[int], list[int]]:
    """Return what a chat says, and says again when its prompt is found in the CPU's memory alone.

    The first has its blocks go there, the second has them come back, each with something ``beside`` it.
    """
    client.forget_prompts(everywhere=True)
    answers = list[list[int]]()
    for _ in range(2):
        before = client.metric(FOUND)
        with ThreadPoolExecutor(1) as pool:
            chat = pool.submit(client.chat, LONG, tokens=TOKENS)
            while not chat.done():
                beside()
        answers.append(chat.result())
        client.chat(SHORT, tokens=4)  # the last blocks go with the engine's next step
        client.forget_prompts()
    end = monotonic() + FOUND_SECONDS
    while client.metric(FOUND) <= before:
        assert monotonic() < end, "the prompt must be found in the CPU's memory"
        sleep(0.1)
    return answers[0], answers[1]


def test_results_are_those_of_a_server_without(small_client: Client, offloading: Client) -> None:
    assert offloading.worker("poc_describe")["refusal"] is None
    for seq_len in LENGTHS:
        assert offloading.artifacts(NONCES, seq_len=seq_len) == small_client.artifacts(NONCES, seq_len=seq_len)
    assert offloading.distances(NONCES) == small_client.distances(NONCES)


def test_blocks_go_and_come_back_beside_poc(offloading: Client) -> None:
    request, found = a_batch(list(NONCES), seq_len=64), list[object]()
    assert offloading.worker("poc_warm_up", request, WHOLE)["seconds"] > 0
    computed = offloading.computed(request)[0]
    beside = kept(offloading, lambda: found.append(offloading.computed(request)[0]))
    assert len(found) > 4, "PoC must have run between the tokens of both chats"
    assert all(one == computed for one in found)
    assert beside == kept(offloading, lambda: sleep(0.01))
