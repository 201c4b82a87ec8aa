# SPDX-License-Identifier: Apache-2.0
"""The access log: one line per request, written to standard error beside the other lines and in their format.

A line has the template of the route and never the path, the query, a header or a body, so that no secret is in it.
Lines are collected for a moment and written by a thread, since a delivery must not wait for its line. When standard
error takes them more slowly than they come, later ones are left out, and a line says how many.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from poc_gateway.metrics import RequestRecord
from poc_gateway.settings import AccessLogMode
from vllm_poc.logs import LogFormat

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
