# SPDX-License-Identifier: Apache-2.0
"""A callback receiver on the loopback interface that can be told to misbehave."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class CallbackReceiver:
    """Keeps accepted payloads. ``faults`` are the answers to the next posts, 0 for none; then comes ``answer``.

    Errors have the ``body`` as JSON, if there is one. What has more than ``most_bytes`` is answered 413.

    A payload with one of the ``bad`` nonces is answered 400 as a whole, as the network does. With a ``password`` a post
    that does not have it is answered 401 with this ``challenge``.
    """

    def __init__(self) -> None:
        self.url = ""
        self.answer = 200
        self.faults: list[int] = []
        self.body: object = None
        self.headers: dict[str, str] = {}  # of what it accepts
        self.most_bytes = 16 * 2**20
        self.sizes: list[int] = []
        self.bad: set[int] = set()
        self.password: str | None = None
        self.challenge = ""
        self.delay = 0.0
        self.attempts = 0
        self.authorizations: set[str | None] = set()
        self.payloads: list[dict[str, Any]] = []
        self.verdicts: list[dict[str, Any]] = []

    @property
    def nonces(self) -> list[int]:
        """Accepted nonces of either protocol in the order of arrival."""
        return [nonce for payload in self.payloads for nonce in payload_nonces(payload)]

    async def generated(self, request: web.Request) -> web.Response:
        """Take one payload."""
        self.attempts += 1
        self.authorizations.add(request.headers.get("Authorization"))
        if self.password is not None and request.headers.get("Authorization") != _basic(self.password):
            return web.Response(status=401, headers={"WWW-Authenticate": self.challenge})
        text = await request.text()
        self.sizes.append(len(text))
        payload = json.loads(text)
        await asyncio.sleep(self.delay)
        status = self.faults.pop(0) if self.faults else self.answer
        if not status:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.bad.intersection(payload_nonces(payload)):
            status = 400
        if len(text) > self.most_bytes:
            status = 413
        if status // 100 == 2:
            self.payloads.append(payload)
        if self.body is not None and status // 100 != 2:
            return web.json_response(self.body, status=status)
        if status == 302:
            return web.Response(status=status, headers={"Location": self.url})
        return web.Response(status=status, headers=self.headers if status // 100 == 2 else {})

    async def validated(self, request: web.Request) -> web.Response:
        """Take one verdict."""
        self.attempts += 1
        self.authorizations.add(request.headers.get("Authorization"))
        verdict, status = await request.json(), self.faults.pop(0) if self.faults else self.answer
        if status // 100 == 2:
            self.verdicts.append(verdict)
        return web.Response(status=status)


def _basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"pod:{password}".encode()).decode()


def payload_nonces(payload: dict[str, Any]) -> list[int]:
    """The nonces of a payload of either protocol."""
    if "artifacts" in payload:
        return [artifact["nonce"] for artifact in payload["artifacts"]]
    nonces: list[int] = payload["nonces"]
    return nonces


@asynccontextmanager
async def callback_receiver() -> AsyncIterator[CallbackReceiver]:
    """Run a receiver on a free port."""
    receiver = CallbackReceiver()
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/callback/generated", receiver.generated)
    app.router.add_post("/callback/validated", receiver.validated)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/callback"
    try:
        yield receiver
    finally:
        await runner.cleanup()
