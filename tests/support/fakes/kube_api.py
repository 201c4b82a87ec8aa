# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the Kubernetes API server, for answers that a real one cannot be made to give."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from kubernetes.aio import client


@asynccontextmanager
async def answering(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[client.ApiClient]:
    """Yield a connection to a server on which ``answer`` answers all requests."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    connection = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    yield connection
    await connection.close()  # type: ignore[no-untyped-call]
    await runner.cleanup()
