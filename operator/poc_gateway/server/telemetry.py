# SPDX-License-Identifier: Apache-2.0
"""What is told of every request: an id in the lines that are logged about it, counts and times, a line of its own.

Paths are told as the template of their route, since names and numbers in them have no bound, and queries may have what
nobody should read. Chat has no other work here than to count the bytes of its pieces.

A request's own line is written to standard error beside the other lines and in their format. It has no path, query,
header or body, so that no secret is in it. Lines are collected for a moment and written by a thread, since a delivery
must not wait for its line. When standard error takes them more slowly than they come, later ones are left out, and a
line says how many.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from time import perf_counter
from typing import NamedTuple

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poc_gateway.metrics import HTTP_REQUESTS, HTTP_SECONDS, NO_ROUTE, RECORD, RequestRecord, record_of
from poc_gateway.settings import AccessLogMode
from vllm_poc.logs import LogFormat, bound

#: A request whose client went away before its answer began, as nginx calls it.
CLIENT_GONE = 499
#: An answer that its route did not give.
FAILED = 500
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")
LOGGER = "poc_gateway.access"
#: Seconds that a line waits for others.
FLUSH_SECONDS = 0.2
#: Lines that may wait: so many come in that time at a rate that no log should have.
MOST_LINES = 5_000
_ERRORS = 400


class Request(NamedTuple):
    """What a line tells: ``seconds`` are those until the end of the answer, ``peer`` is an address."""

    port: str
    method: str
    record: RequestRecord
    seconds: float
    peer: str
    request_id: str


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


class AccessLog:
    """The lines on their way to standard error. One per process, used from its event loop."""

    def __init__(self, mode: AccessLogMode, log_format: LogFormat, write: Callable[[str], object] = _write) -> None:
        self._least = {"none": sys.maxsize, "errors": _ERRORS, "all": 0}[mode]
        self._line = _json_line if log_format == "json" else _plain_line
        self._format = log_format
        self._write = write
        self._lines = list[str]()
        self._left_out = 0
        self._writing: asyncio.Task[None] | None = None

    def wants(self, status: int) -> bool:
        """Return whether a request that was answered so has a line."""
        return status >= self._least

    def add(self, request: Request) -> None:
        """Write a line within a moment."""
        if len(self._lines) >= MOST_LINES:
            self._left_out += 1
            return
        self._lines.append(self._line(request, time.time()))
        if self._writing is None:
            self._writing = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        try:
            while self._lines:
                await asyncio.sleep(FLUSH_SECONDS)
                await asyncio.to_thread(self._write, self._take())
        finally:
            self._writing = None

    def flush(self) -> None:
        """Write what waits."""
        if self._lines:
            self._write(self._take())

    def _take(self) -> str:
        lines, self._lines = self._lines, []
        if self._left_out:
            lines.append(self._told(f"{self._left_out} requests have no line: they came faster than lines are written"))
            self._left_out = 0
        return "".join(lines)

    def _told(self, message: str) -> str:
        if self._format == "plain":
            return f"{_local(time.time())} WARNING {LOGGER}: {message}\n"
        line = {"message": message, "timestamp": _utc(time.time()), "severity": "warn", "logger": LOGGER}
        return f"{json.dumps(line)}\n"


def _json_line(request: Request, now: float) -> str:
    # None of the values has a character that JSON escapes: templates, numbers, an address, an id of safe characters.
    port, method, record, seconds, peer, id_ = request
    return (
        f'{{"message": "{method} {record.route} {record.status}", "timestamp": "{_utc(now)}", "severity": "info", '
        f'"logger": "{LOGGER}", "request": "{id_}", "port": "{port}", "method": "{method}", "route": "{record.route}", '
        f'"status": {record.status}, "seconds": {seconds:.6f}, "received_bytes": {record.received}, '
        f'"sent_bytes": {record.sent}, "peer": "{peer}"}}\n'
    )


def _plain_line(request: Request, now: float) -> str:
    port, method, record, seconds, peer, id_ = request
    return (
        f"{_local(now)} INFO {LOGGER}: {method} {record.route} {record.status} [request={id_} port={port} "
        f"seconds={seconds:.6f} received_bytes={record.received} sent_bytes={record.sent} peer={peer}]\n"
    )


def _utc(now: float) -> str:
    return f"{_utc_second(int(now))}.{int(now * 1_000_000) % 1_000_000:06}+00:00"


def _local(now: float) -> str:
    return f"{_local_second(int(now))},{int(now * 1000) % 1000:03}"


# Many requests end in the same second.


@lru_cache(maxsize=2)
def _utc_second(now: int) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(maxsize=2)
def _local_second(now: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))


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
            # A socket for IPv6 tells of IPv4 so, which network policies and people do not know.
            peer = scope["client"][0].removeprefix("::ffff:") if scope["client"] else ""
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
    seconds = HTTP_SECONDS.labels(port, route, f"{status // 100}xx")
    return HTTP_REQUESTS.labels(port, method, route, str(status)), seconds


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
