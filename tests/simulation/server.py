# SPDX-License-Identifier: Apache-2.0
"""One listening socket for all pods: the address that was called tells which of them is meant."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import Receive, Scope, Send

from tests.simulation.session import PodServer
from tests.support.servers.http_server import free_port


class FleetServer:
    """The ASGI application of all pods. An address without a session hangs up, as a port that nobody listens on."""

    def __init__(self) -> None:
        self.port = free_port()
        self._sessions: dict[str, PodServer] = {}
        config = uvicorn.Config(
            self,
            host="0.0.0.0",
            port=self.port,
            lifespan="off",
            log_level="critical",
            backlog=4096,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen until the block ends."""
        task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            assert not task.done(), "the server did not start"
            await asyncio.sleep(0.01)
        yield
        self._server.should_exit = self._server.force_exit = True
        await task

    async def open(self, address: str, session: PodServer) -> None:
        """Let a session serve an address, which no other one serves."""
        assert address not in self._sessions, f"two pods have the address {address}"
        await session.start()
        self._sessions[address] = session

    async def kill(self, address: str, session: PodServer) -> None:
        """End a session and hang up on whoever talks to it."""
        if self._sessions.get(address) is session:
            del self._sessions[address]
            self._hang_up(address)
            await asyncio.sleep(0)  # the connections learn of it before the requests are given up
        await session.kill()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the session of the address that was called."""
        address = scope["server"][0]
        session = self._sessions.get(address)
        if session is not None:
            await session.serve(scope, receive, send)
            return
        self._hang_up(address)
        while (await receive())["type"] != "http.disconnect":
            pass

    def _hang_up(self, address: str) -> None:
        for connection in list(self._server.server_state.connections):
            if connection.transport.get_extra_info("sockname")[0] == address:
                connection.transport.abort()
