# SPDX-License-Identifier: Apache-2.0
"""Chat's benchmark compares answers while PoC computes, and measures nothing beside a round that does not."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import chat
from benchmarks.chat import ANSWER_PAUSE_SECONDS, Bench
from benchmarks.chat_figures import Answers
from tests.vllm.client import Client


class Server:
    """Answers at once, and its round computes while nobody asks anything."""

    def __init__(self, nonces_per_second: float) -> None:
        self.now = 0.0
        self.asked: list[tuple[str, float]] = []  # and how long nobody had asked before
        self._rate = nonces_per_second
        self._quiet_since = 0.0
        self._computes = False

    def chat(self, prompt: str, *, tokens: int) -> list[int]:
        quiet, self._quiet_since = self.now - self._quiet_since, self.now
        self.asked.append((prompt, quiet))
        return [tokens, int(self._computes and quiet > 0)]

    def start(self, **_: object) -> None:
        self._computes = True

    def stop(self) -> None:
        self._computes = False

    def status(self) -> dict[str, Any]:
        return {"state": "GENERATING", "total_checked": int(self.now * self._rate), "held_back_seconds": 0.0}

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def a_bench(server: Server, monkeypatch: pytest.MonkeyPatch) -> Bench:
    clock = SimpleNamespace(sleep=server.sleep, monotonic=lambda: server.now)
    monkeypatch.setattr(chat, "time", clock)
    options = Namespace(answers=3, batch=32, seq_len=64, decode=None)
    return Bench(cast("Client", server), "http://receiver", options, 0.0)


def test_poc_computes_before_each_answer_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(nonces_per_second=1000)
    found = a_bench(server, monkeypatch)._compare_answers()
    assert found == Answers(compared=3, changed=3), "answers that PoC changes are seen"
    questions = [question for question, _ in server.asked]
    assert questions == questions[:3] * 3, "unmeasured, on the idle server, and beside the round"
    assert min(quiet for _, quiet in server.asked[3:]) == pytest.approx(ANSWER_PAUSE_SECONDS)


def test_a_round_that_computes_nothing_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(nonces_per_second=0.1)
    with pytest.raises(SystemExit, match="the round computed 12 nonces in 120 s"):
        a_bench(server, monkeypatch)._compare_answers()
