# SPDX-License-Identifier: Apache-2.0
"""A model of real size in bfloat16, compiled and with CUDA graphs, while chat runs."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.client import K_DIM
from tests.vllm.server import MODEL_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.client import Client

torch = pytest.importorskip("torch", reason="needs the worker environment")

_log = logging.getLogger(__name__)

NONCES = range(200)
#: L2 distance of two artifacts, which have length 1: what the network's validators accept, and what is typical.
MEAN_DISTANCE, LARGEST_DISTANCE = 0.02, 0.1
BATCH, TOKENS = 8, 8192


@contextmanager
def chatting(client: Client) -> Iterator[list[list[int]]]:
    """Chat one request after the other, with pauses, while the context lasts."""
    answers: list[list[int]] = []
    over = threading.Event()

    def chat() -> None:
        while not over.wait(0.05):
            answers.append(client.chat("Tell me about licenses.", tokens=16))

    thread = threading.Thread(target=chat)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()


def plain_artifacts(model: Path, seq_len: int, dtype: Any) -> Any:  # noqa: ANN401 - torch need not be there
    """Return the artifacts by a plain forward pass, 20 nonces at a time."""
    from tests.vllm.reference import Reference  # noqa: PLC0415 - needs transformers

    plain = Reference(model, device="cuda", dtype=dtype)
    parts = [list(NONCES[start : start + 20]) for start in range(0, len(NONCES), 20)]
    return torch.cat([plain.artifacts(plain.inputs(part, seq_len), part).float().cpu() for part in parts])


# A cache of 8 bits is further from the exact result than rounding to 16 bits allows.
@pytest.mark.parametrize("real_client", ["one", "tp", "pp"], indirect=True)
@pytest.mark.parametrize("seq_len", [64, 256])
def test_artifacts_equal_the_plain_torch_path(real_client: Client, real_size: Path, seq_len: int) -> None:
    with chatting(real_client) as answers:
        found = torch.tensor(real_client.artifacts(NONCES, seq_len=seq_len, batch_size=32))
    assert len(answers) > 1
    assert all(answer == answers[0] for answer in answers), "chat must have the same tokens beside PoC"
    exact, rounded = (plain_artifacts(real_size, seq_len, dtype) for dtype in (torch.float32, torch.bfloat16))
    by_pair = {"exact": found - exact, "plain bfloat16": found - rounded, "those two": exact - rounded}
    distances = {pair: torch.linalg.vector_norm(difference, dim=1) for pair, difference in by_pair.items()}
    for pair, values in distances.items():
        _log.info("seq_len %d, %s: mean %.4f, largest %.4f", seq_len, pair, values.mean(), values.max())
    # No bfloat16 pass comes closer to the exact result than rounding allows.
    assert distances["exact"].mean() <= max(MEAN_DISTANCE, 1.05 * distances["those two"].mean())
    assert max(values.max() for values in distances.values()) <= LARGEST_DISTANCE


def test_memory_stays_flat_with_a_model_of_real_size(real_client: Client) -> None:
    hold_memory_flat(real_client, 500)


def test_memory_stays_flat_over_ten_thousand_batches(small_client: Client) -> None:
    hold_memory_flat(small_client, 10_000)


def hold_memory_flat(client: Client, batches: int) -> None:
    """What PoC adds is what a prepared batch needs: the first round of a shape takes it, later ones no more."""
    idle = memory(client)
    generate(client, 20 * BATCH)
    before = memory(client)
    generate(client, batches * BATCH)
    after = memory(client)
    _log.info("scratch %s", [facts["scratch_bytes"] for facts in client.workers("poc_describe")])
    _log.info("idle %s, after the first batches %s, at the end %s", idle, before, after)
    assert [taken(rank) for rank in after] == [taken(rank) for rank in before]


def memory(client: Client) -> list[dict[str, int]]:
    """Return what each rank says of its memory."""
    return client.workers("poc_test_memory")


def taken(rank: dict[str, int]) -> tuple[int, int]:
    """Return what a rank has taken from its device, by PyTorch and in all.

    What is allocated inside of that depends on which passes were in flight when the round was stopped.
    """
    return rank["reserved"], rank["free"]


def generate(client: Client, nonces: int) -> None:
    """Run a round until it has computed so many nonces, in passes of as many tokens as the pod prepares."""
    client.start(batch_size=BATCH, params={"model": MODEL_NAME, "seq_len": TOKENS // BATCH, "k_dim": K_DIM})
    while client.status()["total_checked"] < nonces:
        assert client.status()["state"] == "GENERATING"
        time.sleep(0.2)
    client.stop()
