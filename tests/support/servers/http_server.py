# SPDX-License-Identifier: Apache-2.0
"""An ASGI app on a real port of a loopback address, in this process."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serve(app: Any, host: str, port: int) -> AsyncIterator[None]:  # noqa: ANN401 - any ASGI app
    """Serve ``app`` until the block ends."""
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "the server did not start"
        await asyncio.sleep(0.01)
    yield
    server.should_exit = True
    await task
