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
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import NamedTuple, Protocol, TypeVar

from vllm_poc.logs import get_logger
from vllm_poc.rpc import BatchRequest, BatchResult, ModelFacts, PassFields, PassSpec, PassTiming, batch_request
from vllm_poc.server import metrics
from vllm_poc.server.autotune import Autotuner, GaveWayError, HalvingSliceSize, SliceSize, TunedSliceSize
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.engine import EngineError, NoMemoryError, VllmEngine, WeightsChangedError, noticed
from vllm_poc.server.errors import ServerEndsError
from vllm_poc.server.gate import ROOM_AGAIN_SECONDS, Busy, ChatGate, MemoryShortage, Turn
from vllm_poc.server.vllm_routes import Pauses
from vllm_poc.settings import Settings
from vllm_poc.wire.messages import RoundRequest
from vllm_poc.wire.stat_test import ChainComparison

_log = get_logger(__name__)


class ComputedChain(NamedTuple):
    """A chain, one byte for each step, and how it compares with the claim that its steps were repeated from, if any."""

    leaf: bytes
    compared: ChainComparison | None


#: What one nonce gives: a distance, a vector in base64, or a chain.
Value = float | str | ComputedChain
#: A nonce with its value.
Item = tuple[int, Value]
#: Seconds after which a decode scheme that could not be prepared is tried again.
_DECODE_AGAIN_SECONDS = 60.0
#: Seconds after which a model is looked at again that could not be. Whoever only wants to know waits as long.
_DESCRIBED_AGAIN_SECONDS = 30.0
#: A faster pass that found no room is tried half as often each time, since it takes seconds of chat, up to this.
_MOST_SECONDS = 3600.0

T = TypeVar("T")


class ModelDescription:
    """What the workers say of the model: found once for all who ask, and anew for other weights.

    What fails, and what may fare better another time, is tried again by the ``clock``. ``turn`` is a context in which
    the workers may compute. ``describe`` asks them, and is told what they said before, if it is asked again; it raises
    EngineError if it fails. ``is_faster`` is called when another try has found a faster pass.
    """

    def __init__(
        self,
        turn: Callable[[], AbstractAsyncContextManager[None]],
        describe: Callable[[ModelFacts | None], Awaitable[ModelFacts]],
        is_faster: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.known: ModelFacts | None = None
        #: What the workers said of the last chains, in sentences.
        self.of_chains: list[str] = []
        self.error: str | None = None
        #: Whether the last error is that the device has no room.
        self.lacks_memory = False
        self._turn = turn
        self._describe = describe
        self._is_faster = is_faster
        self._clock = clock
        self._task: asyncio.Task[ModelFacts] | None = None
        self._begun: asyncio.Task[ModelFacts] | None = None  # the last one that has got its turn
        self._looking: asyncio.Task[None] | None = None
        self._trying: asyncio.Task[None] | None = None
        self._told = set[str]()  # what is in the log
        self._waits = False  # for another try after a failure
        self._slower_tries = 0
        self._ended = False

    async def facts(self) -> ModelFacts:
        """Return it; all who ask meanwhile wait for the same answer. EngineError if there is none."""
        if self.known is not None:
            return self.known
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._find())
        return await asyncio.shield(self._task)

    async def glance(self, seconds: float) -> ModelFacts | None:
        """Return it if it is there within so many seconds."""
        fails = self.error is not None and (
            self._task is None or self._task.done()
        )  # until the clock lets it try again
        if self.known is None and not fails:
            with suppress(TimeoutError, EngineError, ServerEndsError):
                async with asyncio.timeout(seconds):
                    await self.facts()
        return self.known

    def look(self) -> None:
        """Find it when the workers may compute, also if nobody asks."""
        if not self._ended and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())

    def note(self, of_chains: list[str]) -> None:
        """Keep what the workers say of the last chains."""
        self.of_chains = of_chains
        for finding in of_chains:
            self._tell(logging.WARNING, finding)

    @property
    def findings(self) -> list[str]:
        """What was found out about this server, in sentences for people."""
        return [*self.known["findings"], *self.of_chains] if self.known is not None else []

    def forget(self) -> None:
        """Find it anew when somebody asks, or looks."""
        self.known = None
        if self._task is self._begun:  # one that has not will find what is new
            self._task = None
        self.of_chains = []
        self._slower_tries = 0

    async def end(self) -> None:
        """Look no more."""
        self._ended = True
        tasks = [task for task in (self._looking, self._trying, self._task) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look(self) -> None:
        with suppress(EngineError, ServerEndsError):
            while self.known is None:  # it may have been forgotten meanwhile
                await self.facts()

    async def _find(self) -> ModelFacts:
        task = asyncio.current_task()
        try:
            async with self._turn():
                self._begun = self._task if self._task is task else self._begun
                facts = await self._describe(None)
        except EngineError as error:
            self._fail(error)
            raise
        if self._task is task:  # otherwise it was forgotten meanwhile
            self._told.clear()
            self.error, self.lacks_memory = None, False
            self._take(facts)
        return facts

    def _fail(self, error: EngineError) -> None:
        if self.error != str(error):  # it is tried again and again
            _log.error("PoC cannot run, and tries again every %g s: %s", _DESCRIBED_AGAIN_SECONDS, error)
        self.error, self.lacks_memory = str(error), isinstance(error, NoMemoryError)
        if not self._waits:
            self._waits = True
            self._clock.call_later(_DESCRIBED_AGAIN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._waits = False
        self.look()

    def _take(self, facts: ModelFacts) -> None:
        self.known = facts
        for finding in facts["findings"]:
            self._tell(logging.WARNING if finding == facts.get("slower") else logging.INFO, finding)
        if facts["refusal"] is not None:
            self._tell(logging.ERROR, f"PoC does not run on this server: {facts['refusal']}")
        again = None
        if facts.get("passes"):
            again = min(ROOM_AGAIN_SECONDS * 2**self._slower_tries, _MOST_SECONDS)
            self._slower_tries += 1
        if "decode" in facts and facts["decode"]["refusal"] is not None:
            self._tell(logging.ERROR, f"this server does not offer the decode scheme: {facts['decode']['refusal']}")
            if facts["decode"].get("passes") and again is None:  # or as seldom as a look: both wait for the same memory
                again = _DECODE_AGAIN_SECONDS
        if again is not None:
            self._clock.call_later(again, partial(self._try_again, facts))

    def _tell(self, level: int, message: str) -> None:
        if message not in self._told:  # some is found again and again
            self._told.add(message)
            _log.log(level, "%s", message)

    def _try_again(self, before: ModelFacts) -> None:
        if self.known is before and not self._ended:
            self._trying = asyncio.create_task(self._find_again(before))

    async def _find_again(self, before: ModelFacts) -> None:
        facts = before  # which hold on for another time if the engine fails
        with suppress(EngineError, ServerEndsError):
            async with self._turn():
                if self.known is before:
                    facts = await self._describe(before)
        if self.known is before:
            self._take(facts)
            if facts["fused"] and not before["fused"]:
                self._is_faster()


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

    def slice_size(self, request: RoundRequest, limit: int) -> SliceSize:
        """Return the size of slices for work of which ``limit`` nonces may be computed together."""
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

    def slice_size(self, request: RoundRequest, limit: int) -> SliceSize:
        """Return the size for work whose forward passes hold up to ``limit`` nonces, or what was tuned for it."""
        tuned, budget = self._autotuner.find(PassSpec.of_round(request)), self._settings.slice_seconds
        size: HalvingSliceSize | TunedSliceSize
        size = HalvingSliceSize(limit, budget) if tuned is None else TunedSliceSize(tuned, self._stages, budget)
        size.weights = self.weights
        return size

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
        await self._passed(needed)
        if weights != self.weights:
            raise WeightsChangedError
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

    async def _let_workers_forget(self) -> None:
        weights = self.weights
        await self._engine.forget()
        self._forgotten = weights

    async def _warm_up(self, batch: BatchRequest, segment_seconds: float, keep: list[PassFields]) -> PassTiming:
        async with self.turn:
            await self._passed()
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
