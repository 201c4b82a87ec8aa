# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still until a test moves it; whoever waits by it wakes up then."""

import asyncio

from vllm_poc.server.lease import Clock


class FakeClock:
    """Seconds since the test began."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._moved = asyncio.Event()

    @property
    def clock(self) -> Clock:
        """What the code under test takes."""
        return Clock(now=lambda: self.seconds, sleep=self._sleep)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds
        self._moved.set()
        self._moved = asyncio.Event()

    async def _sleep(self, seconds: float) -> None:
        until = self.seconds + seconds
        while self.seconds < until:
            await self._moved.wait()
