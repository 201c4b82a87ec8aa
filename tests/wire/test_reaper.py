# SPDX-License-Identifier: Apache-2.0
"""A pod that was silent when its round went, and computes on, is stopped once it is heard of again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from starlette.types import Receive, Scope, Send

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller import reaper, reconciler
from poc_operator.controller.kinds import RoundPlanner
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.manager import Manager
from poc_operator.observed import Container
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.fleet import AsgiApp, MemoryStore, small
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import Pod, running_pod
from tests.unit.poc_operator.build import UID, a_pod, a_round, newborn
from vllm_poc.wire.answers import PowState

HOSTS = ("127.0.0.1", "127.0.0.2")


class Cluster:
    """One round in memory, two pods over HTTP of which the second can be silenced, and operators one after another."""

    def __init__(self, stack: AsyncExitStack, receiver: CallbackReceiver) -> None:
        self._stack = stack
        self._port = free_port()
        fields = {"rTarget": None, "callbackURL": receiver.url, "stop": None}
        self.store = MemoryStore(newborn(a_round(**small(self._port) | fields)))
        self.pods: list[Pod] = []
        self.silent = False

    async def open(self) -> None:
        """Start the pods."""
        for host in HOSTS:
            pod = await self._stack.enter_async_context(running_pod())
            await self._stack.enter_async_context(serve(self._heard(pod.app, host), host, self._port))
            self.pods.append(pod)

    def _heard(self, app: AsgiApp, host: str) -> AsgiApp:
        async def face(scope: Scope, receive: Receive, send: Send) -> None:
            if self.silent and host == HOSTS[1]:
                await asyncio.Event().wait()
            await app(scope, receive, send)

        return face

    async def operator(self) -> Manager:
        """Start another operator process, as it were."""
        lease = cast(LeaderElection, SimpleNamespace(held=True, uid="lease-uid", close=AsyncMock()))
        made = Manager(cast(ObjectStore, self.store), lease, PodClient(), reaper_clients=PodClient())
        await made.identify()
        for host in HOSTS:
            served = Container(id="vllm", ports=frozenset({self._port}))
            made.pod_changed(a_pod(f"pod-{host}", ip=host, containers=(served,)))
        self.tell(made)
        sweeps = asyncio.create_task(made.reaper.run())
        self._stack.push_async_callback(made.close)
        self._stack.callback(sweeps.cancel)
        return made

    def tell(self, operator: Manager) -> None:
        """Let the watch tell of the round as it is."""
        if self.store.work is None:
            operator.work_deleted(UID)
        else:
            body = self.store.work.model_dump(mode="json", by_alias=True, exclude_none=True)
            operator.work_changed(RoundPlanner, body, lambda _: None)

    def delete(self, operator: Manager) -> None:
        """Mark the round as deleted."""
        assert self.store.work is not None
        changed = {"deletion_timestamp": datetime.now(UTC), "generation": 2}
        metadata = self.store.work.metadata.model_copy(update=changed)
        self.store.work = self.store.work.model_copy(update={"metadata": metadata})
        self.tell(operator)


@pytest.fixture
async def cluster(receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    for name in ("CALLBACK_INTERVAL_SECONDS", "RETRY_FIRST_SECONDS"):
        monkeypatch.setenv(f"VLLM_POC_{name}", "0.01")
    monkeypatch.setattr(reconciler, "RELEASE_SECONDS", 1.0)
    monkeypatch.setattr(reaper, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(reaper, "PERIOD_SECONDS", 1.0)
    async with AsyncExitStack() as stack:
        made = Cluster(stack, receiver)
        await made.open()
        yield made


async def reach(holds: Callable[[], Any], seconds: float = 20) -> None:
    """Wait until something holds."""
    end = monotonic() + seconds
    while not holds():
        assert monotonic() < end
        await asyncio.sleep(0.02)


def runs(cluster: Cluster) -> bool:
    """Whether both pods have confirmed their slots."""
    slots = cast(PoCRound, cluster.store.work).status.assignments
    return len(slots) == 2 and all(slot.state == "Running" for slot in slots)


@pytest.mark.parametrize("replaced", [False, True], ids=["same operator", "new operator"])
async def test_a_pod_that_was_silent_when_its_round_went_is_stopped(cluster: Cluster, replaced: bool) -> None:
    operator = await cluster.operator()
    await reach(lambda: runs(cluster))
    cluster.silent = True
    cluster.delete(operator)
    assert await operator.released(UID, 30), "the silent pod holds it for a while only"
    cluster.store.work = None
    cluster.tell(operator)
    if replaced:
        await operator.close()
    assert [(await pod.status()).state for pod in cluster.pods] == [PowState.STOPPED, PowState.GENERATING]
    cluster.silent = False
    if replaced:
        await cluster.operator()
    await cluster.pods[1].reach(lambda status: status.state is PowState.STOPPED, 20)


async def test_work_of_others_goes_on(cluster: Cluster) -> None:
    """The pods compute for somebody else, with the same parameters: for no cluster, and for another one."""
    operator = await cluster.operator()
    await reach(lambda: runs(cluster))
    cluster.delete(operator)
    assert await operator.released(UID, 30)
    cluster.store.work = None
    cluster.tell(operator)
    order = {
        "block_hash": "ab" * 32,
        "block_height": 7,
        "public_key": "key",
        "params": {"model": "tiny", "seq_len": 64, "k_dim": 4},
        "node_id": 0,
        "node_count": 1,
    }
    await cluster.pods[0].start(order)
    await cluster.pods[1].start(order | {"owner": "another cluster", "round_id": UID})
    await asyncio.sleep(3)
    assert [(await pod.status()).state for pod in cluster.pods] == [PowState.GENERATING] * 2
