# SPDX-License-Identifier: Apache-2.0
"""Questions about named nonces: one that nobody waits for any more is withdrawn from the pod, and never answered."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.actions import PodAsks
from poc_operator.planning.snapshot import AskPod, named_nonces
from tests.unit.poc_operator.build import a_pod, a_validation

HOST = "127.0.0.1"


class BusyPod:
    """A pod that answers when its round is over, which is never."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.withdrawn = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Yield its port."""
        server = await asyncio.start_server(self._hold, HOST, 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked.set()
        while await reader.read(2**16):
            pass
        self.withdrawn.set()
        writer.close()


async def _keep_none(asks: PodAsks) -> None:
    asks.keep(0, ())


@pytest.mark.parametrize("give_up", [_keep_none, PodAsks.cancel], ids=["not asked any more", "the loop has ended"])
async def test_what_nobody_waits_for_is_withdrawn(give_up: Callable[[PodAsks], Coroutine[Any, Any, None]]) -> None:
    """Else it would run at the end of the pod's round, and keep chat out."""
    pod = BusyPod()
    async with pod.serving() as port, PodClient() as client:
        asks = PodAsks(clients=client, wake=asyncio.Event(), may_act=lambda: True)
        asked = AskPod(pod=a_pod("a", ip=HOST), key="k", request=named_nonces(a_validation().spec, [1]))
        asks.keep(port, [asked])
        asks.keep(port, [asked])
        async with asyncio.timeout(30):
            await pod.asked.wait()
            assert not pod.withdrawn.is_set()
            await give_up(asks)
            await pod.withdrawn.wait()
        await asks.cancel()
