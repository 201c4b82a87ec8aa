# SPDX-License-Identifier: Apache-2.0
"""Looks at the ready pods of all fleets now and then: whether they get on, and whether their GPUs fail.

Looks run beside the fleets' turns, a few at a time, so that silent pods hold up nothing. A new process begins anew,
which only delays what is done about a hung pod.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from poc_operator.clients.errors import PodError
from poc_operator.clients.pods.client import ClientOf, base_url
from poc_operator.controller.health import supervised
from poc_operator.fleets.download import PORT, DownloadSeen
from poc_operator.fleets.progress import SERIES, Watched, parse_look, watched
from poc_operator.fleets.stages import GpuErrors
from poc_operator.observed import PodView

#: Seconds between two looks at a pod's progress, and at the errors of its GPUs.
LOOK_SECONDS = 30.0
GPU_SECONDS = 600.0
#: Looks at a time, over all fleets.
AT_ONCE = 20


@dataclass
class _Pod:
    """What is known of one pod. ``asked`` is when its GPUs were asked last."""

    found: Watched | None = None
    gpu_errors: GpuErrors | None = None
    asked: float = float("-inf")


class FleetHealth:
    """What was seen of pods, by their uids. ``clock`` returns seconds of any monotonic clock."""

    def __init__(
        self, clients: ClientOf, clock: Callable[[], float] = time.monotonic, *, strangers: ClientOf | None = None
    ) -> None:
        """``strangers`` has no token; it is for pods that download, without it these are not asked."""
        self._clients = clients
        self._strangers = strangers
        self._clock = clock
        self._fleets: dict[str, dict[str, _Pod]] = {}
        self._looked: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    def see(self, fleet: str, pods: Collection[PodView], port: int) -> None:
        """Begin a look at the pods of a fleet, by its uid, if it is time. Pods that are gone are forgotten."""
        known = self._fleets.setdefault(fleet, {})
        there = {pod.uid for pod in pods if pod.stays}
        for uid in known.keys() - there:
            del known[uid]
        if fleet in self._tasks or self._clock() - self._looked.get(fleet, float("-inf")) < LOOK_SECONDS:
            return
        self._looked[fleet] = self._clock()
        ready = [pod for pod in pods if pod.ready and pod.stays and pod.ip]
        if ready:
            task = supervised(f"the looks at the pods of fleet {fleet}", self._look(known, ready, port), forever=False)
            self._tasks[fleet] = task
            task.add_done_callback(lambda _: self._tasks.pop(fleet, None))

    def forget(self, fleet: str) -> None:
        """Forget the pods of a fleet that is gone."""
        if fleet in self._tasks:
            self._tasks[fleet].cancel()
        for memory in (self._fleets, self._looked):
            memory.pop(fleet, None)

    def found(self, fleet: str) -> Mapping[str, Watched]:
        """Return what was seen of the engines of a fleet's pods."""
        return {uid: pod.found for uid, pod in self._fleets.get(fleet, {}).items() if pod.found is not None}

    def gpu_errors(self, fleet: str) -> Mapping[str, GpuErrors]:
        """Return the errors of the pods' GPUs, as far as they are known."""
        known = self._fleets.get(fleet, {}).items()
        return {uid: pod.gpu_errors for uid, pod in known if pod.gpu_errors is not None}

    async def download_seen(self, pods: Sequence[PodView]) -> DownloadSeen:
        """Return what is seen of the pods of a download."""
        running = next((pod for pod in pods if pod.stays and pod.ip and pod.ready), None)
        if running is None or self._strangers is None:
            return DownloadSeen(pods=pods)
        try:
            client = await self._strangers.of(running.namespace)
            return DownloadSeen(pods=pods, percent=await client.download_percent(running.ip or "", PORT))
        except PodError:  # it has just begun, or nobody may reach it
            return DownloadSeen(pods=pods)

    async def stop(self) -> None:
        """End all looks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, known: dict[str, _Pod], pods: Collection[PodView], port: int) -> None:
        looks = (self._look_at(known.setdefault(pod.uid, _Pod()), pod, pod.serving_port(port)) for pod in pods)
        await asyncio.gather(*looks)

    async def _look_at(self, known: _Pod, pod: PodView, port: int) -> None:
        base = base_url(pod.ip or "", port)
        async with self._slots:
            try:
                client = await self._clients.of(pod.namespace)
                text = await client.metrics(base, SERIES)
            except PodError:
                known.found = watched(known.found, None)
                return
            known.found = watched(known.found, parse_look(text, at=self._clock(), server=pod.server(port)))
            if self._clock() - known.asked < GPU_SECONDS:
                return
            known.asked = self._clock()
            try:
                devices = (await client.gpus(base)).devices
            except PodError:
                return
        known.gpu_errors = GpuErrors.of(devices)
