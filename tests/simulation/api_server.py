# SPDX-License-Identifier: Apache-2.0
"""The cluster's API server, which can be taken away for a while."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from hack.cluster.parts import Part, parts
from hack.cluster.processes import ensure_running, find

NAME = "kube-apiserver"


class ApiServer:
    """Outages of the API server, one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        #: Begin and end of each outage; the end is when it was healthy again.
        self.outages: list[tuple[float, float]] = []

    @property
    def away(self) -> bool:
        """Whether an outage lasts."""
        return self._turn.locked()

    async def freeze(self, seconds: float) -> None:
        """Stop the process for so long: requests hang."""
        async with self._turn:
            with self._noted():
                os.kill(_pid(), signal.SIGSTOP)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    os.kill(_pid(), signal.SIGCONT)
                    await asyncio.to_thread(ensure_running, _part())

    async def kill(self, seconds: float) -> None:
        """End the process by SIGKILL and start it again after so long: requests are refused."""
        async with self._turn:
            with self._noted():
                os.kill(_pid(), signal.SIGKILL)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    await asyncio.to_thread(ensure_running, _part())

    @contextmanager
    def _noted(self) -> Iterator[None]:
        began = monotonic()
        try:
            yield
        finally:
            self.outages.append((began, monotonic()))


def _part() -> Part:
    return next(part for part in parts() if part.name == NAME)


def _pid() -> int:
    record = find(NAME)
    assert record is not None
    assert record.alive()
    return record.pid
