# SPDX-License-Identifier: Apache-2.0
"""Whether the process works: what only another process can heal, and background tasks that must not die unseen.

A process that goes on without one of its tasks would only look alive. So a task that fails ends the process, with its
name in the log, and so does one that ends although it is to run for ever. Kubernetes starts another process, which
adopts what runs.

A watch can break without an error. What a list shows and the watch has not told by the next list, a minute later, was
missed: the watch is stale. docs/develop/decisions has the page on it.

Health and metrics are served on all addresses of the pod: a cluster may have IPv4, IPv6 or both, and kopf's own probe
knows one of them.
"""

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.clients.kube.objects import ObjectStore, is_gone
from poc_operator.controller.observing import PodCache
from poc_operator.controller.untold_pods import FEW
from poc_operator.observed import PodView
from poc_operator.planning.reaping import WorkRecord
from poc_operator.planning.snapshot import Work

log = logging.getLogger(__name__)

Answer = Callable[[], web.Response]
#: Returns what only a new process can heal.
Findings = Callable[[], Sequence[str]]


def supervised(name: str, work: Coroutine[Any, Any, None], *, forever: bool = True) -> "asyncio.Task[None]":
    """Run it as a task whose failure ends the process, and whose end does too if it is to run ``forever``."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(partial(_ended, name, forever))
    return task


def _ended(name: str, forever: bool, task: "asyncio.Task[None]") -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is None and not forever:
        return
    log.critical("%s has ended unexpectedly: ending the process, so that another one takes over", name, exc_info=error)
    logging.shutdown()
    os._exit(1)


@asynccontextmanager
async def serve_health(findings: Findings, port: int, *, host: str | None = None) -> AsyncIterator[None]:
    """Serve ``GET /healthz`` until the block ends: 200, or 503 with the findings. OSError as from `served`."""

    def answer() -> web.Response:
        found = findings()
        status = HTTPStatus.SERVICE_UNAVAILABLE if found else HTTPStatus.OK
        return web.Response(status=status, text="\n".join(found) or "ok")

    async with served("/healthz", answer, host, port):
        yield


@asynccontextmanager
async def served(path: str, answer: Answer, host: str | None, port: int) -> AsyncIterator[None]:
    """Serve one path on an address, or on all, until the block ends. OSError if the port is taken."""

    async def handle(_: web.Request) -> web.Response:
        return answer()

    app = web.Application()
    app.router.add_get(path, handle)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


#: Seconds between two lists; a missed change is found after one to two of them.
CHECK_SECONDS = 60.0


class StaleWatchCheck:
    """Compares lists with what the watches told. ``reconciled`` returns the uids of the objects that have a loop.

    ``fleets`` returns namespace and selector of the pods of each fleet, which keeps them also while no object has work
    for them.
    """

    def __init__(
        self,
        store: ObjectStore,
        kinds: Iterable[type[Work]],
        pods: PodCache,
        reconciled: Callable[[], Collection[str]],
        gone: Callable[[PodView], None],
        fleets: Callable[[], Iterable[tuple[str, LabelSelector]]],
    ) -> None:
        """``gone`` is told of each pod that the watch still has and that does not exist any more."""
        self._store = store
        self._kinds = tuple(kinds)
        self._pods = pods
        self._reconciled = reconciled
        self._gone = gone
        self._fleets = fleets
        self._differences: set[Hashable] = set()
        #: What the watches have missed; empty while they work.
        self.missed: list[str] = []

    async def check(self, namespaces: Collection[str]) -> None:
        """List and compare; without ``namespaces`` everywhere. StoreError if the API server does not answer."""
        found, selected = dict[Hashable, str](), defaultdict[str, dict[str, LabelSelector]](dict)
        for kind in self._kinds:
            for body in await self._store.list_bodies(kind, namespaces):
                work = WorkRecord.parse(body)  # which takes a tenth of the time that the object would
                if not work.finished and "deletionTimestamp" not in body["metadata"]:
                    found |= self._loop_of(kind, work)
                    selected[work.namespace][str(work.selector)] = work.selector  # many rounds may select the same pods
        for namespace, selector in self._fleets():
            selected[namespace][str(selector)] = selector
        for namespace, selectors in selected.items():
            found |= await self._pods_of(namespace, list(selectors.values()))
        self.missed = [text for difference, text in found.items() if difference in self._differences]
        self._differences = set(found)

    def _loop_of(self, kind: type[Work], work: WorkRecord) -> dict[Hashable, str]:
        text = f"{kind.KIND.kind} {work.namespace}/{work.name} is not reconciled"
        return {} if work.uid in self._reconciled() else {work.uid: text}

    async def _pods_of(self, namespace: str, selectors: Sequence[LabelSelector]) -> dict[Hashable, str]:
        listed = {pod.uid: pod for pod in await self._forget_vanished(namespace, selectors)}
        told = self._told(namespace, selectors)
        names = {uid: pod.name for uid, pod in (told | listed).items()}
        # A pod that was told of anew since the last check is no missed one: the difference is another.
        return {
            (uid, repr(told.get(uid))): f"pod {namespace}/{name} is not what the watch told"
            for uid, name in names.items()
            if listed.get(uid) != told.get(uid)
        }

    def _told(self, namespace: str, selectors: Iterable[LabelSelector]) -> dict[str, PodView]:
        return {pod.uid: pod for selector in selectors for pod in self._pods.selected(namespace, selector)}

    async def _forget_vanished(self, namespace: str, selectors: Sequence[LabelSelector]) -> list[PodView]:
        """Return the pods that are selected. Tell of those that have vanished while the watch was away.

        A watch that has expired begins with a list anew, which has no word of what was deleted meanwhile. A pod that
        the watch had told of before the list began, and that is not in it, was relabelled or does not exist any more.
        """
        told = self._told(namespace, selectors)
        before = [pod for pod in told.values() if not pod.gone]
        listed = await self._list(namespace, selectors, told)
        uids = {pod.uid for pod in listed}
        for pod in before:
            if pod.uid in uids or not self._pods.knows(pod.uid):
                continue
            if await is_gone(self._store, pod):
                self._gone(pod)
        return listed

    async def _list(
        self, namespace: str, selectors: Sequence[LabelSelector], told: Mapping[str, PodView]
    ) -> list[PodView]:
        """Return the pods that are selected: of few selectors by a list each, for which the API server looks at all."""
        if len(selectors) <= FEW:
            lists = [await self._store.list_pods(namespace, selector) for selector in selectors]
            return list({pod.uid: pod for found in lists for pod in found}.values())
        found = list[PodView]()
        for pod in await self._store.list_pods(namespace, LabelSelector()):
            # A pod that is as it was told of is found by its labels, without a look at each selector.
            known = told.get(pod.uid)
            if (known is not None and known.labels == pod.labels) or any(one.matches(pod.labels) for one in selectors):
                found.append(pod)
        return found
