# SPDX-License-Identifier: Apache-2.0
"""What a GPU has room for, as far as smaller batches tell; its answers are made up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

from tests.support.builders.batches import a_batch  # noqa: E402
from vllm_poc.rpc import PassSpec  # noqa: E402
from vllm_poc.worker.memory import Memory  # noqa: E402
from vllm_poc.worker.results import drawn_bytes  # noqa: E402

GIB = 2**30
#: What batches take whatever their size, and for each token.
FIXED, PER_TOKEN = GIB, 2**17


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Of a GPU with 4 GiB free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    return Memory(torch.device("cuda"))


def learn(memory: Memory, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 100 * GIB + FIXED + PER_TOKEN * tokens
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak)
    with memory.learning(tokens):
        pass


def test_before_the_first_batch_all_fit(memory: Memory) -> None:
    assert memory.fits(10**9)


def test_one_batch_tells_in_proportion(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(memory, 8192, monkeypatch)  # 2 GiB
    assert memory.fits(8192)
    assert not memory.fits(16_384)


def test_what_is_known_not_to_grow_is_not_taken_for_more(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(memory, 512, monkeypatch)  # 1.06 GiB, of which 1 is the same for any batch
    assert not memory.fits(2048)
    memory.fixed = FIXED
    assert memory.fits(13_000)
    assert not memory.fits(14_500)


def test_two_batches_tell_what_does_not_grow(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in (64, 1024, 512):
        learn(memory, tokens, monkeypatch)
    assert memory.fits(13_000)  # 2.6 GiB, with what is left free 3.9
    assert not memory.fits(14_500)


def test_what_is_drawn_comes_on_top(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.fits(8192, drawn=3 * GIB)
    assert not memory.fits(8192, drawn=4 * GIB)
    learn(memory, 8192, monkeypatch)  # 2 GiB
    assert memory.fits(8192, drawn=GIB // 2)
    assert not memory.fits(8192, drawn=GIB)


@pytest.mark.usefixtures("memory")
def test_chats_peak_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    beside_chat = Memory(torch.device("cuda"), chat_peak=2 * GIB)
    learn(beside_chat, 8192, monkeypatch)  # 2 GiB
    assert not beside_chat.fits(8192)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 102 * GIB)  # PyTorch keeps it for chat
    assert beside_chat.fits(8192)


@pytest.mark.parametrize(("protocol", "expected"), [("artifact", 4 * 5 * 12**2), ("distance", 4 * 5 * 9 * 64)])
def test_what_seeds_draw_grows_with_the_nonces(protocol: str, expected: int) -> None:
    spec = PassSpec.of(a_batch(range(5), seq_len=1, protocol=protocol))
    assert drawn_bytes(spec, 5, hidden=64) == expected


def test_a_cpu_fits_all() -> None:
    memory = Memory(torch.device("cpu"))
    with memory.learning(1):
        pass
    assert memory.fits(10**12)
