# SPDX-License-Identifier: Apache-2.0
"""One generation of a round: compute the slot's nonces in order until stopped, and deliver them.

    GENERATING -> STOPPED   when stopped, or when the slot's last nonce is delivered
               -> FAILED    when the engine fails, or keeps computing NaN and infinities

Both are final; the next start makes a new one. While it generates it computes, waits at ``end_index`` to be extended,
is held back by chat (`vllm_poc.server.gate`), or by a receiver that does not keep up.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import NamedTuple

import aiohttp

from vllm_poc.logs import bound, get_logger
from vllm_poc.server import metrics
from vllm_poc.server.autotune import SliceSize
from vllm_poc.server.callbacks.delivery import Delivery, Piece, shown
from vllm_poc.server.callbacks.payloads import callback, valid_items
from vllm_poc.server.chains import Computers
from vllm_poc.server.clock import Clock
from vllm_poc.server.engine import EngineError, WeightsChangedError
from vllm_poc.server.errors import ServerEndsError
from vllm_poc.server.scheduler import Item, SliceResult, look_ahead
from vllm_poc.settings import Settings
from vllm_poc.wire.answers import Activity, PowState, StopReason
from vllm_poc.wire.messages import InitGenerateRequest, Protocol

_log = get_logger(__name__)

#: While a round runs, its progress is logged this often.
PROGRESS_SECONDS = 5.0
#: One chain of so many may be lost.
_MOST_LOST = 10
#: Status lists the newest valid nonces of a distance round; callbacks carry them all.
LISTED_NONCES = 1_000


class Ending(NamedTuple):
    """Why a round was stopped: a word for programs, a sentence for people."""

    reason: StopReason
    message: str


SERVER_ENDS = Ending(StopReason.SERVER_ENDS, "the server ends")
_SLOT_DONE = Ending(StopReason.SLOT_DONE, "the slot's last nonce is delivered")


@dataclass
class Counters:
    """How far the computation of a round got. Times are seconds of the monotonic clock."""

    next_index: int
    checked: int = 0
    valid: int = 0
    not_finite: int = 0
    sick: int = 0  # nonces not finite since the last clean slice
    newest_valid: deque[Item] = field(default_factory=lambda: deque(maxlen=LISTED_NONCES))
    started: float = field(default_factory=monotonic)
    progressed: float | None = None
    ended: float | None = None

    @property
    def elapsed_seconds(self) -> float:
        """How long the round has run, or ran."""
        return (self.ended or monotonic()) - self.started

    @property
    def rate_per_second(self) -> float:
        """Nonces per second since the start."""
        return self.checked / self.elapsed_seconds if self.checked else 0.0


class Generation:
    """The round's tasks, one that computes and one that delivers, and what status tells of them."""

    def __init__(
        self,
        request: InitGenerateRequest,
        *,
        computers: Computers,
        slice_limit: int,
        session: aiohttp.ClientSession,
        settings: Settings,
        clock: Clock,
        on_idle: Callable[[], None],
    ) -> None:
        self.request = request
        self.state = PowState.GENERATING
        self.error: str | None = None
        self.ending: Ending | None = None  # if it was stopped
        self.counters = Counters(request.start_index)
        self.end_index = request.end_index
        self._extended = asyncio.Event()
        self._waits = False  # at end_index
        self._scheduler = computers.scheduler
        self._computer = computers.of(request)
        self._limit = slice_limit
        self._size: SliceSize  # once its forward pass is tuned
        self._held_back_before = self._scheduler.gate.held_back_seconds
        self._held_back_after: float | None = None  # once the round has ended
        self._on_idle = on_idle
        self._settings = settings
        self._clock = clock
        self.delivery = Delivery(
            receiver=request.receiver,
            payload=partial(callback, request, rebuilt=computers.rebuilt(request)),
            start_index=request.start_index,
            session=session,
            settings=settings,
            clock=clock,
        )
        metrics.PROGRESS.labels().set_to_current_time()
        with self._bound():
            _log.info(
                "%s; starts, callbacks go to %s",
                self._progress(),
                shown(request.receiver) if request.receiver else "nobody",
            )
            self._reporting = asyncio.create_task(self._report())
            self._sending = asyncio.create_task(self._send())
            self._computing = asyncio.create_task(self._generate())

    @property
    def computes(self) -> bool:
        """Whether it uses the engine, and waits neither at ``end_index`` nor for the receiver."""
        return not self._waits and not self.delivery.is_full

    @property
    def activity(self) -> Activity | None:
        """What it does now; None after its end."""
        if self.state is not PowState.GENERATING:
            return None
        if self.counters.next_index >= self.request.slot.capacity:
            return Activity.DELIVERING
        if self._scheduler.gate.pauses.reason is not None:
            return Activity.PAUSED
        if self._waits:
            return Activity.WAITING_FOR_EXTENSION
        if self.delivery.is_full:
            return Activity.RECEIVER_FULL
        return Activity.HELD_BY_CHAT if self._scheduler.gate.holds_back else Activity.COMPUTING

    @property
    def held_back_seconds(self) -> float:
        """How long chat held PoC back since the round started, until it ended."""
        until = self._held_back_after
        return (self._scheduler.gate.held_back_seconds if until is None else until) - self._held_back_before

    def extend(self, end_index: int) -> None:
        """Compute on up to ``end_index``, if that is further than before."""
        if self.end_index is not None and end_index > self.end_index:
            self.end_index = end_index
            self._extended.set()

    def readdress(self, receiver: str | None) -> None:
        """Deliver with another user and password from the next attempt on."""
        if receiver is not None:
            self.delivery.readdress(receiver)

    @property
    def flushes(self) -> bool:
        """Whether it has failed, and delivers what it had computed before."""
        return self.state is PowState.FAILED and not self._computing.done()

    @property
    def pending(self) -> int:
        """How many results wait that somebody delivers."""
        return self.delivery.pending if self.state is PowState.GENERATING or self.flushes else 0

    async def flushed(self) -> None:
        """Wait until it flushes no more, which takes no longer than the flush time."""
        if self.flushes:
            await asyncio.wait([self._computing])

    async def stop(self, why: Ending) -> None:
        """Stop computing, deliver what is left within the flush time, then end. Harmless after the end."""
        await self.flushed()
        await _cancel(self._computing)
        if self.state is PowState.GENERATING:
            await self._flush()
        await self.close(why)

    async def drain(self) -> None:
        """Keep what the workers compute now, deliver everything, then end; the scheduler's gate is closed."""
        await self.delivery.hurry()
        self._extended.set()
        await asyncio.wait([self._computing])
        if self.state is PowState.GENERATING:
            await self._drained_or_ended()
        await self.close()

    async def close(self, why: Ending = SERVER_ENDS) -> None:
        """End at once; what is undelivered lies at or after ``delivery.delivered.index``."""
        await _cancel(self._computing)
        await _cancel(self._sending)
        self._stopped(why)

    async def _generate(self) -> None:
        try:
            await self._compute_slot()
            await self.delivery.drained()
        except ServerEndsError:
            return  # `drain` delivers what there is
        except Exception as error:
            self._fail(error)
            await self._flush()
        else:
            self._stopped(_SLOT_DONE)
        self._sending.cancel()

    async def _compute_slot(self) -> None:
        ahead = deque[list[int]]()
        try:
            await self._compute_first()
            await self._autotune()
            while self.counters.next_index < self.request.slot.capacity:
                if not ahead:
                    await self._allowance()  # others may be computed meanwhile
                if not self._computer.is_current(self.request, self._size):
                    ahead.clear()
                    await self._autotune()
                await self._compute_slice(ahead)
        finally:
            self._on_idle()  # others need not wait for the receiver

    async def _compute_first(self) -> None:
        """Compute a few nonces before the search for the best pass, which takes seconds while chat is busy."""
        first, index = await self._computer.first_size(self.request, self._limit), self.counters.next_index
        if first is not None and index < self.request.slot.capacity:
            self._size = first
            if self._most(index):
                await self._compute_slice(deque())

    async def _compute_slice(self, ahead: deque[list[int]]) -> None:
        slot, index = self.request.slot, self.counters.next_index
        nonces = ahead.popleft() if ahead else slot.nonces(index, await self._allowance())
        look_ahead(ahead, self._size, partial(self._following, index + len(nonces)))
        try:
            result = await self._computer.run(self.request, nonces, self._size, ahead)
        except WeightsChangedError:
            return
        await self.delivery.add(self._record(len(nonces), result))
        _refuse_sick_engine(self.counters.sick, self._settings.sick_nonces)

    async def _autotune(self) -> None:
        await self._computer.autotune(self.request)
        self._size = self._computer.slice_size(self.request, self._limit)

    async def _allowance(self) -> int:
        """Return how many nonces the next slice may have; waits at ``end_index``."""
        while self.end_index is not None and self.end_index <= self.counters.next_index:
            if self._scheduler.gate.is_closed:
                raise ServerEndsError
            self._extended.clear()
            self._waits = True
            await self._extended.wait()
        self._waits = False
        return self._most(self.counters.next_index)

    def _following(self, index: int, known: int) -> list[int]:
        return self.request.slot.nonces(index + known, self._most(index + known))

    def _most(self, index: int) -> int:
        size = self._size.nonces
        return size if self.end_index is None else max(0, min(size, self.end_index - index))

    def _record(self, count: int, result: SliceResult) -> Piece:
        valid = valid_items(self.request, result.items)
        protocol, counters = self.request.protocol, self.counters
        metrics.count_nonces(protocol, "round", computed=count, not_finite=result.rejected)
        metrics.VALID.labels(protocol).inc(len(valid))
        counters.next_index += count
        counters.checked += count
        counters.valid += len(valid)
        counters.not_finite += result.rejected
        counters.sick = 0 if _is_clean(self.request, count, result.rejected) else counters.sick + result.rejected
        counters.newest_valid.extend(valid)
        counters.progressed = monotonic()
        return Piece(counters.next_index, valid, result.rejected)

    async def _send(self) -> None:
        try:
            await self.delivery.run()
        except Exception as error:
            self._fail(error)
            self._computing.cancel()

    async def _drained_or_ended(self) -> None:
        drained = asyncio.create_task(self.delivery.drained())
        try:
            await asyncio.wait([drained, self._sending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(self._settings.flush_seconds):
                await self.delivery.drained()

    def _stopped(self, why: Ending) -> None:
        if self.state is PowState.GENERATING:
            self.ending = why
            self._end(PowState.STOPPED, why.message)

    def _fail(self, error: Exception) -> None:
        self.error = str(error) or type(error).__name__
        # A failing engine is no defect of ours, so that a traceback would say nothing.
        self._end(PowState.FAILED, self.error, defect=None if isinstance(error, EngineError) else error)

    def _end(self, state: PowState, why: str, *, defect: Exception | None = None) -> None:
        if self.state is PowState.GENERATING:
            self.state = state
            self.counters.ended = monotonic()
            self._held_back_after = self._scheduler.gate.held_back_seconds
            self._reporting.cancel()
            self._on_idle()
            level = logging.ERROR if state is PowState.FAILED else logging.INFO
            with self._bound():  # a request that ends the round is about nothing of it
                _log.log(level, "%s; ended: %s", self._progress(), why, exc_info=defect)

    def _bound(self) -> contextlib.AbstractContextManager[None]:
        return bound(round=self.request.round_id, slot=self.request.slot.offset)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            _log.info("%s", self._progress())

    def _progress(self) -> str:
        request, counters, delivered = self.request, self.counters, self.delivery.delivered
        return (
            f"{request.protocol} round {request.round_id!r} of block {request.block_height}: "
            f"{self.activity or self.state}, index {counters.next_index}, {counters.checked} checked, "
            f"{counters.valid} valid, {counters.rate_per_second:.1f} nonces/s, "
            f"held back {self.held_back_seconds:.1f} s, {delivered.valid} delivered up to index {delivered.index}, "
            f"{self.delivery.pending} pending"
        )


def _is_clean(request: InitGenerateRequest, count: int, rejected: int) -> bool:
    """Return whether so few results of a slice are not finite that the engine is well.

    A slice has hundreds of chains of hundreds of steps each, so that some are lost on GPUs that are well. As many may
    be as a validator may lack for a verdict.
    """
    return _MOST_LOST * rejected <= count if request.protocol is Protocol.DECODE else not rejected


def _refuse_sick_engine(sick: int, limit: int) -> None:
    if sick >= limit:
        raise EngineError(
            f"{sick} nonces came out NaN or infinite without one clean slice in between: "
            "check the GPU and the model's dtype, then restart the server"
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
