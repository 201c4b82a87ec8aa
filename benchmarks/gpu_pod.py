# SPDX-License-Identifier: Apache-2.0
"""A pod that computes as if asked for nothing else, driven without its server."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from benchmarks.gpu_shapes import flops_per_nonce
from tests.support.builders.batches import a_batch
from vllm import LLM
from vllm_poc.rpc import BatchRequest, BatchResult, PassTiming
from vllm_poc.server.autotune import TunedPass, TunedSliceSize, fastest_pass, longest_segment

#: Nonces in a forward pass of the unfused eager baseline.
NAIVE_NONCES = 32
#: Most tokens of vLLM's own forward pass.
MAX_TOKENS = 8192
#: Too short for the card to get hot.
_SHORT_SECONDS = 0.1


class Pod:
    """A served model, and what the command line asks of it."""

    def __init__(self, model: LLM, facts: dict[str, Any], options: argparse.Namespace) -> None:
        self.facts = facts
        self._model = model
        self._options = options
        self._gpus = options.tensor_parallel * options.pipeline_parallel
        self._peak, _ = call(model, "poc_bench_peak", _SHORT_SECONDS)  # before the card gets hot

    def rows(self, config: dict[str, Any], seq_len: int) -> list[dict[str, Any]]:
        """Measure one length of sequences, with passes of the pod's choice or of the sizes asked for."""
        limit = self._gpus * self._peak / flops_per_nonce(config, seq_len)
        row = {"seq_len": seq_len, "peak": self._peak, "limit": limit}
        if self._gpus == 1 and not self._options.no_naive:
            naive = a_batch(range(NAIVE_NONCES), seq_len=seq_len)
            row["naive"] = call(self._model, "poc_bench_naive", naive, self._options.seconds)
        rows = [self._row(row, seq_len, passes) for passes in self._passes(seq_len)]
        _, hot = call(self._model, "poc_bench_peak", self._options.seconds)
        return [row | {"of_hot_limit": row["of_limit"] * self._peak / hot} for row in rows]

    def _passes(self, seq_len: int) -> Iterator[TunedPass]:
        """Capture passes one by one: the workers keep what they captured last."""
        if not self._options.tokens:
            yield asyncio.run(self._chosen(seq_len))
            return
        segment_seconds = longest_segment(self._options.slice_seconds)
        self._captured(seq_len, 1, segment_seconds)  # tells what larger ones need
        for tokens in self._options.tokens:
            yield self._captured(seq_len, max(1, tokens // seq_len), segment_seconds)

    async def _chosen(self, seq_len: int) -> TunedPass:
        async def warm_up(nonces: int, segment_seconds: float) -> PassTiming:
            return self._warmed_up(seq_len, nonces, segment_seconds)

        limit = max(1, min(self.facts["max_captured_nonces"], self.facts["max_captured_tokens"] // seq_len))
        found = await fastest_pass(warm_up, limit=limit, seq_len=seq_len, budget_seconds=self._options.slice_seconds)
        if found is None:
            raise SystemExit(f"seq_len {seq_len}: not even the smallest forward pass fits into the memory")
        return found

    def _captured(self, seq_len: int, nonces: int, segment_seconds: float) -> TunedPass:
        found = self._warmed_up(seq_len, nonces, segment_seconds)
        if found["seconds"] is None:
            raise SystemExit(f"seq_len {seq_len}: {nonces} nonces do not fit into the memory")
        return TunedPass(nonces, found["seconds"], found["segments"])

    def _warmed_up(self, seq_len: int, nonces: int, segment_seconds: float) -> PassTiming:
        found: PassTiming = call(self._model, "poc_warm_up", a_batch(range(nonces), seq_len=seq_len), segment_seconds)
        print(f"{nonces} nonces of {seq_len}: {found}", flush=True)
        return found

    def _row(self, row: dict[str, Any], seq_len: int, passes: TunedPass) -> dict[str, Any]:
        rate, slices = self._in_slices(seq_len, passes)
        row = row | passes._asdict() | {"rate": rate, "of_limit": rate / row["limit"]}
        row["slice_seconds"] = {"median": slices[len(slices) // 2], "largest": slices[-1]}
        if "naive" in row:
            row["of_naive"] = rate / row["naive"]
        if self._options.profile:
            message = a_batch(range(passes.nonces), seq_len=seq_len)
            row["profile"] = call(self._model, "poc_bench_profile", message, passes.segments * self.facts["stages"])
        if self.facts["stages"] > 1:
            row["of_serial"] = rate / self._serially(seq_len, passes.nonces)
        return row

    def _in_slices(self, seq_len: int, passes: TunedPass) -> tuple[float, list[float]]:
        """Return the nonces per second in slices one after the other, and the slices' times in order."""
        size = TunedSliceSize(passes, self.facts["stages"], self._options.slice_seconds)
        done, started, times = 0, 0.0, list[float]()
        for first in count(0, size.nonces):
            starts = range(first, first + size.nonces * (1 + size.ahead), size.nonces)
            nonces, *ahead = (range(start, start + size.nonces) for start in starts)
            times += [
                seconds
                for seconds, _ in in_calls(
                    self._model, a_batch(nonces, seq_len=seq_len, batch=passes.nonces, ahead=ahead)
                )
            ]
            if started == 0.0:  # the first one has nobody before it who began it
                started = time.perf_counter()
                times.clear()
                continue
            done += len(nonces)
            if time.perf_counter() - started > self._options.seconds:
                break
        return done / (time.perf_counter() - started), sorted(times)

    def _serially(self, seq_len: int, nonces: int) -> float:
        """Return the nonces per second of passes each of which waits for the end of the one before."""
        done, started = 0, time.perf_counter()
        while time.perf_counter() - started < self._options.seconds:
            for _ in in_calls(self._model, a_batch(range(done, done + nonces), seq_len=seq_len)):
                pass
            done += nonces
        return done / (time.perf_counter() - started)


def in_calls(model: LLM, message: BatchRequest) -> Iterator[tuple[float, BatchResult]]:
    """Compute what the message asks for; yield the seconds and the answer of each call that this takes."""
    complete = False
    while not complete:
        asked = time.perf_counter()
        found: BatchResult = call(model, "poc_compute", message)
        yield time.perf_counter() - asked, found
        complete = found["complete"]


def described(model: LLM) -> dict[str, Any]:
    """Let the workers look at the model, as a server does: again while kernels took all of the time to compile."""
    while (facts := call(model, "poc_describe")).get("late"):
        pass
    return dict(facts)


def call(model: LLM, method: str, *args: object) -> Any:  # noqa: ANN401 - each method has its own answer
    """Call the workers; the first answer that is one. SystemExit if it is an error."""
    answers = [answer for answer in model.collective_rpc(method, args=args) if answer is not None]
    for answer in answers:
        if isinstance(answer, dict) and "error" in answer:
            raise SystemExit(f"{method}: {answer['error']}")
    return answers[0] if answers else None
