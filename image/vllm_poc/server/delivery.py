# SPDX-License-Identifier: Apache-2.0
"""Delivery of results to the callback receiver: in order, one payload at a time, none dropped."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from vllm_poc.server import metrics
from vllm_poc.server.posting import Poster
from vllm_poc.server.scheduler import Item
from vllm_poc.server.settings import Settings
from vllm_poc.wire.messages import WireMessage


@dataclass(frozen=True)
class Piece:
    """What one slice leaves for delivery; ``end`` is the index after its last nonce."""

    end: int
    items: Sequence[Item]
    rejected: int

    @property
    def weight(self) -> int:
        """Share of the bounded memory; a piece without items counts too."""
        return max(1, len(self.items))


@dataclass
class Delivered:
    """How far delivery got: nonces before ``index`` are accepted, refused for good, or not to be sent."""

    index: int
    valid: int = 0
    rejected: int = 0
    refused: int = 0  # by the receiver; part of ``rejected``


class Delivery:
    """Queue and sender of one round. Without a receiver, results count as delivered at once."""

    def __init__(
        self,
        *,
        receiver: str | None,
        payload: Callable[[Sequence[Item]], WireMessage],
        start_index: int,
        session: aiohttp.ClientSession,
        settings: Settings,
    ) -> None:
        self.delivered = Delivered(start_index)
        self.is_full = False  # and therefore holds generation back
        self._poster = None
        if receiver is not None:
            self._poster = Poster(f"{receiver}/generated", payload, session=session, settings=settings)
        self._settings = settings
        self._queue: deque[Piece] = deque()
        self._weight = 0
        self._draining = False
        self._changed = asyncio.Condition()
        self._next_post = 0.0

    @property
    def error(self) -> str | None:
        """What the receiver last answered while deliveries fail."""
        return self._poster.error if self._poster is not None else None

    @property
    def pending(self) -> int:
        """How many results wait for delivery."""
        return sum(len(piece.items) for piece in self._queue)

    async def add(self, piece: Piece) -> None:
        """Queue a piece; waits while too many results wait already."""
        if self._poster is None:
            self._count(piece, refused=0)
            return
        async with self._changed:
            try:
                self.is_full = self._weight >= self._settings.pending_results
                await self._changed.wait_for(lambda: self._weight < self._settings.pending_results)
            finally:
                self.is_full = False
            self._queue.append(piece)
            self._weight += piece.weight
            self._changed.notify_all()

    async def drained(self) -> None:
        """Wait until everything queued is settled, without pauses between payloads."""
        async with self._changed:
            self._draining = True
            self._changed.notify_all()
            await self._changed.wait_for(lambda: not self._queue)

    async def run(self) -> None:
        """Send until cancelled; without a receiver there is nothing to send."""
        while self._poster is not None:
            await self._deliver(self._poster, await self._next_pieces())
            self._next_post = asyncio.get_running_loop().time() + self._settings.callback_interval_seconds

    async def _next_pieces(self) -> list[Piece]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._queue)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_post):
                    await self._changed.wait_for(self._must_hurry)
            return list(_up_to(self._queue, self._settings.payload_results))

    def _must_hurry(self) -> bool:
        full = min(self._settings.payload_results, self._settings.pending_results)
        return self._draining or self._weight >= full

    async def _deliver(self, poster: Poster[Item], pieces: Sequence[Piece]) -> None:
        # Piece by piece, since what is settled stays settled if we are stopped.
        accepted = poster.deliver([item for piece in pieces for item in piece.items])
        for piece in pieces:
            refused = [await anext(accepted) for _ in piece.items].count(False)
            async with self._changed:
                self._queue.popleft()
                self._weight -= piece.weight
                self._count(piece, refused)
                self._changed.notify_all()

    def _count(self, piece: Piece, refused: int) -> None:
        accepted = len(piece.items) - refused
        metrics.DELIVERED.inc(accepted)
        metrics.REJECTED.inc(refused)
        self.delivered.index = piece.end
        self.delivered.valid += accepted
        self.delivered.refused += refused
        self.delivered.rejected += refused + piece.rejected


def _up_to(queue: Sequence[Piece] | deque[Piece], limit: int) -> Iterator[Piece]:
    weight = 0
    for piece in queue:
        if weight and weight + piece.weight > limit:
            return
        weight += piece.weight
        yield piece
