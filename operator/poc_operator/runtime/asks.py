# SPDX-License-Identifier: Apache-2.0
"""Named nonces that pods are asked for, beside everything else that a round does with them."""

import asyncio
from collections.abc import Iterable

from poc_operator.model.pods import Answer
from poc_operator.plan.snapshot import AskPod
from poc_operator.podapi.client import PodClient, base_url
from poc_operator.podapi.errors import PodError

_Key = tuple[str, str]  # pod uid, key of the ask


class PodAsks:
    """What one round asks its pods. ``wake`` is set when one has a result."""

    def __init__(self, *, client: PodClient, wake: asyncio.Event) -> None:
        self._client = client
        self._wake = wake
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._answers: dict[str, Answer] = {}  # the last one of each pod, by uid

    def keep(self, port: int, asks: Iterable[AskPod]) -> None:
        """Ask these, once each, and cancel all others."""
        wanted = {(ask.pod.uid, ask.key): ask for ask in asks}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
        for key in wanted.keys() - self._tasks.keys():
            self._tasks[key] = asyncio.create_task(self._ask(port, wanted[key]))

    async def cancel(self) -> None:
        """Cancel all; the pods drop the work."""
        tasks = list(self._tasks.values())
        self.keep(0, ())
        await asyncio.gather(*tasks, return_exceptions=True)

    def answer_of(self, uid: str) -> Answer | None:
        """Return the pod's last answer."""
        return self._answers.get(uid)

    async def _ask(self, port: int, ask: AskPod) -> None:
        try:
            result = await self._client.generate(base_url(ask.pod.ip or "", port), ask.request)
        except PodError as error:
            # No news: the next look is early enough, so that tries have a pause between them.
            self._answers[ask.pod.uid] = Answer(key=ask.key, error=str(error))
        else:
            self._answers[ask.pod.uid] = Answer(key=ask.key, result=result)
            self._wake.set()
