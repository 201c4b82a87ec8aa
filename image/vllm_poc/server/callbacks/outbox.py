# SPDX-License-Identifier: Apache-2.0
"""Callbacks outside of rounds: results of queued work, and verdicts."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from vllm_poc.logs import get_logger
from vllm_poc.server import metrics
from vllm_poc.server.callbacks.delivery import Load, Poster, load_of
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.settings import Settings
from vllm_poc.wire.generate import CallbackState
from vllm_poc.wire.messages import WireMessage

_log = get_logger(__name__)

T = TypeVar("T")


@dataclass
class TrackedCallback:
    """Where a delivery to one address stands."""

    poster: Poster[Any]
    state: CallbackState = "pending"

    @property
    def error(self) -> str | None:
        """What the receiver last answered while it accepts nothing, or why it refused an item for good."""
        return self.poster.error or self.poster.refusal


class Outbox:
    """Sends callbacks side by side, so that a receiver that is down holds up no other.

    A callback is tried for as long as a queued result is kept, then given up, logged and counted.
    """

    def __init__(self, session: aiohttp.ClientSession, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.lost = 0
        self._session = session
        self._settings = settings
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], TrackedCallback] = {}
        self._load = Load()
        self._hurried = False
        self._changed = asyncio.Condition()

    @property
    def pending(self) -> int:
        """How many callbacks are on their way."""
        return len(self._tasks)

    async def wait_for_capacity(self) -> None:
        """Wait while too many results are on their way: work is held back, nothing is dropped."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._hurried or not self._load.is_full(self._settings))

    def send(self, url: str, items: Sequence[T], payload: Callable[[Sequence[T]], WireMessage]) -> TrackedCallback:
        """Send ``items`` to ``url``, in order; ``payload`` makes the body of some of them."""
        callback = TrackedCallback(
            Poster(url, payload, session=self._session, settings=self._settings, clock=self._clock)
        )
        if self._hurried:
            callback.poster.hurry()
        load = load_of(items)
        self._load += load
        task = asyncio.create_task(self._deliver(callback, items, load))
        self._tasks[task] = callback
        task.add_done_callback(self._tasks.pop)
        return callback

    async def hurry(self) -> None:
        """Deliver as soon as can be, and let nobody wait for room."""
        for callback in self._tasks.values():
            callback.poster.hurry()
        async with self._changed:
            self._hurried = True
            self._changed.notify_all()

    async def drained(self) -> None:
        """Wait until nothing is on its way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Give up what is on its way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, callback: TrackedCallback, items: Sequence[Any], load: Load) -> None:
        try:
            async with self._clock.timeout(self._settings.result_seconds):
                accepted = [accepted async for accepted in callback.poster.deliver(items)]
            callback.state = "delivered" if all(accepted) else "rejected"
        except TimeoutError:
            callback.state = "given up"
        except Exception as error:  # a defect must not look as if there were hope
            callback.state, callback.poster.refusal = "given up", f"{type(error).__name__}: {error}"
            _log.exception("a callback could not be sent")
        finally:
            self._count(callback)
            async with self._changed:
                self._load -= load
                self._changed.notify_all()

    def _count(self, callback: TrackedCallback) -> None:
        if callback.state != "delivered":
            self.lost += 1
            metrics.CALLBACKS_LOST.labels().inc()
            _log.error("a callback was not delivered (%s): %s", callback.state, callback.error)
