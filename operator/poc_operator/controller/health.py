# SPDX-License-Identifier: Apache-2.0
"""Whether the process works: what only another process can heal, and background tasks that must not die unseen.

A process that goes on without one of its tasks would only look alive. So a task that fails ends the process, with its
name in the log, and so does one that ends although it is to run for ever. Kubernetes starts another process, which
adopts what runs.

Health and metrics are served on all addresses of the pod: a cluster may have IPv4, IPv6 or both, and kopf's own probe
knows one of them.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web

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
