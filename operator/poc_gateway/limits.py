# SPDX-License-Identifier: Apache-2.0
"""The ASGI middleware that bounds what one request, one peer and all requests together can ask of the gateway."""

import math
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poc_gateway.errors import Refusal

#: A peer may use so many seconds' worth of requests at once.
BURST_SECONDS = 4.0
#: Peers that are remembered; the one that was silent longest is forgotten first.
MOST_PEERS = 10_000
#: The bodies of all requests under way may have the size of so many largest ones.
LARGEST_AT_ONCE = 4


class BodyLimit(NamedTuple):
    """The size of the largest body, and the setting that says so."""

    setting: str
    bytes: int


class Peers:
    """A token bucket per address, kept as the moment at which the bucket is full again."""

    def __init__(self, per_second: float) -> None:
        self._seconds_each = 1 / per_second
        self._full_at = OrderedDict[str, float]()

    def wait_seconds(self, address: str, now: float) -> float:
        """Take one request; return 0 if it may pass, else after how many seconds the next may."""
        full_at = max(self._full_at.get(address, now), now) + self._seconds_each
        excess = full_at - now - max(BURST_SECONDS, self._seconds_each)
        if excess > 0:
            return excess
        self._full_at[address] = full_at
        self._full_at.move_to_end(address)
        if len(self._full_at) > MOST_PEERS:
            self._full_at.popitem(last=False)
        return 0.0


class Limits:
    """Answers 413 to bodies above the limit ``body`` and 429 to peers that ask more often than ``peer_requests``.

    And 503 while the bodies of all requests under way exceed `LARGEST_AT_ONCE` of those, and 400 to addresses with a
    NUL, a character that PostgreSQL fails to look for.
    """

    def __init__(self, app: ASGIApp, *, body: BodyLimit, peer_requests: float) -> None:
        self._app = app
        self._body = body
        self._under_way = 0
        self._peers = Peers(peer_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._bounded(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        address = scope["client"][0] if scope["client"] else ""
        wait = self._peers.wait_seconds(address, time.monotonic())
        if wait > 0:
            detail = "this address sends too many requests: send fewer, larger ones or raise POC_GATEWAY_PEER_REQUESTS"
            headers = {"Retry-After": str(math.ceil(wait))}
            return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "TooManyRequests", detail, headers=headers)
        if b"%00" in scope["query_string"] or "\0" in scope["path"]:
            detail = "the address has a NUL (%00), which no name has: leave it out"
            return Refusal(HTTPStatus.BAD_REQUEST, "InvalidRequest", detail)
        length = Headers(scope=scope).get("content-length", "")
        return self._too_large() if length.isdecimal() and int(length) > self._body.bytes else None

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A chunked body tells its length only while it arrives, and others may never arrive in full.
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            size = len(message.get("body", b""))
            taken += size
            self._under_way += size
            if taken > self._body.bytes:
                raise self._too_large()
            if size and self._under_way > LARGEST_AT_ONCE * self._body.bytes:
                raise self._busy()
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._under_way -= taken

    def _busy(self) -> Refusal:
        most = LARGEST_AT_ONCE * self._body.bytes
        detail = f"the bodies of all requests under way exceed {most} bytes: send this one again in a moment"
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "Busy", detail, headers={"Retry-After": "1"})

    def _too_large(self) -> Refusal:
        detail = f"the body exceeds {self._body.bytes} bytes: send less at once or raise {self._body.setting}"
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BodyTooLarge", detail)
