# SPDX-License-Identifier: Apache-2.0
"""A captured pass reads weights and caches by their addresses: it computes the same when vLLM has slept meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import FLAGS, WHOLE
from tests.support.builders.batches import a_batch
from tests.vllm.server import serving
from tests.vllm.test_beside_chat import LONG, NONCES
from tests.vllm.test_pauses import command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.client import Client


@pytest.fixture(scope="module")
def sleepy(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server that gives its memory back while it sleeps."""
    log = tmp_path_factory.mktemp("sleepy") / "server.log"
    with serving(model_folder / "qwen3-tiny", log, [*FLAGS, "--enable-sleep-mode"]) as client:
        yield client


@pytest.mark.parametrize(
    ("begin", "ends"),
    [
        ("/sleep?level=1", ["/wake_up"]),
        ("/sleep?level=1", ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
        ("/sleep?level=2", ["/wake_up", "/collective_rpc"]),
    ],
    ids=["all", "in parts", "weights read anew"],
)
def test_poc_and_chat_are_the_same_after_sleep(sleepy: Client, begin: str, ends: list[str]) -> None:
    """After other weights, the pass is captured anew."""
    request = a_batch(list(NONCES), seq_len=64)
    sleepy.forget_prompts()  # as it is after sleep
    artifacts, answer = sleepy.artifacts(NONCES), sleepy.chat(LONG)
    assert sleepy.worker("poc_describe")["fused"]
    assert sleepy.worker("poc_warm_up", request, WHOLE)["seconds"] > 0
    computed = sleepy.computed(request)[0]
    command(sleepy, begin)
    assert "vLLM sleeps" in sleepy.status()["paused_by"]
    for end in ends:
        command(sleepy, end)
    assert sleepy.computed(request)[0] == computed
    assert sleepy.worker("poc_warm_up", request, WHOLE)["seconds"] > 0
    assert sleepy.computed(request)[0] == computed
    assert sleepy.artifacts(NONCES) == artifacts
    assert sleepy.chat(LONG) == answer
