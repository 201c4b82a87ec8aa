# SPDX-License-Identifier: Apache-2.0
"""A callback receiver in a process of its own, which takes everything and reads nothing of it.

``GET /arrivals`` answers when its deliveries came, by the monotonic clock that all processes of a machine share.
"""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from aiohttp import web

ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 2**26


@contextmanager
def accepting() -> Iterator[str]:
    """Run the receiver while the context lasts; its address."""
    argv = [sys.executable, "-m", "benchmarks.receiver"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            yield f"http://{ADDRESS}:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def arrivals(receiver: str) -> list[float]:
    """Return when the receiver's deliveries came (`time.monotonic`)."""
    with urllib.request.urlopen(f"{receiver}/arrivals") as answer:  # noqa: S310 - our own process
        moments: list[float] = json.load(answer)
    return moments


async def _serve() -> None:
    moments: list[float] = []

    async def accept(request: web.Request) -> web.Response:
        moments.append(monotonic())
        await request.read()
        return web.Response()

    async def tell(_: web.Request) -> web.Response:
        return web.json_response(moments)

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/generated", accept)
    app.router.add_get("/arrivals", tell)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
