# SPDX-License-Identifier: Apache-2.0
"""A write that keeps the gateway's database busy for as long as a test wants."""

import asyncio
import threading

from sqlalchemy import Connection

_SECONDS = 5


class HeldWrite:
    """Holds the database from its beginning until ``release`` is set, for 5 seconds at most."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self._begun = threading.Event()

    def __call__(self, _: Connection) -> None:
        """Wait inside the write."""
        self._begun.set()
        self.release.wait(_SECONDS)

    async def begun(self) -> None:
        """Wait until the write has begun."""
        await asyncio.to_thread(self._begun.wait, _SECONDS)
