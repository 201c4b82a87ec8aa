# SPDX-License-Identifier: Apache-2.0
"""One life of a pod's server process: from the start of its container to its end."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from tests.simulation.engine import RecordingEngine, Work
from tests.support.servers.pod import Pod, lifespan
from vllm_poc.wire.messages import API_PREFIX


@dataclass(frozen=True)
class Poll:
    """What the pod told at ``time`` when it was asked for its status."""

    time: float
    session_id: str
    round_id: str | None
    slot: tuple[int, int] | None  # node and group
    next: int
    delivered: int


class PodServer(Protocol):
    """What a simulated pod's container runs. ``work`` are its batches, ``polls`` what it told."""

    pod: str
    born: float
    died: float | None

    @property
    def work(self) -> Sequence[Work]: ...
    @property
    def polls(self) -> Sequence[Poll]: ...
    async def start(self) -> None: ...
    async def kill(self) -> None: ...
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Session:
    """The real application of a pod over a fake engine. Its state dies with it."""

    def __init__(self, pod: str, seconds_per_batch: float) -> None:
        self.pod = pod
        self.engine = RecordingEngine(seconds_per_batch)
        self.polls: list[Poll] = []
        self.born = monotonic()
        self.died: float | None = None
        self._server = Pod()
        self._server.engine = self.engine
        self._server.become_ready()
        self._life = lifespan(self._server.app)
        self._requests: set[asyncio.Task[None]] = set()

    @property
    def work(self) -> Sequence[Work]:
        """The batches that it began, in their order."""
        return self.engine.work

    async def start(self) -> None:
        """Begin to live, with everything made that the first request would have to wait for."""
        await self._life.__aenter__()
        await self._server.status()

    async def kill(self) -> None:
        """Die at once: what was computed and not delivered is lost."""
        self.died = monotonic()
        for request in self._requests:
            request.cancel()
        await self._life.__aexit__(None, None, None)
        await self._server.http.aclose()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        is_poll = scope["path"] == f"{API_PREFIX}/status"
        try:
            await self._server.app(scope, receive, self._noting(send) if is_poll else send)
        except asyncio.CancelledError:
            if self.died is None:
                raise
        finally:
            self._requests.discard(task)

    def _noting(self, send: Send) -> Send:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                self.polls.append(_poll(message["body"]))
            await send(message)

        return noting


def _poll(body: bytes) -> Poll:
    status = json.loads(body)
    config = status["config"]
    return Poll(
        time=monotonic(),
        session_id=status["session_id"],
        round_id=status["round_id"],
        slot=(config["node_id"], config["group_id"]) if config is not None else None,
        next=status["next_index"],
        delivered=status["delivered_index"],
    )
