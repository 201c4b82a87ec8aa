# SPDX-License-Identifier: Apache-2.0
"""Named nonces, given out to the pods that are free: first come first served, each pod a chunk at a time.

A pod that fails gives its chunk back, and rests; the next free pod takes it. Pods that generate a round compute
named nonces beside it. While no pod answers, work waits.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from poc_gateway.network.chunks import request_of, values_of
from poc_gateway.network.cluster import Backend, Backends
from poc_gateway.network.work import Work
from poc_operator.clients.errors import NotAPodOfOurs, PodError, StoreError
from poc_operator.observed.pods import PodView
from vllm_poc.wire.generate import GenerateRequest

_log = logging.getLogger(__name__)

#: Seconds between two looks at the pods while work waits.
LOOK_SECONDS = 2.0
#: Seconds that a pod gets nothing after it failed.
REST_SECONDS = 5.0


class Dispatcher:
    """Splits all work over the pods; `run` must be running."""

    def __init__(self, backends: Backends, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._backends = backends
        self._look_seconds = look_seconds
        self._works: list[Work] = []
        self._busy: dict[str, asyncio.Task[None]] = {}  # by pod uid
        self._resting: dict[str, float] = {}
        self._free: Sequence[Backend] = ()
        self._looked = float("-inf")
        self._wake = asyncio.Event()

    @property
    def nonces(self) -> int:
        """The nonces of all requests that are not done."""
        return sum(len(work.request.nonces) for work in self._works)

    def add(self, request: GenerateRequest) -> Work:
        """Queue a request, behind those that are there."""
        work = Work(request, asyncio.get_running_loop().create_future(), deque(request.nonces))
        self._works.append(work)
        self._wake.set()
        return work

    async def finish(self, work: Work) -> dict[int, Any]:
        """Wait for the work's values; dropped if the waiting is cancelled. RefusalError if it fails."""
        try:
            await work.done
            return work.values
        finally:
            self.drop(work)

    def drop(self, work: Work) -> None:
        """Forget the work; pods that compute some of it are told so."""
        work.done.cancel()
        self._works.remove(work)

    async def run(self) -> None:
        """Give out work until cancelled; then the pods drop what they compute."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._give_out()
                except Exception:
                    # Work that waits must outlive whatever one look at the pods runs into.
                    _log.exception("work for the pods could not be given out, and is tried again")
                # Without work only new work matters; with work also pods that become free elsewhere.
                limit = self._look_seconds if self._next() is not None else None
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit):
                        await self._wake.wait()
        finally:
            tasks = list(self._busy.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _next(self) -> Work | None:
        return next((work for work in self._works if work.waiting and not work.done.done()), None)

    async def _give_out(self) -> None:
        if self._next() is None:
            return
        await self._look()
        free = [found.pod for found in self._free if self._may_work(found.pod.uid)]
        for pod in free:
            work = self._next()
            if work is None:
                return
            nonces = work.take(len(self._free))
            self._busy[pod.uid] = asyncio.create_task(self._compute(work, pod, nonces))

    def _may_work(self, uid: str) -> bool:
        return uid not in self._busy and self._resting.get(uid, 0.0) <= monotonic()

    async def _look(self) -> None:
        """See which pods answer, unless that was seen just now; idle ones come first."""
        if monotonic() - self._looked < self._look_seconds:
            return
        try:
            found = await self._backends.poll()
        except StoreError as error:
            _log.warning("pods cannot be listed, work goes to those that are known: %s", error)
            return
        self._looked = monotonic()
        self._free = sorted((one for one in found if one.computes_named_nonces), key=lambda one: not one.idle)
        self._resting = {uid: until for uid, until in self._resting.items() if until > monotonic()}

    async def _compute(self, work: Work, pod: PodView, nonces: list[int]) -> None:
        asked = asyncio.ensure_future(self._backends.generate(pod, request_of(work.request, nonces)))
        try:
            # Nobody waits for work that is over: its client went away, or another chunk failed for good.
            either: list[asyncio.Future[Any]] = [asked, work.done]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                work.put(values_of(work.request, nonces, asked.result()))
        except PodError as error:
            self._failed(work, pod, nonces, error)
        except ValueError as error:
            self._failed(work, pod, nonces, NotAPodOfOurs(str(error)))
        finally:
            asked.cancel()
            del self._busy[pod.uid]
            self._wake.set()

    def _failed(self, work: Work, pod: PodView, nonces: list[int], error: PodError) -> None:
        _log.warning("pod %s did not compute %d nonces: %s", pod.name, len(nonces), error)
        self._resting[pod.uid] = monotonic() + REST_SECONDS
        work.give_back(nonces, error)
