# SPDX-License-Identifier: Apache-2.0
"""One round on this server: compute the slot's nonces in order until stopped, and deliver them.

States: GENERATING -> STOPPED when stopped, or when the slot's last nonce is delivered;
GENERATING -> FAILED when the engine fails, or keeps computing NaN and infinities. Both are final; the next
start makes a new round.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import aiohttp

from vllm_poc.server.delivery import Delivered, Delivery, Piece
from vllm_poc.server.engine import EngineError
from vllm_poc.server.payloads import callback, valid_items
from vllm_poc.server.settings import Settings
from vllm_poc.server.slices import Item, SliceResult, SliceRunner
from vllm_poc.wire.base import PowState
from vllm_poc.wire.requests import InitGenerateRequest

_log = logging.getLogger(__name__)

#: Status lists the newest valid nonces of a distance round; callbacks carry them all.
LISTED_NONCES = 1_000


@dataclass
class Counters:
    """Progress of a round. Times are seconds of the monotonic clock."""

    next_index: int
    checked: int = 0
    valid: int = 0
    not_finite: int = 0
    sick: int = 0  # nonces not finite since the last slice without any
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


class SickEngineError(Exception):
    """The engine answers, but not with numbers."""


class Round:
    """The round's two tasks, one that computes and one that delivers, and what status tells of them."""

    def __init__(
        self,
        request: InitGenerateRequest,
        *,
        runner: SliceRunner,
        slice_limit: int,
        session: aiohttp.ClientSession,
        settings: Settings,
        on_idle: Callable[[], None],
    ) -> None:
        self.request = request
        self.state = PowState.GENERATING
        self.error: str | None = None
        self.counters = Counters(request.start_index)
        self._runner = runner
        self._size = runner.slice_size(slice_limit)
        self._held_back_before = runner.held_back_seconds
        self._flush_seconds = settings.flush_seconds
        self._on_idle = on_idle
        self._sick_limit = settings.sick_nonces
        self._delivery = Delivery(
            receiver=request.receiver,
            payload=partial(callback, request),
            start_index=request.start_index,
            session=session,
            settings=settings,
        )
        self._sending = asyncio.create_task(self._send())
        self._computing = asyncio.create_task(self._generate())

    @property
    def delivered(self) -> Delivered:
        """How far delivery got."""
        return self._delivery.delivered

    @property
    def delivery_error(self) -> str | None:
        """What the receiver last answered while deliveries fail."""
        return self._delivery.error

    @property
    def held_back_seconds(self) -> float:
        """How long chat held PoC back since the round started."""
        return self._runner.held_back_seconds - self._held_back_before

    async def stop(self) -> None:
        """Stop computing, deliver what is left within the flush time, then end. Harmless after the end."""
        await _cancel(self._computing)
        if self.state is PowState.GENERATING:
            await self._flush()
        await self.close()

    async def close(self) -> None:
        """End at once; what is undelivered lies at or after ``delivered.index``."""
        await _cancel(self._computing)
        await _cancel(self._sending)
        self._end(PowState.STOPPED)

    async def _generate(self) -> None:
        try:
            await self._compute_slot()
            await self._delivery.drained()
        except Exception as error:
            self._fail(error)
            await self._flush()
        else:
            self._end(PowState.STOPPED)
        self._sending.cancel()

    async def _compute_slot(self) -> None:
        try:
            await self._compute_slices()
        finally:
            self._on_idle()  # others need not wait for the receiver

    async def _compute_slices(self) -> None:
        slot, counters = self.request.slot, self.counters
        while counters.next_index < slot.capacity:
            nonces = slot.nonces(counters.next_index, self._size.nonces)
            result = await self._runner.run(self.request, nonces, self._size)
            await self._delivery.add(self._record(len(nonces), result))
            _refuse_sick_engine(counters.sick, self._sick_limit)

    def _record(self, count: int, result: SliceResult) -> Piece:
        valid = valid_items(self.request, result.items)
        counters = self.counters
        counters.next_index += count
        counters.checked += count
        counters.valid += len(valid)
        counters.not_finite += result.rejected
        counters.sick = counters.sick + result.rejected if result.rejected else 0
        counters.newest_valid.extend(valid)
        counters.progressed = monotonic()
        return Piece(counters.next_index, valid, result.rejected)

    async def _send(self) -> None:
        try:
            await self._delivery.run()
        except Exception as error:
            self._fail(error)
            self._computing.cancel()

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._flush_seconds):
                await self._delivery.drained()

    def _fail(self, error: Exception) -> None:
        _log.error("the round failed", exc_info=None if isinstance(error, EngineError | SickEngineError) else error)
        self.error = str(error) or type(error).__name__
        self._end(PowState.FAILED)

    def _end(self, state: PowState) -> None:
        if self.state is PowState.GENERATING:
            self.state = state
            self.counters.ended = monotonic()
            self._on_idle()


def _refuse_sick_engine(sick: int, limit: int) -> None:
    if sick >= limit:
        raise SickEngineError(
            f"{sick} nonces came out NaN or infinite without one clean slice in between: "
            "check the GPU and the model's dtype, then restart the server"
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
