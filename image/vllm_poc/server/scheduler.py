# SPDX-License-Identifier: Apache-2.0
"""PoC work in slices: short ones, one at a time, and only when the chat gate is open.

    waiting for its turn -> waiting for chat -> on the workers -> answered
                            ^                                |
                            +---- the next segment ----------+

A slice is one call to the workers, so that chat waits no longer than a slice takes. Work of different clients takes
turns slice by slice. A forward pass that is longer than a slice is cut into segments, between which chat runs and other
PoC work does not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import NamedTuple, Protocol, TypeVar

from vllm_poc.rpc import BatchRequest, BatchResult, ModelFacts, PassFields, PassSpec, PassTiming, batch_request
from vllm_poc.server import metrics
from vllm_poc.server.autotune import Autotuner, GaveWayError, HalvingSliceSize, SliceSize, TunedSliceSize, first_nonces
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.description import ModelDescription
from vllm_poc.server.engine import EngineError, NoMemoryError, VllmEngine, WeightsChangedError, noticed
from vllm_poc.server.gate import Busy, ChatGate, MemoryShortage, Turn
from vllm_poc.server.vllm_routes import Pauses
from vllm_poc.settings import Settings
from vllm_poc.wire.messages import RoundRequest
from vllm_poc.wire.stat_test import ChainComparison


class ComputedChain(NamedTuple):
    """A chain, one byte for each step, and how it compares with the claim that its steps were repeated from, if any."""

    leaf: bytes
    compared: ChainComparison | None


#: What one nonce gives: a distance, a vector in base64, or a chain.
Value = float | str | ComputedChain
#: A nonce with its value.
Item = tuple[int, Value]
T = TypeVar("T")


def keeps_on() -> bool:
    """Return False: the work gives way to nobody."""
    return False


class SliceResult(NamedTuple):
    """Results of some nonces, in their order; ``rejected`` counts those that stayed not finite."""

    items: list[Item]
    rejected: int


class Computer(Protocol):
    """Computes the work of some protocols, slice by slice."""

    async def autotune(
        self, request: RoundRequest, nonces: int | None = None, gives_way: Callable[[], bool] = keeps_on
    ) -> None:
        """Ready the workers for work like this, if that is worth it for so many nonces; a round always is.

        A search that ``gives_way`` to others is abandoned.
        """
        ...

    async def first_size(self, request: RoundRequest, limit: int) -> SliceSize | None:
        """Return the size of the slice of a round that is computed before `autotune`, which takes seconds.

        None where there is nothing to find. EngineError as from the engine.
        """
        ...

    def slice_size(self, request: RoundRequest, limit: int) -> SliceSize:
        """Return the size of slices for work of which ``limit`` nonces may be computed together."""
        ...

    def is_current(self, request: RoundRequest, size: SliceSize) -> bool:
        """Whether the workers have still what this size of slices was found for."""
        ...

    async def run(
        self,
        request: RoundRequest,
        nonces: Sequence[int],
        size: SliceSize,
        ahead: Iterable[list[int]] = (),
        *,
        busy: Busy | None = None,
        gives_way: Callable[[], bool] = keeps_on,
    ) -> SliceResult:
        """Compute one slice; vectors and distances that are not finite get a second try.

        Errors as of `Scheduler.run`, and GaveWayError if ``gives_way`` in the middle of a slice of many calls.
        """
        ...


class Scheduler:
    """Runs slices on the engine for whoever asks, first come first served."""

    def __init__(
        self, engine: VllmEngine, settings: Settings, pauses: Pauses | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.model = ModelDescription(self._turn_to_look, self._described, self._begin_anew, clock)
        #: Counts how often the weights have become others.
        self.weights = 0
        #: Held by whoever computes, from the first slice of a piece of work to the answer to its last.
        self.turn = Turn()
        self._engine = engine
        self._settings = settings
        self._autotuner = Autotuner(self._warm_up, settings.slice_seconds)
        self._stages = 1  # as the engine says before anything is tuned
        self._forgotten = 0  # the weights before which the workers have forgotten everything
        self.gate = ChatGate(engine, settings, pauses, clock)
        self.shortage = MemoryShortage(clock)

    async def forget(self) -> None:
        """Find out anew what was found of other weights, once the workers may compute, and not when somebody asks.

        EngineError as from the engine; then the workers are told once more before they compute anything.
        """
        self.weights += 1
        self.model.forget()
        self.shortage.end()
        self._autotuner.forget()
        try:
            await self._let_workers_forget()
        finally:
            self.model.look()

    async def autotune(
        self, request: RoundRequest, nonces: int | None = None, gives_way: Callable[[], bool] = keeps_on
    ) -> None:
        """Find the best forward pass for work like this, if that was not done. EngineError as from the engine.

        For so many ``nonces`` only if that is worth it; a round always is. If others go before it meanwhile, it is
        abandoned, and the work computed as if it were not worth it.
        """
        is_worth = nonces is None
        while True:
            facts = await self.model.facts()
            self._stages = facts["stages"]
            is_worth = is_worth or (nonces is not None and self._autotuner.is_worth(request, nonces, facts))
            if not is_worth:
                return
            with suppress(WeightsChangedError):
                with suppress(GaveWayError):
                    await self._autotuner.tune(request, facts, gives_way)
                return

    async def first_size(self, request: RoundRequest, limit: int) -> SliceSize | None:
        """Return that of a small pass that is not captured, if the best one is to be found.

        None also where another kind makes way first, which may hold the memory. EngineError as from the engine.
        """
        facts, spec = await self.model.facts(), PassSpec.of_round(request)
        if not facts["fused"] or self._autotuner.is_full or self._autotuner.find(spec) is not None:
            return None
        return self.slice_size(request, min(limit, first_nonces(spec.seq_len)))

    def slice_size(self, request: RoundRequest, limit: int) -> SliceSize:
        """Return the size for work whose forward passes hold up to ``limit`` nonces, or what was tuned for it."""
        tuned, budget = self._autotuner.find(PassSpec.of_round(request)), self._settings.slice_seconds
        size: HalvingSliceSize | TunedSliceSize
        size = HalvingSliceSize(limit, budget) if tuned is None else TunedSliceSize(tuned, self._stages, budget)
        size.weights = self.weights
        return size

    def is_current(self, request: RoundRequest, size: SliceSize) -> bool:
        """Whether the weights are the same, and a pass that was tuned has not made way for those of other kinds."""
        tuned = size.tuned if isinstance(size, TunedSliceSize) else None
        kept = tuned is None or self._autotuner.find(PassSpec.of_round(request)) is tuned
        return size.weights == self.weights and kept

    async def run(
        self,
        request: RoundRequest,
        nonces: Sequence[int],
        size: SliceSize,
        ahead: Iterable[list[int]] = (),
        *,
        busy: Busy | None = None,
        gives_way: Callable[[], bool] = keeps_on,  # these slices are short
    ) -> SliceResult:
        """Compute one slice; nonces that are not finite get a second try. EngineError as from the engine.

        WeightsChangedError if the ``size`` was found for other weights. ServerEndsError once the gate is closed: a
        slice that is under way then is still answered, unless it has to be computed in further calls.

        ``ahead`` are the slices that follow, as far as they are known: the workers begin them already. ``busy`` is told
        of the time on the workers.
        """
        first = await self._compute(request, nonces, size, ahead, busy)
        results = _values(first)
        if first["not_finite"]:
            results |= _values(await self._compute(request, first["not_finite"], size, (), busy))
        items = [(nonce, results[nonce]) for nonce in nonces if nonce in results]
        return SliceResult(items, rejected=len(nonces) - len(items))

    async def step(
        self, call: Callable[[], Awaitable[T]], busy: Busy | None, weights: int, *, needed: float = inf
    ) -> tuple[T, float]:
        """Return the workers' answer to a slice once the gate lets it pass, and how many seconds that took.

        The caller holds the `turn`. WeightsChangedError if the work was begun with other ``weights``; ServerEndsError
        once the gate is closed, and the work is not expected to end soon enough, in ``needed`` seconds.
        """
        await self._passed_with(weights, needed)
        return await self._called(partial(self._observed, call), busy)

    async def idle(self) -> None:
        """Wait until the workers compute nothing for PoC, also nothing that nobody waits for any more."""
        await self.turn.answered()
        await self._engine.idle()

    async def _called(self, call: Callable[[], Awaitable[T]], busy: Busy | None = None) -> tuple[T, float]:
        """Return the answer of the workers, and how many seconds it took. The caller holds the `turn`.

        If he is cancelled the workers compute on: the turn is kept until they have answered, and the time counts.
        """
        calling = asyncio.create_task(self._timed(call, busy))
        calling.add_done_callback(noticed)
        self.turn.hold(calling)
        if busy is not None:
            busy.hold(calling)
        await asyncio.wait([calling])
        return calling.result()

    async def _timed(self, call: Callable[[], Awaitable[T]], busy: Busy | None) -> tuple[T, float]:
        # The last one may be long ago, as while chat held PoC back, and this one take a minute, as a capture does.
        metrics.PROGRESS.labels().set_to_current_time()
        started = self.gate.clock.now()
        try:
            result = await call()
        finally:
            ended = self.gate.clock.now()
            for share in (self.gate.busy, busy):
                if share is not None:
                    share.add(started, ended)
        metrics.PROGRESS.labels().set_to_current_time()
        return result, ended - started

    async def _observed(self, call: Callable[[], Awaitable[T]]) -> T:
        started = self.gate.clock.now()
        answer = await call()
        metrics.SLICE.labels().observe(self.gate.clock.now() - started)
        return answer

    async def _described(self, before: ModelFacts | None) -> ModelFacts:
        facts = (await self._called(self._engine.look))[0]
        with suppress(NoMemoryError):  # the pass that has worked works on
            while facts.get("late"):  # chat and pauses get in between
                await self._passed()
                facts = (await self._called(self._engine.look))[0]
        ready = partial(self._engine.with_decode, facts, self._settings.decode_setup, before)
        return (await self._called(ready))[0]

    @asynccontextmanager
    async def _turn_to_look(self) -> AsyncIterator[None]:
        # It computes, and so waits for chat as all work does.
        async with self.turn:
            await self._passed()
            yield

    def _begin_anew(self) -> None:
        """Let all work begin anew with the pass that the workers have now, as it does with other weights."""
        knows_other_weights = self._forgotten != self.weights
        self.weights += 1
        if not knows_other_weights:
            self._forgotten = self.weights
        self._autotuner.forget()

    async def _passed(self, needed: float = inf) -> None:
        """Wait until the workers may compute, and know nothing of other weights."""
        while True:
            await self.gate.passed(needed)
            if self._forgotten == self.weights:
                return
            await self._let_workers_forget()

    async def _passed_with(self, weights: int, needed: float = inf) -> None:
        """Wait as `_passed` does. WeightsChangedError if the weights are others by then."""
        await self._passed(needed)
        if weights != self.weights:
            raise WeightsChangedError

    async def _let_workers_forget(self) -> None:
        weights = self.weights
        await self._engine.forget()
        self._forgotten = weights

    async def _warm_up(self, batch: BatchRequest, segment_seconds: float, keep: list[PassFields]) -> PassTiming:
        weights = self.weights
        async with self.turn:
            await self._passed_with(weights)  # others the workers have not looked at so far
            return (await self._called(partial(self._engine.warm_up, batch, segment_seconds, keep)))[0]

    async def _attempted(self, batch: BatchRequest) -> None:
        async with self.turn:
            while not (await self.step(partial(self._engine.compute, batch), None, self.weights))[0]["complete"]:
                pass

    async def _compute(
        self,
        request: RoundRequest,
        nonces: Sequence[int],
        size: SliceSize,
        ahead: Iterable[list[int]],
        busy: Busy | None,
    ) -> BatchResult:
        message = batch_request(request, nonces, size.batch(len(nonces)), ahead)
        longest = 0.0
        async with self.turn:  # other work would make the workers drop what they have begun
            self._autotuner.used(PassSpec.of(message))
            with self.shortage.noticed(partial(self._attempted, batch_request(request, nonces[:1], 1))):
                while True:
                    result, seconds = await self.step(partial(self._engine.compute, message), busy, size.weights)
                    longest = max(longest, seconds)
                    if result["complete"]:
                        break
        size.learn(len(nonces), longest)
        _check_answer(nonces, result)
        return result


def distance_of(value: Value) -> float:
    """Return what a nonce of the distance protocol gives."""
    assert not isinstance(value, ComputedChain)  # noqa: S101 - by the protocol
    return float(value)


def count_values(items: Sequence[object]) -> int:
    """Return how many values the results have together: a chain has one for each step, and all else has one."""
    return sum(
        len(item[1].leaf) if isinstance(item, tuple) and isinstance(item[1], ComputedChain) else 1 for item in items
    )


def look_ahead(ahead: deque[list[int]], size: SliceSize, following: Callable[[int], list[int]]) -> None:
    """Add slices up to the number that may begin already; ``following`` returns the one behind so many nonces more."""
    known = sum(len(nonces) for nonces in ahead)
    while len(ahead) < size.ahead and (nonces := following(known)):
        ahead.append(nonces)
        known += len(nonces)


def _values(result: BatchResult) -> dict[int, Value]:
    values: Sequence[Value] = result["vectors"] if "vectors" in result else result.get("distances", [])
    return dict(zip(result["nonces"], values, strict=True))


def _check_answer(nonces: Sequence[int], result: BatchResult) -> None:
    answered = sorted(result["nonces"] + result["not_finite"])
    if answered != sorted(nonces):
        raise EngineError(f"the workers answered {len(answered)} nonces, not the {len(nonces)} asked for")
