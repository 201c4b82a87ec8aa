# SPDX-License-Identifier: Apache-2.0
"""The port for Prometheus. kopf's own health server has a single path, so this one is separate."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from poc_operator.runtime.metrics import Metrics


@asynccontextmanager
async def serve_metrics(metrics: Metrics, port: int, *, host: str | None = None) -> AsyncIterator[None]:
    """Serve ``GET /metrics`` until the block ends. OSError if the port is taken."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
