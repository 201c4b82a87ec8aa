# SPDX-License-Identifier: Apache-2.0
"""A callback receiver that fails in every way a network and a server can fail."""

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.servers.http_server import free_port

#: Answers that are no HTTP, or hardly.
GARBAGE = (
    b"\x00\xff\xfe garbage \r\n\r\n",
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 999 Odd\r\n\r\n",
    b"HTTP/1.1 500 " + b"x" * 100_000 + b"\r\n\r\n",
    b"HTTP/1.1 500 Wrong\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 500 Wrong\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\xff\xff\xff\xff",
    b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    b"",
)


class Fault(Enum):
    """How a post fails. STORED_…: the receiver keeps the results before it fails, and the sender cannot know."""

    SERVER_ERROR = auto()
    BUSY = auto()
    REDIRECT = auto()
    HANG = auto()
    STORED_HANG = auto()
    RESET = auto()
    STORED_RESET = auto()
    GARBAGE = auto()


_STATUS = {Fault.SERVER_ERROR: 500, Fault.BUSY: 429, Fault.REDIRECT: 307}
_STORED = {Fault.STORED_HANG, Fault.STORED_RESET}


class FaultyReceiver:
    """Counts how often each nonce was kept. ``bad`` nonces make it answer 400 to their whole payload.

    ``unanswered`` counts what it kept without saying so, ``misdirected`` the requests that followed a redirect.
    """

    def __init__(self, bad: frozenset[int]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.bad = bad
        self.kept: Counter[int] = Counter()
        self.unanswered: Counter[int] = Counter()
        self.failed: Counter[Fault] = Counter()
        self.misdirected = 0
        self._fault: Fault | None = None
        self._healed = threading.Event()
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def fail(self, fault: Fault) -> None:
        """Fail all posts from now on."""
        self._healed.clear()
        self._fault = fault

    def heal(self) -> None:
        """Answer posts properly from now on."""
        self._fault = None
        self._healed.set()

    def open(self) -> None:
        """Listen."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening: connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def receive(self, handler: BaseHTTPRequestHandler) -> None:
        """Take one post and answer it, or fail."""
        nonces = _nonces(handler)
        with self._lock:
            fault, count = self._fault, sum(self.failed.values())
            if fault is not None:
                self.failed[fault] += 1
            refused = fault is None and not self.bad.isdisjoint(nonces)
            if (fault is None and not refused) or fault in _STORED:
                self.kept.update(nonces)
            if fault in _STORED:
                self.unanswered.update(nonces)
        if fault is None:
            _answer(handler, 400 if refused else 200)
        elif fault in _STATUS:
            _answer(handler, _STATUS[fault])
        elif fault is Fault.GARBAGE:
            handler.wfile.write(GARBAGE[count % len(GARBAGE)])
        elif fault in {Fault.RESET, Fault.STORED_RESET}:
            _reset(handler.connection)
        else:
            self._healed.wait()


def _nonces(handler: BaseHTTPRequestHandler) -> list[int]:
    body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
    return [artifact["nonce"] for artifact in body["artifacts"]]


def _answer(handler: BaseHTTPRequestHandler, status: int) -> None:
    handler.send_response(status)
    if status == _STATUS[Fault.REDIRECT]:
        handler.send_header("Location", "/elsewhere")
    handler.end_headers()


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _handler(receiver: FaultyReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path == "/generated":
                receiver.receive(self)
            else:
                receiver.misdirected += 1
                _answer(self, 200)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


@contextmanager
def faulty_receiver(bad: frozenset[int]) -> Iterator[FaultyReceiver]:
    """Listen while the context lasts."""
    receiver = FaultyReceiver(bad)
    receiver.open()
    try:
        yield receiver
    finally:
        receiver.heal()
        receiver.close()
