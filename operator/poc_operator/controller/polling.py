# SPDX-License-Identifier: Apache-2.0
"""Polls of pods, for the loops of all objects.

A turn waits for every pod that may answer. One whose last poll had no answer in time is asked beside the turns, and no
turn waits for it: a hung pod would make every turn as long as its time limit, and a round's end takes several turns::

    polled by each turn ── no answer in time ──> silent: its last error is its report
         ^                                            │
         └───── it answers or refuses, or changes ────┘
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import PodError, PodTimeout
from poc_operator.clients.pods.client import PodClient, base_url
from poc_operator.clients.pods.reference_pods import ReferenceStatus, as_ours
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.snapshot import Work
from vllm_poc.wire.answers import StatusResponse

#: Polls in flight at once; a poll is cheap, 1 000 pods take about a second. Up to so many pods that do not answer
#: make a poll no longer than one of them does.
_CONCURRENCY = 500
#: Silent pods that are asked at once: they must leave the client's connections to the others.
_PROBES = 50
#: A silent pod that no turn has asked for since so many seconds is forgotten.
MEMORY_SECONDS = 60.0

PollFailed = Callable[[PodError], None]


@dataclass
class _Silent:
    """A pod that did not answer, with the poll of it that is under way. The poll's result is its error, if any."""

    pod: PodView
    error: PodError
    probe: asyncio.Task[PodError | None]
    asked: float


class PodPoller:
    """Asks pods for their status. One per process. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, client: PodClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._silent: dict[tuple[str, int], _Silent] = {}  # by uid and port
        self._probes = asyncio.Semaphore(_PROBES)

    async def poll(self, pods: Iterable[PodView], work: Work, failed: PollFailed) -> dict[str, PodReport]:
        """Ask every pod that has an address for its status. Pods that do not answer yield their error.

        ``failed`` is called for each poll that has failed by now.
        """
        self._forget()
        limit, port = asyncio.Semaphore(_CONCURRENCY), work.spec.port

        async def ask(pod: PodView, ip: str) -> tuple[str, PodReport]:
            silent = self._error_of_silent(pod, ip, port, failed)
            if silent is not None:
                return pod.uid, PodReport(error=str(silent))
            async with limit:
                try:
                    answer = await self._client.status(base_url(ip, port))
                    return pod.uid, _report(answer, pod, work)
                except PodError as error:
                    failed(error)
                    if isinstance(error, PodTimeout):
                        self._silence(pod, ip, port, error)
                    return pod.uid, PodReport(error=str(error))

        asks = [ask(pod, pod.ip) for pod in pods if pod.ip and not pod.gone]
        return dict(await asyncio.gather(*asks))

    async def close(self) -> None:
        """Give up what is under way."""
        probes = [one.probe for one in self._silent.values()]
        self._silent.clear()
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def _error_of_silent(self, pod: PodView, ip: str, port: int, failed: PollFailed) -> PodError | None:
        """Return why a silent pod has no report; None if the pod is to be polled."""
        known = self._silent.get((pod.uid, port))
        if known is None:
            return None
        known.asked = self._clock()
        if known.pod == pod and not known.probe.done():
            return known.error
        error = known.probe.result() if known.probe.done() else None
        if known.pod == pod and isinstance(error, PodTimeout):
            failed(error)
            self._silence(pod, ip, port, error)
            return error
        # What it answered may be older than what it was told since: it is asked again.
        known.probe.cancel()
        del self._silent[pod.uid, port]
        return None

    def _silence(self, pod: PodView, ip: str, port: int, error: PodError) -> None:
        probe = asyncio.create_task(self._probe(base_url(ip, port)))
        self._silent[pod.uid, port] = _Silent(pod, error, probe, self._clock())

    async def _probe(self, base: str) -> PodError | None:
        async with self._probes:
            try:
                await self._client.status(base)
            except PodError as error:
                return error
            return None

    def _forget(self) -> None:
        oldest = self._clock() - MEMORY_SECONDS
        for key, one in list(self._silent.items()):
            if one.asked < oldest:
                one.probe.cancel()
                del self._silent[key]


def _report(answer: StatusResponse | ReferenceStatus, pod: PodView, work: Work) -> PodReport:
    if isinstance(answer, StatusResponse):
        return PodReport(status=answer)
    round_ = work if isinstance(work, PoCRound) else None
    return PodReport(status=as_ours(answer, pod, work.spec.port, round_), resumes=False)
