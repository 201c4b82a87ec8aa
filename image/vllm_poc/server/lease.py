# SPDX-License-Identifier: Apache-2.0
"""The lease of a round: how long it may run if its owner does not ask for it any more.

A start with ``lease_seconds`` takes one, ``GET status`` with ``renew_lease`` renews it, and a round whose lease has run
out stops as if it was told to. So an owner that is gone leaves no GPU at work, and one that cannot reach the pod knows
when the pod has stopped.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True)
class Clock:
    """Seconds of a clock that never goes back, and how to wait by it."""

    now: Callable[[], float] = monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


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
