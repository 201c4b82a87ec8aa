# SPDX-License-Identifier: Apache-2.0
"""What is told of every request: an id in the lines that are logged about it, counts and times, a line of its own.

Paths are told as the template of their route, since names and numbers in them have no bound, and queries may have what
nobody should read. Chat has no other work here than to count the bytes of its pieces.
"""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from time import perf_counter

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poc_gateway.metrics import HTTP_REQUESTS, HTTP_SECONDS, NO_ROUTE, RECORD, RequestRecord, record_of
from poc_gateway.server.access_log import AccessLog, Request
from vllm_poc.logs import bound

#: A request whose client went away before its answer began, as nginx calls it.
CLIENT_GONE = 499
#: An answer that its route did not give.
FAILED = 500
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")


class Telemetry:
    """ASGI middleware around everything that a port has; ``port`` is its name in metrics and log."""

    def __init__(self, app: ASGIApp, *, port: str, access_log: AccessLog) -> None:
        self._app = app
        self._port = port
        self._log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = perf_counter()
        answered = 0.0
        record = RequestRecord()
        scope.setdefault("state", {})[RECORD] = record

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.body":
                record.sent += len(message.get("body", b""))
            elif message["type"] == "http.response.start":
                nonlocal answered
                answered, record.status = perf_counter(), message["status"]
            await send(message)

        request_id = _id_of(scope)
        record_status = FAILED
        try:
            with bound(request=request_id):
                await self._app(scope, receive, sending)
            record_status = CLIENT_GONE
        finally:
            record.status = record.status or record_status
            self._tell(scope, record, request_id, begin, answered or perf_counter())

    def _tell(self, scope: Scope, record: RequestRecord, request_id: str, begin: float, answered: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        requests, seconds = _children(self._port, method, record.route, record.status)
        requests.inc()
        seconds.observe(answered - begin)
        if self._log.wants(record.status):
            peer = scope["client"][0] if scope["client"] else ""
            self._log.add(Request(self._port, method, record, perf_counter() - begin, peer, request_id))


def _id_of(scope: Scope) -> str:
    # Each request passes here: a loop takes a tenth of what an object for all headers does.
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return f"{random.getrandbits(128):032x}"


@cache
def _children(port: str, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
    # To find a series by its labels takes longer than to count.
    return HTTP_REQUESTS.labels(port, method, route, str(status)), HTTP_SECONDS.labels(port, route)


class RouteNames:
    """ASGI middleware that writes down the template of the path, so that what is refused further in has a name too.

    ``templates`` are the app's own; what is below ``proxied`` has no route, and one name.
    """

    def __init__(self, app: ASGIApp, *, templates: Iterable[str], proxied: str | None = None) -> None:
        self._app = app
        self._proxied = proxied
        # A segment that is written out goes before a parameter.
        self._by_length = defaultdict[int, list[tuple[str, list[str]]]](list)
        for template in sorted(set(templates), key=lambda one: one.count("{")):
            segments = template.split("/")
            self._by_length[len(segments)].append((template, segments))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] == "http":
            record_of(scope.get("state", {})).route = self._name(scope["path"])
        await self._app(scope, receive, send)

    def _name(self, path: str) -> str:
        if self._proxied is not None and (path == self._proxied or path.startswith(f"{self._proxied}/")):
            return f"{self._proxied}/{{path}}"
        sent = path.split("/")
        return next((name for name, wanted in self._by_length.get(len(sent), ()) if _fits(wanted, sent)), NO_ROUTE)


def _fits(wanted: Sequence[str], sent: Sequence[str]) -> bool:
    return all(one == other or (one[:1] == "{" and other) for one, other in zip(wanted, sent, strict=True))


def templates_of(app: FastAPI) -> list[str]:
    """Return the paths of all routes of an app, with their parameters' names in braces."""
    return [route.path for route in iter_route_contexts(app.routes) if route.path is not None]
