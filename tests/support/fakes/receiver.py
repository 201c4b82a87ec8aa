# SPDX-License-Identifier: Apache-2.0
"""A callback receiver on this machine that keeps what it is sent."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """The bodies posted to ``/generated``, in order; those posted to ``/validated`` beside them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.verdicts: list[dict[str, Any]] = []
        self._arrival = threading.Condition()

    def add(self, body: dict[str, Any]) -> None:
        """Keep a body."""
        with self._arrival:
            self.bodies.append(body)
            self._arrival.notify_all()

    def verdicts_of(self, request_id: str, seconds: float = 30) -> list[dict[str, Any]]:
        """Return the verdicts on a request, waiting for the first one."""

        def found() -> list[dict[str, Any]]:
            return [body for body in self.verdicts if body["request_id"] == request_id]

        with self._arrival:
            self._arrival.wait_for(found, seconds)
            return found()

    def judge(self, body: dict[str, Any]) -> None:
        """Keep a verdict."""
        with self._arrival:
            self.verdicts.append(body)
            self._arrival.notify_all()

    def wait_for(self, count: int, seconds: float = 30) -> bool:
        """Wait until ``count`` bodies have come; False if they do not in time."""
        with self._arrival:
            return self._arrival.wait_for(lambda: len(self.bodies) >= count, seconds)


@contextmanager
def receiving(address: str = "127.0.0.1") -> Iterator[Receiver]:
    """Listen on a free port of ``address`` while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            keep = {"/generated": receiver.add, "/validated": receiver.judge}.get(self.path)
            if keep is not None:
                keep(body)
            self.send_response(200 if keep is not None else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer((address, 0), Handler)
    receiver = Receiver(f"http://{address}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
