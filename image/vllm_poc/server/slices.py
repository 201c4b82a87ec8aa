# SPDX-License-Identifier: Apache-2.0
"""PoC work in slices: short ones, one at a time, and only when the chat gate is open."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from vllm_poc.server import metrics
from vllm_poc.server.engine import EngineError, VllmEngine
from vllm_poc.server.gate import ChatGate
from vllm_poc.server.settings import Settings
from vllm_poc.wire.requests import RoundRequest
from vllm_poc.worker.batches import BatchRequest, BatchResult

#: What one nonce gives: a distance, or a vector in base64.
Value = float | str
#: A nonce with its value.
Item = tuple[int, Value]


class SliceResult(NamedTuple):
    """Results of some nonces, in their order; ``rejected`` counts those that stayed not finite."""

    items: list[Item]
    rejected: int


class SliceSize:
    """How many nonces a slice holds: the limit, halved as often as the time budget demands.

    Halving keeps the number of shapes small, for each of which the worker may have to prepare.
    """

    def __init__(self, limit: int, budget_seconds: float) -> None:
        self._limit = limit
        self._budget = budget_seconds
        self._halvings = 0
        self._slow_in_a_row = 0

    @property
    def nonces(self) -> int:
        """Size of the next slice, at least 1."""
        return max(1, self._limit >> self._halvings)

    def learn(self, seconds: float) -> None:
        """Adapt to a slice that took ``seconds``. One slow slice may be the first of its shape."""
        self._slow_in_a_row = self._slow_in_a_row + 1 if seconds > self._budget else 0
        if self._slow_in_a_row > 1 and self.nonces > 1:
            self._halvings += 1
            self._slow_in_a_row = 0
        elif 2 * seconds <= self._budget and self._halvings:
            self._halvings -= 1


class SliceRunner:
    """Runs slices on the engine for whoever asks, first come first served."""

    def __init__(self, engine: VllmEngine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._turn = asyncio.Lock()
        self.gate = ChatGate(engine, settings)

    def slice_size(self, limit: int) -> SliceSize:
        """Return the size of a piece of work whose forward passes may hold ``limit`` nonces."""
        return SliceSize(limit, self._settings.slice_seconds)

    async def run(self, request: RoundRequest, nonces: Sequence[int], size: SliceSize) -> SliceResult:
        """Compute one slice; nonces that are not finite get a second try. EngineError as from the engine."""
        first = await self._compute(request, nonces, size)
        results = _values(first)
        if first["not_finite"]:
            results |= _values(await self._compute(request, first["not_finite"], size))
        items = [(nonce, results[nonce]) for nonce in nonces if nonce in results]
        return SliceResult(items, rejected=len(nonces) - len(items))

    async def _compute(self, request: RoundRequest, nonces: Sequence[int], size: SliceSize) -> BatchResult:
        async with self._turn:
            await self.gate.passed()
            started = monotonic()
            result = await self._engine.compute(batch_request(request, nonces))
            ended = monotonic()
        self.gate.busy.add(started, ended)
        size.learn(ended - started)
        metrics.SLICE.observe(ended - started)
        metrics.PROGRESS.set_to_current_time()
        _check_answer(nonces, result)
        return result


def batch_request(request: RoundRequest, nonces: Sequence[int]) -> BatchRequest:
    """Return the workers' message for ``nonces`` of the round."""
    return BatchRequest(
        protocol=request.protocol.value,
        block_hash=request.block_hash,
        public_key=request.public_key,
        nonces=list(nonces),
        seq_len=request.effective_seq_len,
        k_dim=request.params.k_dim if request.params is not None else 0,
        strong_rng=request.poc_stronger_rng,
        layer_hooks=request.layer_hooks,
        sign_flips=request.sign_flips,
    )


def _values(result: BatchResult) -> dict[int, Value]:
    values: Sequence[Value] = result["vectors"] if "vectors" in result else result.get("distances", [])
    return dict(zip(result["nonces"], values, strict=True))


def _check_answer(nonces: Sequence[int], result: BatchResult) -> None:
    answered = sorted(result["nonces"] + result["not_finite"])
    if answered != sorted(nonces):
        raise EngineError(f"the workers answered {len(answered)} nonces, not the {len(nonces)} asked for")
