# SPDX-License-Identifier: Apache-2.0
"""When PoC may compute its next slice: after chat, when vLLM computes at all, and requests no more than their share.

closed      the server ends              ServerEndsError, unless what has begun comes to its end in time
paused      vLLM sleeps, or is paused    wait; clients that wait for an answer get 503
chat        waits or runs                wait, unless PoC goes first or is below its least share
open
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from math import inf
from typing import Any, Protocol, TypeVar

from vllm_poc.logs import get_logger
from vllm_poc.server import metrics
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.engine import EngineError, NoMemoryError, VllmEngine
from vllm_poc.server.errors import PausedError, ServerEndsError, refusal
from vllm_poc.server.vllm_routes import PAUSE, Pauses
from vllm_poc.settings import Priority, Settings

_log = get_logger(__name__)

T = TypeVar("T")

#: Seconds between two tries whether the device has room again.
ROOM_AGAIN_SECONDS = 30.0
#: Looks in a row that find chat idle, after which PoC goes on. A client that chats without pause sends its next request
#: within a few milliseconds, and each time would wait for PoC if a single look were enough. Looks are counted, and not
#: time, since requests that have come are seen only when the event loop gets to them.
IDLE_LOOKS = 2


class BusyShare:
    """Share of the last ``window`` seconds that PoC used. ``now`` is in seconds of any clock."""

    def __init__(self, window: float, now: Callable[[], float]) -> None:
        self._window = window
        self._now = now
        self._spans: deque[tuple[float, float]] = deque()

    def add(self, start: float, end: float) -> None:
        """Count the time from ``start`` to ``end``; spans come in order and do not overlap."""
        self._forget()
        self._spans.append((start, end))

    def value(self) -> float:
        """Return the share, 0..1: the spans' seconds inside the window, over its length."""
        first = self._forget()
        return sum(end - max(start, first) for start, end in self._spans) / self._window

    def _forget(self) -> float:
        first = self._now() - self._window
        while self._spans and self._spans[0][1] <= first:
            self._spans.popleft()
        return first


class ChatGate:
    """Lets a slice of PoC work pass when chat is idle, when PoC goes first, or when it is below its least share.

    Whoever runs a slice tells ``busy`` from when to when, by the ``clock``.
    """

    def __init__(
        self, engine: VllmEngine, settings: Settings, pauses: Pauses | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.held_back_seconds = 0.0
        self.is_closed = False
        #: Whether PoC waits for chat now.
        self.holds_back = False
        self.pauses = pauses or Pauses()
        self._closed_for_all = 0.0  # by the clock
        self._engine = engine
        self._poc_first = settings.priority is Priority.POC_FIRST
        self._min_share = settings.min_share
        self._backoff = settings.chat_backoff_seconds
        self.clock = clock
        self.busy = BusyShare(settings.share_window_seconds, clock.now)

    async def passed(self, needed: float = inf) -> None:
        """Wait until PoC may run its next slice. ServerEndsError if there is none.

        Work that has begun and is expected to end within ``needed`` seconds may pass for a while after the gate closed.
        """
        idle = IDLE_LOOKS  # as long as no chat is seen, the first look is enough
        while True:
            if self.is_closed and self.clock.now() + needed > self._closed_for_all:
                raise ServerEndsError
            if self.pauses.reason is not None:
                await self.clock.sleep(self._backoff)
                continue
            idle = 0 if self._engine.has_unfinished_chat() else idle + 1
            if idle >= IDLE_LOOKS or self._ignores_chat():
                return
            await self._pause()

    async def unless_paused(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns. PausedError if there is a pause, or one begins; the work is cancelled then."""
        working, pausing = asyncio.ensure_future(work), asyncio.create_task(self.pauses.begun())
        try:
            await asyncio.wait([working, pausing], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise PausedError(self.pauses.reason or PAUSE)
        finally:
            working.cancel()
            pausing.cancel()
            await asyncio.wait([working, pausing])
            if not working.cancelled():
                working.exception()  # nobody else looks at it if there is a pause

    def close(self, ending_within: float = 0.0) -> None:
        """Let no further slice pass, but those of work that ends within so many seconds: the server ends."""
        self.is_closed = True
        self._closed_for_all = self.clock.now() + ending_within

    async def _pause(self) -> None:
        started = self.clock.now()
        self.holds_back = True
        try:
            await self.clock.sleep(self._backoff)
        finally:
            self.holds_back = False
        waited = self.clock.now() - started
        self.held_back_seconds += waited
        metrics.HELD_BACK.labels().inc(waited)

    def _ignores_chat(self) -> bool:
        return self._poc_first or self.busy.value() < self._min_share


def nobody() -> None:
    """Tell nobody of progress."""


class Turn:
    """A lock that whoever holds it gives back once the workers have answered, and not before.

    A client that leaves cancels what is awaited for it, and the workers compute on all the same.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._call: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> None:
        """Wait for the turn."""
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        """Give it back, now or when the call of `hold` has ended."""
        self.once_answered(self._lock.release)

    @asynccontextmanager
    async def taken(self, progress: Callable[[], None]) -> AsyncIterator[None]:
        """Have the turn while the context lasts; ``progress`` is called meanwhile when the one before makes some."""
        self._waiting.append(progress)
        try:
            await self._lock.acquire()
        finally:
            self._waiting.remove(progress)
        try:
            yield
        finally:
            self.once_answered(self._lock.release)

    def progress(self) -> None:
        """Tell all who wait that whoever has the turn makes progress."""
        for told in self._waiting:
            told()

    def hold(self, call: asyncio.Task[Any]) -> None:
        """Keep the turn until ``call`` has ended, also if its holder is gone before."""
        self._call = call

    def once_answered(self, do: Callable[[], object]) -> None:
        """Do something, now or when the call of `hold` has ended."""
        if self._call is None or self._call.done():
            do()
        else:
            self._call.add_done_callback(lambda _: do())

    async def answered(self) -> None:
        """Wait until the call of `hold` has ended."""
        while self._call is not None and not self._call.done():
            await asyncio.wait([self._call])


class Patience:
    """How long a client waits: ``total`` seconds for the result, and ``busy`` seconds, if any, for each call.

    A slice is one call to the workers or, of chains, hundreds. ``why`` it may take so long is for people.
    """

    def __init__(self, total: float, busy: float | None, why: str) -> None:
        self._total = total
        self._busy = busy
        self._why = why
        self._call = asyncio.timeout(None)
        self._waits = False

    def renew(self) -> None:
        """Wait as long as at first for the next call, unless the client has gone."""
        if self._busy is not None and self._waits and not self._call.expired():
            self._call.reschedule(asyncio.get_running_loop().time() + self._busy)

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Cancel what is awaited in this context when the patience ends, and refuse with 503 ``Busy`` then."""
        try:
            async with asyncio.timeout(self._total), self._call:
                self._waits = True
                self.renew()
                try:
                    yield
                finally:
                    self._waits = False  # a call that the workers answer later has nothing to renew
        except TimeoutError:
            if self._call.expired():
                detail = f"the engine has not got to this within {self._busy:g} s, {self._why}: ask again later"
            else:
                detail = f"the nonces were not done within {self._total:g} s, {self._why}: ask for fewer, or later"
            raise refusal(HTTPStatus.SERVICE_UNAVAILABLE, "Busy", detail, {"Retry-After": "5"}) from None


class Busy(Protocol):
    """Is told when PoC computed."""

    def progress(self) -> None:
        """Note that the work makes progress, though it may not be its turn yet."""
        ...

    def hold(self, call: asyncio.Task[Any]) -> None:
        """Expect the time of a ``call`` to the workers, which is told before it has ended."""
        ...

    def add(self, start: float, end: float) -> None:
        """Count the time from ``start`` to ``end``."""
        ...


class SliceMeter:
    """Counts the time that a slice takes while a round computes: by itself, and in the ``shares`` of requests.

    It keeps the ``turn`` of the slice until all of that time is known, and calls ``progress`` after each call.
    """

    def __init__(
        self,
        shares: Sequence[BusyShare],
        turn: Turn,
        round_computes: Callable[[], bool],
        progress: Callable[[], None],
    ) -> None:
        self.seconds = 0.0
        self.hold = turn.hold
        self._shares = shares
        self._round_computes = round_computes
        self.progress = progress

    def add(self, start: float, end: float) -> None:
        """Count the time from ``start`` to ``end``, if a round computes."""
        self.progress()
        if self._round_computes():
            self.seconds += end - start
            for share in self._shares:
                share.add(start, end)


class RequestShare:
    """Lets requests beside a round compute one slice at a time, and no more than their share while the round computes.

    Batches of chains take turns of their own: between the calls of one, which may take a minute together, there is room
    for slices of vectors and distances. Half of the share is theirs, whatever chains have had, and no more than that
    while chains rest or wait for their share. What they take while chains rest is added to that rest.

    Whoever waits for a turn makes progress with the one who has it.
    """

    def __init__(self, round_computes: Callable[[], bool], settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._busy, self._busy_without_chains = (BusyShare(settings.share_window_seconds, clock.now) for _ in range(2))
        self._clock = clock
        self.round_computes = round_computes
        self._share = settings.request_share
        self._longest = settings.request_share * settings.share_window_seconds
        self._rest_ends, self._rest_of_chains_ends = clock.now(), clock.now()
        self._backoff = settings.chat_backoff_seconds
        self._turn, self._turn_of_chains = Turn(), Turn()
        self._chains_want = False

    @asynccontextmanager
    async def slice(self, progress: Callable[[], None], *, of_chains: bool) -> AsyncIterator[SliceMeter]:
        """Wait for the turn of a slice, which lasts as long as the context does, and the call that it has begun.

        Tell the meter when it computes. It calls ``progress`` each time, and so does the wait for the share.
        """
        turn = self._turn_of_chains if of_chains else self._turn
        shares = [self._busy] if of_chains else [self._busy_without_chains, self._busy]

        def told() -> None:
            progress()
            turn.progress()

        async with turn.taken(progress):
            await self._get_share(told, of_chains=of_chains)
            meter = SliceMeter(shares, turn, self.round_computes, told)
            try:
                yield meter
            finally:
                turn.once_answered(lambda: self._rest(meter.seconds, of_chains=of_chains))

    async def _get_share(self, told: Callable[[], None], *, of_chains: bool) -> None:
        """Wait until there is room in the share. The engine is not too busy then: what came before has had its part."""
        try:
            while self.round_computes() and (self._rests(of_chains) or self._is_used_up(of_chains)):
                self._chains_want = self._chains_want or of_chains
                told()
                await self._clock.sleep(self._backoff)
        finally:
            self._chains_want = self._chains_want and not of_chains

    def _is_used_up(self, of_chains: bool) -> bool:
        used_up = self._busy.value() >= self._share
        if of_chains:
            return used_up
        wanted = used_up or self._chains_want or self._rests(of_chains=True)
        return wanted and self._busy_without_chains.value() >= self._share / 2

    def _rests(self, of_chains: bool) -> bool:
        return self._clock.now() < (self._rest_of_chains_ends if of_chains else self._rest_ends)

    def _rest(self, used: float, *, of_chains: bool) -> None:
        now, owed = self._clock.now(), used / self._share - used
        # The window forgets a part of what a slice took that is longer, as a batch of chains is.
        if of_chains and used > self._longest:
            self._rest_of_chains_ends = max(now, self._rest_of_chains_ends) + owed
        elif not of_chains:
            if used > self._longest:
                self._rest_ends = now + owed
            if self._rests(of_chains=True):
                self._rest_of_chains_ends += used + owed


class MemoryShortage:
    """Whether the device had no room for the last work, which is then tried again now and then: a single nonce.

    So the server says that it is ready as soon as it is, also if nobody gives work to one that is not.
    """

    def __init__(self, clock: Clock) -> None:
        #: What found no room; None if the last work did.
        self.error: str | None = None
        self._clock = clock
        self._trying: asyncio.Task[None] | None = None

    @contextmanager
    def noticed(self, attempt: Callable[[], Awaitable[object]]) -> Iterator[None]:
        """Learn from what is computed in this context; ``attempt`` computes a single nonce of it.

        EngineError as from the engine.
        """
        try:
            yield
        except NoMemoryError as error:
            if self.error is None:
                _log.error("PoC finds no memory, and tries again every %g s: %s", ROOM_AGAIN_SECONDS, error)
            self.error = str(error)
            if self._trying is None:
                self._trying = asyncio.create_task(self._try(attempt))
            raise
        self.end()

    def end(self) -> None:
        """Take it that there is room, and try no more."""
        if self.error is not None:
            _log.info("PoC finds memory again")
        self.error = None
        if self._trying is not None:
            self._trying.cancel()
            self._trying = None

    async def _try(self, attempt: Callable[[], Awaitable[object]]) -> None:
        while True:
            await self._clock.sleep(ROOM_AGAIN_SECONDS)
            try:
                await attempt()
            except EngineError:
                continue
            except ServerEndsError:
                return
            self._trying = None
            self.end()
            return
