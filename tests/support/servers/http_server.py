# SPDX-License-Identifier: Apache-2.0
"""An ASGI app on a real port of a loopback address, in this process."""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn

#: Of up to so many processes of pytest at a time each has so many ports, all below those that the system gives to
#: connections.
_FIRST_PORT, _PROCESSES, _PORTS_EACH = 12_000, 8, 2500
#: How far apart two runs begin whose process ids follow one another. Those of several are spread evenly. A server may
#: bind its port a minute after it was given it, so nobody can see which ones other runs use.
_APART = 1547


def own_ports(pid: int) -> Iterator[int]:
    """Yield the ports of a process again and again; another run on the machine begins elsewhere among them."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
    for turn in itertools.count(_APART * pid):
        yield _FIRST_PORT + process * _PORTS_EACH + turn % _PORTS_EACH


_PORTS = own_ports(os.getpid())


def free_port() -> int:
    """Return a port on which nobody listens at any address, and which no other process of this run is given."""
    for port in itertools.islice(_PORTS, _PORTS_EACH):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError("all ports of the tests are taken")


@asynccontextmanager
async def serve(app: Any, host: str, port: int) -> AsyncIterator[uvicorn.Server]:  # noqa: ANN401 - any ASGI app
    """Serve ``app`` until the block ends, or the server is told to exit before."""
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)
    async with running(config) as server:
        yield server


@asynccontextmanager
async def running(config: uvicorn.Config, sockets: list[socket.socket] | None = None) -> AsyncIterator[uvicorn.Server]:
    """Run a server until the block ends, on these sockets if there are any."""
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets))
    while not server.started:
        assert not task.done(), "the server did not start"
        await asyncio.sleep(0.01)
    yield server
    server.should_exit = True
    await task
