# SPDX-License-Identifier: Apache-2.0
"""What the kubelet does for simulated pods: it runs their containers and tells the API server about them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from poc_operator.observed import PodView
from tests.simulation.manifests import pod_status
from tests.simulation.server import FleetServer
from tests.simulation.session import PodServer, Session

REQUEST_SECONDS = 5.0
#: A watch is begun anew so often; a broken one is not noticed for longer.
WATCH_SECONDS = 30
PAUSE_SECONDS = 0.2
#: The server is dead before the object of its pod is gone: a kubelet confirms the end.
KILL_EARLIER_SECONDS = 0.5
_TROUBLE = (ApiException, aiohttp.ClientError, TimeoutError, OSError)


@dataclass
class Container:
    """The one container of a pod, and its present life."""

    pod: PodView
    restarts: int = 0
    session: PodServer | None = None
    #: Whether it is being deleted: its server is not started any more.
    terminating: bool = False
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class Kubelet:
    """Runs a session for each pod of a namespace that has an address."""

    def __init__(
        self,
        core: client.CoreV1Api,
        namespace: str,
        server: FleetServer,
        seconds_per_batch: float,
        pod_server: Callable[[str, float], PodServer] = Session,
    ) -> None:
        self._core = core
        self._namespace = namespace
        self._server = server
        self._seconds_per_batch = seconds_per_batch
        self._pod_server = pod_server
        self._containers: dict[str, Container] = {}  # by pod uid
        self._untold: set[str] = set()  # pod uids whose status the API server does not know yet
        #: When the API server learnt last that a pod is Ready after a restart, by pod uid.
        self.told_ready: dict[str, float] = {}
        self._grace: dict[str, asyncio.Task[None]] = {}  # of pods that are being deleted, by uid
        self._killing: dict[str, asyncio.Task[None]] = {}  # those whose grace period is over
        #: Every session that ever lived, in the order of birth.
        self.sessions: list[PodServer] = []

    @property
    def pods(self) -> list[PodView]:
        """The pods that serve, by name."""
        serving = (container.pod for container in self._containers.values() if container.session is not None)
        return sorted(serving, key=lambda pod: pod.name)

    def session_of(self, uid: str) -> PodServer | None:
        """Return the session that serves in the pod."""
        container = self._containers.get(uid)
        return container.session if container is not None else None

    async def run(self) -> None:
        """Follow the pods for ever. Without the API server they go on as they are."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._tell())

    async def restart(self, uid: str, seconds: float) -> None:
        """Kill the pod's server; another one serves after ``seconds``, if the pod is there by then."""
        container = self._containers.get(uid)
        if container is None:
            return
        async with container.busy:
            await self._kill(container)
            container.restarts += 1
            self.told_ready.pop(uid, None)
            self._untold.add(uid)
        await asyncio.sleep(seconds)
        async with container.busy:
            if uid in self._containers and not container.terminating:
                await self._start(container)
                self._untold.add(uid)

    async def switch_off(self, uids: Iterable[str]) -> None:
        """Kill the servers of pods for good; nobody tells the API server."""
        for uid in uids:
            container = self._containers[uid]
            async with container.busy:
                await self._kill(container)

    async def end(self) -> None:
        """Kill all pods."""
        for uid in list(self._containers):
            await self._remove(uid)

    async def _follow(self) -> None:
        while True:
            try:
                async for kind, body in self._changes():
                    await self._changed(kind, body)
            except _TROUBLE:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _changes(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield what there is, then what changes; ends when the API server ends the watch."""
        listed = await self._get()
        version = listed["metadata"]["resourceVersion"]
        known = {body["metadata"]["uid"] for body in listed["items"]}
        for uid in self._containers.keys() - known:
            await self._remove(uid)
        for body in listed["items"]:
            yield "ADDED", body
        watch: Any = await self._core.list_namespaced_pod_without_preload_content(
            self._namespace,
            watch=True,
            resource_version=version,
            timeout_seconds=WATCH_SECONDS,
            _request_timeout=WATCH_SECONDS + REQUEST_SECONDS,
        )
        async for line in watch.content:
            event = json.loads(line)
            if event["type"] == "ERROR":
                return
            yield event["type"], event["object"]

    async def _get(self) -> Any:  # noqa: ANN401 - the API server's JSON
        answer: Any = await self._core.list_namespaced_pod_without_preload_content(
            self._namespace, _request_timeout=REQUEST_SECONDS
        )
        if answer.status != 200:
            raise ApiException(status=answer.status)
        return await answer.json()

    async def _changed(self, kind: str, body: dict[str, Any]) -> None:
        pod = PodView.parse(body)
        if kind == "DELETED" or pod.gone:
            await self._remove(pod.uid)
        elif pod.terminating:
            self._terminate(pod.uid, body["metadata"].get("deletionGracePeriodSeconds", 0))
        elif pod.uid not in self._containers and pod.ip and pod.ready:
            container = self._containers[pod.uid] = Container(pod)
            async with container.busy:
                await self._start(container)
        elif pod.uid in self._containers and pod.ready != (self._containers[pod.uid].session is not None):
            self._untold.add(pod.uid)

    def _terminate(self, uid: str, grace: float) -> None:
        """Kill the pod's server at the end of its grace period, which it uses up: until then it computes."""
        container = self._containers.get(uid)
        if container is not None and not container.terminating:
            container.terminating = True
            self._grace[uid] = asyncio.create_task(self._kill_later(uid, max(0.0, grace - KILL_EARLIER_SECONDS)))

    async def _kill_later(self, uid: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        # From here on nobody cancels it: a session that is half killed would compute for ever.
        self._killing[uid] = self._grace.pop(uid)
        try:
            if (container := self._containers.get(uid)) is not None:
                async with container.busy:
                    await self._kill(container)
        finally:
            del self._killing[uid]

    async def _start(self, container: Container) -> None:
        session = self._pod_server(container.pod.name, self._seconds_per_batch)
        await self._server.open(container.pod.ip or "", session)
        container.session = session
        self.sessions.append(session)

    async def _kill(self, container: Container) -> None:
        session, container.session = container.session, None
        if session is not None:
            await self._server.kill(container.pod.ip or "", session)

    async def _remove(self, uid: str) -> None:
        if (grace := self._grace.pop(uid, None)) is not None:
            grace.cancel()
        container = self._containers.pop(uid, None)
        if container is not None:
            async with container.busy:
                await self._kill(container)

    async def _tell(self) -> None:
        while True:
            for uid in list(self._untold):
                try:
                    await self._tell_one(uid)
                except _TROUBLE:
                    continue
            await asyncio.sleep(PAUSE_SECONDS)

    async def _tell_one(self, uid: str) -> None:
        self._untold.discard(uid)
        container = self._containers.get(uid)
        if container is None:
            return
        ready = container.session is not None
        status = pod_status(uid, container.restarts, ready=ready)
        try:
            await self._core.patch_namespaced_pod_status(
                container.pod.name,
                self._namespace,
                {"metadata": {"uid": uid}, "status": status},
                _request_timeout=REQUEST_SECONDS,
                _content_type="application/strategic-merge-patch+json",
            )
        except _TROUBLE as error:
            if not (isinstance(error, ApiException) and error.status in (404, 409)):
                self._untold.add(uid)
            raise
        if ready and container.restarts:
            self.told_ready[uid] = monotonic()
