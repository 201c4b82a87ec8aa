# SPDX-License-Identifier: Apache-2.0
"""Clocks that stand still until a test moves them; whoever waits by them goes on then."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from vllm_poc.server.clock import Clock

T = TypeVar("T")
#: Seconds that pass at once while somebody waits for something else; a power of two, so that sums are exact.
STEP = 1 / 256


class FakeClock(Clock):
    """Seconds since the test began. What connections and threads do takes no time by it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def now(self) -> float:
        """Return the seconds."""
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        """Wait until the test has let so many seconds pass."""
        over = asyncio.Event()
        self.call_later(seconds, over.set)
        await over.wait()

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Return a context that ends with TimeoutError when the test has let so many seconds pass."""
        return self._timeout(seconds)

    @asynccontextmanager
    async def _timeout(self, seconds: float) -> AsyncIterator[None]:
        is_under_way = True
        async with asyncio.timeout(None) as limit:

            def end() -> None:
                if is_under_way:
                    limit.reschedule(asyncio.get_running_loop().time())

            self.call_later(seconds, end)
            try:
                yield
            finally:
                is_under_way = False

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call when the test has let so many seconds pass."""
        if seconds <= 0:
            asyncio.get_running_loop().call_soon(call)
        else:
            self._due.append((self.seconds + seconds, call))

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds
        due = sorted((one for one in self._due if one[0] <= self.seconds), key=lambda one: one[0])
        self._due = [one for one in self._due if one[0] > self.seconds]
        for _, call in due:
            call()

    async def tick(self) -> None:
        """Let a little time pass, and everything run that this concerns."""
        self.advance(STEP)
        await settle(10)

    async def passes(self, work: Awaitable[T]) -> T:
        """Let time pass until ``work`` is done, and return what it returns."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.tick()
        return task.result()


class LeaseClock(FakeClock):
    """For tests about leases alone: all that takes less than a second, and all limits, are by the system's clock."""

    async def sleep(self, seconds: float) -> None:
        """Wait by the system's clock, or until the test has let so many seconds pass."""
        await (Clock.sleep(self, seconds) if seconds < 1 else FakeClock.sleep(self, seconds))

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Return the system's."""
        return Clock.timeout(self, seconds)

    async def tick(self) -> None:
        """Wait for the system's clock."""
        await asyncio.sleep(STEP)


async def settle(turns: int = 50) -> None:
    """Let everything run that waits for nothing but its turn."""
    for _ in range(turns):
        await asyncio.sleep(0)
