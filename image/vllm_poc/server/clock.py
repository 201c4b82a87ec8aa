# SPDX-License-Identifier: Apache-2.0
"""The server's clock, and the lease of a round: how long it may run if its owner does not ask for it any more.

Whatever waits for a time, and not for somebody, waits by the clock, so that tests can set it.

A start with ``lease_seconds`` takes a lease, ``GET status`` with ``renew_lease`` renews it, and a round whose lease has
run out stops as if it was told to. So an owner that is gone leaves no GPU at work, and one that cannot reach the pod
knows when the pod has stopped.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from time import monotonic


class Clock:
    """Seconds that never go back, and ways to wait by them."""

    def now(self) -> float:
        """Return the seconds since some moment."""
        return monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait so many seconds."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Return a context that cancels what is awaited in it after so many seconds, and raises TimeoutError then."""
        return asyncio.timeout(seconds)

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call after so many seconds."""
        asyncio.get_running_loop().call_later(seconds, call)


SYSTEM_CLOCK = Clock()


class Lease:
    """One lease, from now on."""

    def __init__(self, seconds: int, clock: Clock) -> None:
        self.seconds = seconds
        self._clock = clock
        self._ends = clock.now() + seconds

    @property
    def remaining(self) -> float:
        """Seconds until it runs out; 0 if it has."""
        return max(0.0, self._ends - self._clock.now())

    def renew(self) -> None:
        """Let it last for its full time again."""
        self._ends = self._clock.now() + self.seconds

    async def run_out(self) -> None:
        """Wait until it has run out, however often it is renewed meanwhile."""
        while self.remaining:
            await self._clock.sleep(self.remaining)
