# SPDX-License-Identifier: Apache-2.0
"""The simulated kubelet lets a deleted pod compute for its grace period, as a real one may."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubernetes.aio import client

from tests.simulation import kubelet as module
from tests.simulation.kubelet import Kubelet
from tests.simulation.server import FleetServer
from tests.simulation.session import Session

UID = "u"


class Core:
    """The pods of an API server: a list that is empty, and a watch that tells what a test puts in."""

    def __init__(self) -> None:
        self.events = asyncio.Queue[dict[str, Any]]()

    async def list_namespaced_pod_without_preload_content(self, *_: object, **options: object) -> object:
        """List or watch."""
        if options.get("watch"):
            return SimpleNamespace(content=self._watch())
        return SimpleNamespace(status=200, json=self._listed)

    async def _listed(self) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": []}

    async def _watch(self) -> AsyncIterator[bytes]:
        while True:
            yield json.dumps(await self.events.get()).encode()

    def tell(self, kind: str, **metadata: object) -> None:
        """Tell of the only pod."""
        body = {
            "metadata": {"name": "a", "namespace": "ns", "uid": UID, **metadata},
            "status": {"podIP": "127.1.0.9", "conditions": [{"type": "Ready", "status": "True"}]},
        }
        self.events.put_nowait({"type": kind, "object": body})


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Core, Kubelet]]:
    core = Core()
    kubelet = Kubelet(cast(client.CoreV1Api, core), "ns", FleetServer(), 0.01)
    following = asyncio.create_task(kubelet.run())
    core.tell("ADDED")
    await lives(kubelet, True)
    yield core, kubelet
    following.cancel()
    await asyncio.wait([following])
    await kubelet.end()


async def lives(kubelet: Kubelet, expected: bool) -> None:
    deadline = monotonic() + 20
    while (kubelet.session_of(UID) is not None) is not expected:
        assert monotonic() < deadline
        await asyncio.sleep(0.01)


def deleted(core: Core, grace: int) -> None:
    core.tell("MODIFIED", deletionTimestamp="2026-01-01T12:00:00Z", deletionGracePeriodSeconds=grace)


async def test_a_deleted_pod_computes_on_for_its_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KILL_EARLIER_SECONDS", 0.2)
    async with running() as (core, kubelet):
        begin = monotonic()
        deleted(core, 1)
        deleted(core, 1)
        await lives(kubelet, False)
        assert 0.8 <= monotonic() - begin < 10
        core.tell("DELETED")


async def test_it_ends_at_once_when_its_object_is_gone() -> None:
    async with running() as (core, kubelet):
        deleted(core, 3600)
        await asyncio.sleep(0.1)
        assert kubelet.session_of(UID) is not None
        core.tell("DELETED")
        await lives(kubelet, False)


async def test_its_server_is_not_started_again_once_it_has_ended() -> None:
    async with running() as (core, kubelet):
        restart = asyncio.create_task(kubelet.restart(UID, 0.2))
        await lives(kubelet, False)
        deleted(core, 3600)
        await restart
        assert kubelet.session_of(UID) is None


async def test_a_server_that_is_being_killed_dies_although_its_object_goes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is half killed is not reached any more, and computes for ever."""
    dead, kill = asyncio.Event(), Session.kill

    async def slowly(session: Session) -> None:
        await asyncio.sleep(0.3)
        await kill(session)
        dead.set()

    monkeypatch.setattr(Session, "kill", slowly)
    async with running() as (core, kubelet):
        deleted(core, 0)
        await lives(kubelet, False)
        core.tell("DELETED")
        async with asyncio.timeout(20):
            await dead.wait()
