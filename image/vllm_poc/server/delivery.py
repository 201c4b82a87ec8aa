# SPDX-License-Identifier: Apache-2.0
"""Delivery of results to the callback receiver: in order, one payload at a time, none dropped."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus

import aiohttp

from vllm_poc.server.settings import Settings
from vllm_poc.server.slices import Value
from vllm_poc.wire.base import WireMessage

_log = logging.getLogger(__name__)

_SUCCESS = range(200, 300)
_CLIENT_ERRORS = range(400, 500)
#: Client errors that may pass, so that the payload is sent again.
_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}


@dataclass(frozen=True)
class Piece:
    """What one slice leaves for delivery; ``end`` is the index after its last nonce."""

    end: int
    items: Sequence[tuple[int, Value]]
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
    error: str | None = None


class Outcome(Enum):
    """What became of one attempt to deliver."""

    ACCEPTED = auto()
    REFUSED = auto()
    FAILED = auto()


class Delivery:
    """Queue and sender of one round. Without a receiver, results count as delivered at once."""

    def __init__(
        self,
        *,
        receiver: str | None,
        payload: Callable[[Sequence[tuple[int, Value]]], WireMessage],
        start_index: int,
        session: aiohttp.ClientSession,
        settings: Settings,
    ) -> None:
        self.delivered = Delivered(start_index)
        self._url = f"{receiver}/generated" if receiver is not None else None
        self._payload = payload
        self._session = session
        self._settings = settings
        self._queue: deque[Piece] = deque()
        self._weight = 0
        self._draining = False
        self._changed = asyncio.Condition()
        self._next_post = 0.0

    async def add(self, piece: Piece) -> None:
        """Queue a piece; waits while too many results wait already."""
        if self._url is None:
            self._settle([piece], Outcome.ACCEPTED)
            return
        async with self._changed:
            await self._changed.wait_for(lambda: self._weight < self._settings.pending_results)
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
        """Send until cancelled."""
        while True:
            pieces = await self._next_pieces()
            outcome = await self._deliver([item for piece in pieces for item in piece.items])
            async with self._changed:
                for piece in pieces:
                    self._queue.popleft()
                    self._weight -= piece.weight
                self._settle(pieces, outcome)
                self._changed.notify_all()

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

    async def _deliver(self, items: Sequence[tuple[int, Value]]) -> Outcome:
        if not items:
            return Outcome.ACCEPTED
        body = self._payload(items).model_dump_json()
        for pause in _pauses(self._settings):
            outcome = await self._post(body)
            if outcome is not Outcome.FAILED:
                break
            await asyncio.sleep(pause)
        self._next_post = asyncio.get_running_loop().time() + self._settings.callback_interval_seconds
        return outcome

    async def _post(self, body: str) -> Outcome:
        assert self._url is not None  # noqa: S101 - nothing is queued without a receiver
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
                return self._judge(answer.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            return self._failed(str(error) or type(error).__name__)

    def _judge(self, status: int) -> Outcome:
        if status in _SUCCESS:
            self.delivered.error = None
            return Outcome.ACCEPTED
        outcome = self._failed(f"HTTP {status}")
        return Outcome.REFUSED if status in _CLIENT_ERRORS and status not in _PASSING else outcome

    def _failed(self, reason: str) -> Outcome:
        self.delivered.error = f"{self._url}: {reason}"
        _log.warning("callback failed: %s", self.delivered.error)
        return Outcome.FAILED

    def _settle(self, pieces: Sequence[Piece], outcome: Outcome) -> None:
        items = sum(len(piece.items) for piece in pieces)
        refused = items if outcome is Outcome.REFUSED else 0
        self.delivered.index = pieces[-1].end
        self.delivered.valid += items - refused
        self.delivered.refused += refused
        self.delivered.rejected += refused + sum(piece.rejected for piece in pieces)


def _up_to(queue: Sequence[Piece] | deque[Piece], limit: int) -> Iterator[Piece]:
    weight = 0
    for piece in queue:
        if weight and weight + piece.weight > limit:
            return
        weight += piece.weight
        yield piece


def _pauses(settings: Settings) -> Iterator[float]:
    pause = settings.retry_first_seconds
    while True:
        yield pause
        pause = min(2 * pause, settings.retry_limit_seconds)
