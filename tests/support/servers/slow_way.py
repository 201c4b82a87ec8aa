# SPDX-License-Identifier: Apache-2.0
"""A way to a server on which each connection begins late, as with an API server that has too much to do."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseRequestHandler, ThreadingTCPServer

_PIECE = 2**16


class _Handler(BaseRequestHandler):
    upstream: tuple[str, int]
    seconds: float

    def handle(self) -> None:
        time.sleep(self.seconds)
        with socket.create_connection(self.upstream) as server:
            back = threading.Thread(target=_pass_on, args=(server, self.request), daemon=True)
            back.start()
            _pass_on(self.request, server)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass on what comes, and at its end that nothing more comes."""
    with contextlib.suppress(OSError):  # one of the two has gone
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class _Server(ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


@contextmanager
def slow_way(host: str, port: int, seconds: float) -> Iterator[int]:
    """Lead to a server until the block ends; yield the port of the loopback interface, which takes so many seconds."""
    handler = type("Handler", (_Handler,), {"upstream": (host, int(port)), "seconds": seconds})
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
