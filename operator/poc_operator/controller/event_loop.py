# SPDX-License-Identifier: Apache-2.0
"""What keeps the event loop busy, a little at a time.

With a thousand rounds much is due in the same moment: answers of pods, plans, orders. All of it in one iteration of the
event loop would hold up the Lease, the probes and the stops.
"""

import asyncio
import gc
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

#: What is made of so many shares or pods would hold up the event loop for tens of milliseconds.
MANY = 300
#: Seconds of each iteration of the event loop that computations may take. One takes about a millisecond.
BUDGET_SECONDS = 0.004
#: Polls, and orders, that wait for an answer which may come at any moment. With its answer, a poll takes about half a
#: millisecond and an order a whole one.
MOST_POLLS = 25
MOST_ORDERS = 10
#: After so many seconds a request counts no more as one of them: pods that do not answer must not hold up the others.
FRESH_SECONDS = 0.05

#: Seconds between two searches for garbage among what is new, steps of it between two among what is not quite new, and
#: between two among everything, which takes a second where there are thousands of pods.
GARBAGE_SECONDS = 0.05
OLDER_STEPS = 4
ALL_STEPS = 36_000
#: So many new objects within `OLDER_STEPS` are lists of pods and the plans of rounds that begin, which stay. Looking
#: through those of 5 000 pods takes half a second.
KEPT_OBJECTS = 50_000

T = TypeVar("T")


class Computing:
    """What keeps the event loop busy: for some time at once, or in a thread if it is made of many. One per process.

    Polls of many rounds are answered in the same moment. If all of them planned in one iteration of the event loop, the
    Lease, the probes and the stops would wait until the last one is done. ``clock`` returns seconds of any monotonic
    clock.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting = deque[Callable[[], None]]()

    async def done(self, compute: Callable[[], T], size: int) -> T:
        """Return what is computed of so many shares and pods, after the event loop has looked at all else."""
        if size >= MANY:
            return await asyncio.to_thread(compute)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[T] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._compute)
        self._waiting.append(partial(_settle, found, compute))
        return await found

    def _compute(self) -> None:
        end = self._clock() + BUDGET_SECONDS
        while self._waiting and self._clock() < end:
            self._waiting.popleft()()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._compute)


def _settle(found: "asyncio.Future[T]", compute: Callable[[], T]) -> None:
    """Compute what is still waited for."""
    if found.done():
        return
    try:
        found.set_result(compute())
    except Exception as error:  # it is the waiting task's
        found.set_exception(error)


class FewRequests:
    """At most ``most`` fresh requests of one purpose: polls, or orders, which must not wait for polls."""

    def __init__(self, most: int) -> None:
        self._fresh = asyncio.Semaphore(most)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Begin when few requests are fresh, and be one of them for a moment."""
        await self._fresh.acquire()
        with ExitStack() as fresh:
            fresh.callback(self._fresh.release)
            aged = asyncio.get_running_loop().call_later(FRESH_SECONDS, fresh.close)
            try:
                yield
            finally:
                aged.cancel()


async def collect_garbage() -> None:
    """Search for garbage in small steps, for ever, instead of when so many more objects were made than dropped.

    Turns make and drop about the same number. By that rule the new objects become a hundred thousand before Python
    looks at them, which stops the event loop for up to 0.1 s; docs/benchmarks.md has the figures.
    """
    gc.disable()
    gathered = 0  # new objects since the last search among what is not quite new, less those that were dropped
    for step in itertools.count(1):
        await asyncio.sleep(GARBAGE_SECONDS)
        gathered += gc.get_count()[0]
        if step % ALL_STEPS == 0:
            gc.unfreeze()
            gc.collect()
            gathered = 0
        elif gathered > KEPT_OBJECTS:
            # Large plans make so many, too. Of what is set aside with them, little becomes garbage that only a search
            # can find, and what is older than two searches waits for the next search of everything anyway.
            gc.freeze()
            gathered = 0
        elif step % OLDER_STEPS == 0:
            gc.collect(1)
            gathered = 0
        else:
            gathered -= gc.collect(0)
