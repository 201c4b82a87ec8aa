# SPDX-License-Identifier: Apache-2.0
"""Delivery of results to a callback receiver: in order, one payload at a time, none dropped.

A payload has a bounded number of results, and of bytes. What the receiver finds too large makes the next ones smaller.

It is tried until the receiver accepts it or refuses it for good. What is refused is halved until the bad items
are found, so that they alone are lost:

    waiting -> posted -> accepted                         2xx
                      -> waiting, after a pause           5xx, 408, 425, 429, our gateway's 401 and 404, no answer;
                                                          401, 403, 404 at a gateway's address, which has its user
                                                          name or has been answered by one;
                                                          401, 403, 404 of others for a bounded time
                      -> halved, and each half posted     other 4xx, several items
                      -> refused                          other 4xx, one item; 405, 410; 401, 403, 404 after that time
"""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial
from http import HTTPStatus
from typing import Generic, TypeVar

import aiohttp
from yarl import URL

from vllm_poc.logs import get_logger
from vllm_poc.server import metrics
from vllm_poc.server.bodies import off_loop, written
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.scheduler import ComputedChain, Item, count_values
from vllm_poc.settings import Settings
from vllm_poc.wire.callbacks import GATEWAY_HEADER, GATEWAY_REALM, GATEWAY_USER, NOT_ABOUT_CONTENT, ROUND_UNKNOWN
from vllm_poc.wire.messages import WireMessage

_log = get_logger(__name__)

_SUCCESS = range(200, 300)
_CLIENT_ERRORS = range(400, 500)
#: Client errors that may pass, so that the payload is sent again.
_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
#: Those about the address or the sender that pass when a token or a route is changed. They are waited out for a while.
_PASSING_FOR_A_WHILE = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}
_OUR_REALM = f'realm="{GATEWAY_REALM}"'
#: Bytes of an answer that are read; the gateway's have fewer.
_ANSWER_BYTES = 16_384
#: After so many single items refused in a row the receiver is taken to refuse everything.
SEARCH_LIMIT = 64
#: Bytes that a number takes in memory.
_NUMBER_BYTES = 32

T = TypeVar("T")


class Outcome(Enum):
    """What became of items that were posted together."""

    ACCEPTED = auto()
    #: The receiver refused them, and perhaps only because of some of them.
    REFUSED = auto()
    #: The receiver refused them, and would refuse every part of them.
    HOPELESS = auto()


def shown(url: str) -> str:
    """Return the address without the user's name and password, which are for its receiver alone."""
    return str(URL(url).with_user(None))


class Poster(Generic[T]):
    """Posts items to ``url``; ``payload`` makes the body of some of them."""

    def __init__(
        self,
        url: str,
        payload: Callable[[Sequence[T]], WireMessage],
        *,
        session: aiohttp.ClientSession,
        settings: Settings,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.error: str | None = None  # of the last attempt
        self.refusal: str | None = None  # the last one that was final
        self.unauthorized = False  # the gateway's last answer was that the address is not valid now
        self._url = url
        self._shown = shown(url)
        self._payload = payload
        self._session = session
        self._settings = settings
        self._clock = clock
        self._most = settings.payload_results  # results of a payload, as far as their size is known
        self._gateway_waits = False  # the gateway's last answer was one that passes
        self._is_gateway = URL(url).user == GATEWAY_USER  # or it has answered at this address
        self._refused_in_a_row = 0
        self._hurried = asyncio.Event()
        self._turned_away: float | None = None  # since when it has answered nothing else

    def hurry(self) -> None:
        """Try again at once, and from then on after the shortest pause: there is little time left."""
        self._hurried.set()

    def readdress(self, url: str) -> None:
        """Post to ``url`` from the next attempt on: the same address with another user and password."""
        self._url = url

    async def deliver(self, items: Sequence[T]) -> AsyncIterator[bool]:
        """Post ``items`` in order, in payloads of bounded size; yield for each whether it was accepted.

        A payload that is refused is halved until the bad items are found, so that they alone are lost.
        """
        parts = [items] if items else []
        while parts:
            part = parts.pop()
            if len(part) > self._most:
                parts += [part[self._most :], part[: self._most]]
                continue
            body = await written(await off_loop(count_values(part), partial(self._payload, part)))
            if len(part) > 1 and len(body) > self._settings.payload_bytes:
                # All results of a round are about as long.
                self._most = max(1, len(part) * self._settings.payload_bytes // len(body) * 9 // 10)
                parts.append(part)
                continue
            outcome = await self._post(body, len(part))
            if outcome is Outcome.REFUSED and len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
            else:
                for _ in part:
                    yield outcome is Outcome.ACCEPTED

    async def _post(self, body: bytes, count: int) -> Outcome:
        pause = self._settings.retry_first_seconds
        while True:
            status = await self._attempt(body)
            if status not in _PASSING_FOR_A_WHILE or self._gateway_waits:
                self._turned_away = None
            if status in _SUCCESS or (status in _CLIENT_ERRORS and not self._may_pass(status)):
                return self._judge(status, count)
            metrics.CALLBACKS.labels("failed").inc()
            await self._pause(pause)
            pause = min(2 * pause, self._settings.retry_limit_seconds)

    async def _pause(self, seconds: float) -> None:
        if self._hurried.is_set():
            await self._clock.sleep(min(seconds, self._settings.retry_first_seconds))
            return
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(seconds):
                await self._hurried.wait()

    def _may_pass(self, status: int) -> bool:
        if status in _PASSING or self._gateway_waits:
            return True
        if status not in _PASSING_FOR_A_WHILE or self._is_gateway:  # then a proxy before it has lost its way to it
            return self._is_gateway and status in _PASSING_FOR_A_WHILE
        now = self._clock.now()
        if self._turned_away is None:
            self._turned_away = now
        return now < self._turned_away + self._settings.refused_seconds

    async def _attempt(self, body: bytes) -> int:
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                self._clock.timeout(self._settings.callback_seconds),
                self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                status = answer.status
                stored = GATEWAY_HEADER in answer.headers
                challenge = answer.headers.get("WWW-Authenticate", "")
                reason = await _reason(answer) if status == HTTPStatus.NOT_FOUND else None
        except (aiohttp.ClientError, TimeoutError) as error:
            self._failed(str(error) or type(error).__name__)
            return 0
        self.unauthorized = status == HTTPStatus.UNAUTHORIZED and _OUR_REALM in challenge
        self._gateway_waits = self.unauthorized or reason == ROUND_UNKNOWN
        self._is_gateway |= self._gateway_waits or stored
        if status not in _SUCCESS:
            self._failed(f"HTTP {status}" if reason != ROUND_UNKNOWN else f"HTTP {status} {ROUND_UNKNOWN}")
        return status

    def _judge(self, status: int, count: int) -> Outcome:
        if status in _SUCCESS:
            self.error, self._refused_in_a_row = None, 0
            metrics.CALLBACKS.labels("accepted").inc()
            return Outcome.ACCEPTED
        metrics.CALLBACKS.labels("refused").inc()
        self.refusal = self.error
        if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            self._most = max(1, count // 2)
        self._refused_in_a_row += count == 1
        hopeless = status in NOT_ABOUT_CONTENT or self._refused_in_a_row >= SEARCH_LIMIT
        return Outcome.HOPELESS if hopeless else Outcome.REFUSED

    def _failed(self, reason: str) -> None:
        self.error = f"{self._shown}: {reason}"
        _log.warning("callback failed: %s", self.error)


async def _reason(answer: aiohttp.ClientResponse) -> str | None:
    """Return the word for programs of an answer in our gateway's words; None of any other answer."""
    body = b""
    while len(body) < _ANSWER_BYTES and (more := await answer.content.read(_ANSWER_BYTES - len(body))):
        body += more
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    reason = found.get("reason") if isinstance(found, dict) else None
    return reason if isinstance(reason, str) else None


@dataclass(frozen=True)
class Load:
    """Results, and about how many bytes of memory they take."""

    results: int = 0
    bytes: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.results + other.results, self.bytes + other.bytes)

    def __sub__(self, other: "Load") -> "Load":
        return Load(self.results - other.results, self.bytes - other.bytes)

    def is_full(self, settings: Settings) -> bool:
        """Whether more has to wait."""
        return self.results >= settings.pending_results or self.bytes >= settings.pending_bytes


def load_of(items: Sequence[object]) -> Load:
    """Return the load of results or verdicts; of nothing it has one result, since the place in a queue counts too."""
    return Load(max(1, len(items)), sum(_bytes_of(item) for item in items))


def _bytes_of(item: object) -> int:
    if isinstance(item, tuple):  # the nonce, and a distance, the vector in base64, or a chain
        _, value = item
        if isinstance(value, str):
            return len(value)
        return len(value.leaf) if isinstance(value, ComputedChain) else _NUMBER_BYTES
    return sum(_NUMBER_BYTES * len(field) for field in vars(item).values() if isinstance(field, list))


@dataclass(frozen=True)
class Piece:
    """What one slice leaves for delivery; ``end`` is the index after its last nonce."""

    end: int
    items: Sequence[Item]
    rejected: int

    @cached_property
    def load(self) -> Load:
        """Share of the bounded memory; a piece without items counts too."""
        return load_of(self.items)


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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.delivered = Delivered(start_index)
        self.is_full = False  # and therefore holds generation back
        self._poster = None
        if receiver is not None:
            self._poster = Poster(f"{receiver}/generated", payload, session=session, settings=settings, clock=clock)
        self._settings = settings
        self._clock = clock
        self._queue: deque[Piece] = deque()
        self._load = Load()
        self._draining = False
        self._hurried = False
        self._changed = asyncio.Condition()
        self._next_post = clock.now()

    @property
    def error(self) -> str | None:
        """What the receiver last answered while deliveries fail."""
        return self._poster.error if self._poster is not None else None

    @property
    def unauthorized(self) -> bool:
        """Whether the gateway refuses the address as not valid now."""
        return self._poster is not None and self._poster.unauthorized

    def readdress(self, receiver: str) -> None:
        """Deliver to ``receiver`` from the next attempt on: the same address with another user and password."""
        if self._poster is not None:
            self._poster.readdress(f"{receiver}/generated")

    @property
    def pending(self) -> int:
        """How many results wait for delivery."""
        return sum(len(piece.items) for piece in self._queue)

    async def add(self, piece: Piece) -> None:
        """Queue a piece, then wait while too many results wait; one who stops waiting has lost nothing."""
        if self._poster is None:
            self._count(piece, refused=0)
            return
        self._queue.append(piece)
        self._load += piece.load
        async with self._changed:
            self._changed.notify_all()
            try:
                self.is_full = self._is_full()
                await self._changed.wait_for(lambda: not self._is_full())
            finally:
                self.is_full = False

    async def hurry(self) -> None:
        """Deliver what is queued, and what is added, as soon as can be, and hold nobody back."""
        if self._poster is not None:
            self._poster.hurry()
        async with self._changed:
            self._draining = self._hurried = True
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
            self._next_post = self._clock.now() + self._settings.callback_interval_seconds

    async def _next_pieces(self) -> list[Piece]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._queue)
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(self._next_post - self._clock.now()):
                    await self._changed.wait_for(self._must_hurry)
            return list(_up_to(self._queue, self._settings.payload_results))

    def _is_full(self) -> bool:
        return self._load.is_full(self._settings) and not self._hurried

    def _must_hurry(self) -> bool:
        is_payload = self._load.results >= self._settings.payload_results
        return self._draining or is_payload or self._load.is_full(self._settings)

    async def _deliver(self, poster: Poster[Item], pieces: Sequence[Piece]) -> None:
        # Piece by piece, since what is settled stays settled if we are stopped.
        accepted = poster.deliver([item for piece in pieces for item in piece.items])
        for piece in pieces:
            refused = [await anext(accepted) for _ in piece.items].count(False)
            async with self._changed:
                self._queue.popleft()
                self._load -= piece.load
                self._count(piece, refused)
                self._changed.notify_all()

    def _count(self, piece: Piece, refused: int) -> None:
        accepted = len(piece.items) - refused
        metrics.DELIVERED.labels().inc(accepted)
        metrics.REJECTED.labels().inc(refused)
        self.delivered.index = piece.end
        self.delivered.valid += accepted
        self.delivered.refused += refused
        self.delivered.rejected += refused + piece.rejected


def _up_to(queue: Sequence[Piece] | deque[Piece], limit: int) -> Iterator[Piece]:
    results = 0
    for piece in queue:
        if results and results + piece.load.results > limit:
            return
        results += piece.load.results
        yield piece
