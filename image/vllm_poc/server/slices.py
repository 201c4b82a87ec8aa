# SPDX-License-Identifier: Apache-2.0
"""PoC work in slices: short ones, one at a time, and only when the chat gate is open."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

from vllm_poc.server import metrics
from vllm_poc.server.engine import EngineError, VllmEngine
from vllm_poc.server.gate import ChatGate
from vllm_poc.server.settings import Settings
from vllm_poc.server.sizes import HalvedSize, Rehearsed, RehearsedSize, SliceSize, rehearse
from vllm_poc.wire.messages import RoundRequest
from vllm_poc.worker.batches import MOST_PREPARED, BatchRequest, BatchResult, Rehearsal

#: What one nonce gives: a distance, or a vector in base64.
Value = float | str
#: A nonce with its value.
Item = tuple[int, Value]


class SliceResult(NamedTuple):
    """Results of some nonces, in their order; ``rejected`` counts those that stayed not finite."""

    items: list[Item]
    rejected: int


class SliceRunner:
    """Runs slices on the engine for whoever asks, first come first served."""

    def __init__(self, engine: VllmEngine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._turn = asyncio.Lock()
        self._rehearsals = asyncio.Lock()
        self._rehearsed = OrderedDict[str, tuple[Rehearsed, int]]()
        self.gate = ChatGate(engine, settings)

    def slice_size(self, request: RoundRequest, limit: int) -> SliceSize:
        """Return the size for work whose forward passes hold up to ``limit`` nonces, or what was rehearsed for it."""
        budget, recipe = self._settings.slice_seconds, _recipe(request)
        if recipe not in self._rehearsed:
            return HalvedSize(limit, budget)
        return RehearsedSize(*self._rehearsed[recipe], budget)

    async def rehearse(self, request: RoundRequest) -> None:
        """Let the workers prepare forward passes for work like this, once, of the size that is best here.

        Takes seconds in pieces, between which chat runs. Does nothing where the workers cannot. EngineError as from
        the engine.
        """
        facts, recipe = await self._engine.facts(), _recipe(request)
        async with self._rehearsals:
            if not facts["fused"] or recipe in self._rehearsed:
                return
            while len(self._rehearsed) >= MOST_PREPARED:  # as the workers do, whatever comes of this rehearsal
                self._rehearsed.popitem(last=False)
            found = await rehearse(
                partial(self._rehearsal, request),
                limit=max(1, facts["max_prepared_tokens"] // request.effective_seq_len),
                seq_len=request.effective_seq_len,
                budget_seconds=self._settings.slice_seconds,
            )
            if found is not None:
                self._rehearsed[recipe] = found, facts["stages"]

    async def _rehearsal(self, request: RoundRequest, count: int, part_seconds: float) -> Rehearsal:
        async with self._turn:
            await self.gate.passed()
            started = monotonic()
            rehearsal = await self._engine.rehearse(batch_request(request, range(count), count), part_seconds)
            self.gate.busy.add(started, monotonic())
        return rehearsal

    async def run(
        self, request: RoundRequest, nonces: Sequence[int], size: SliceSize, ahead: Iterable[list[int]] = ()
    ) -> SliceResult:
        """Compute one slice; nonces that are not finite get a second try. EngineError as from the engine.

        ``ahead`` are the slices that follow, as far as they are known: the workers begin them already.
        """
        first = await self._compute(request, nonces, size, ahead)
        results = _values(first)
        if first["not_finite"]:
            results |= _values(await self._compute(request, first["not_finite"], size))
        items = [(nonce, results[nonce]) for nonce in nonces if nonce in results]
        return SliceResult(items, rejected=len(nonces) - len(items))

    async def _compute(
        self, request: RoundRequest, nonces: Sequence[int], size: SliceSize, ahead: Iterable[list[int]] = ()
    ) -> BatchResult:
        message = batch_request(request, nonces, size.batch(len(nonces)), ahead)
        longest = 0.0
        async with self._turn:  # other work would make the workers drop what they have begun
            if (recipe := _recipe(request)) in self._rehearsed:
                self._rehearsed.move_to_end(recipe)
            while True:
                result, seconds = await self._step(message)
                longest = max(longest, seconds)
                if result["complete"]:
                    break
        size.learn(len(nonces), longest)
        _check_answer(nonces, result)
        return result

    async def _step(self, message: BatchRequest) -> tuple[BatchResult, float]:
        """Return the workers' answer, and how many seconds it took."""
        await self.gate.passed()
        started = monotonic()
        result = await self._engine.compute(message)
        ended = monotonic()
        self.gate.busy.add(started, ended)
        metrics.SLICE.observe(ended - started)
        metrics.PROGRESS.set_to_current_time()
        return result, ended - started


def look_ahead(ahead: deque[list[int]], size: SliceSize, following: Callable[[int], list[int]]) -> None:
    """Add slices up to the number that may begin already; ``following`` returns the one behind so many nonces more."""
    known = sum(len(nonces) for nonces in ahead)
    while len(ahead) < size.ahead and (nonces := following(known)):
        ahead.append(nonces)
        known += len(nonces)


def batch_request(
    request: RoundRequest, nonces: Sequence[int], batch: int, ahead: Iterable[list[int]] = ()
) -> BatchRequest:
    """Return the workers' message for ``nonces`` of the round, ``batch`` in a forward pass, and those after them."""
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
        batch=batch,
        ahead=list(ahead),
    )


def _recipe(request: RoundRequest) -> str:
    """Return what forward passes that are prepared alike have in common."""
    return str({**batch_request(request, [], 0), "block_hash": "", "public_key": ""})


def _values(result: BatchResult) -> dict[int, Value]:
    values: Sequence[Value] = result["vectors"] if "vectors" in result else result.get("distances", [])
    return dict(zip(result["nonces"], values, strict=True))


def _check_answer(nonces: Sequence[int], result: BatchResult) -> None:
    answered = sorted(result["nonces"] + result["not_finite"])
    if answered != sorted(nonces):
        raise EngineError(f"the workers answered {len(answered)} nonces, not the {len(nonces)} asked for")
