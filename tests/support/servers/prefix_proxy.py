# SPDX-License-Identifier: Apache-2.0
"""A proxy that serves another server below a prefix, as the API server serves a Service.

Like it, it takes the header Authorization off, and passes on what comes as it comes.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PREFIX = "/api/v1/namespaces/poc-system/services/gateway:inside/proxy"
_NOT_PASSED_ON = {"authorization", "host", "connection"}
_NOT_ANSWERED = {"connection", "transfer-encoding", "date", "server"}


class _Handler(BaseHTTPRequestHandler):
    upstream = ""

    def do_GET(self) -> None:
        if not self.path.startswith(f"{PREFIX}/"):
            self.send_error(404)
            return
        headers = {key: value for key, value in self.headers.items() if key.lower() not in _NOT_PASSED_ON}
        upstream = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            upstream.request("GET", self.path.removeprefix(PREFIX), headers=headers)
            self._pass_on(upstream.getresponse())
        except OSError:
            return  # one of the two has gone
        finally:
            upstream.close()

    def _pass_on(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in _NOT_ANSWERED:
                self.send_header(key, value)
        self.end_headers()
        while piece := answer.read1(2**16):
            self.wfile.write(piece)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def proxy_of(url: str) -> Iterator[str]:
    """Serve ``url`` until the block ends; yield the address below which it is."""
    handler = type("Handler", (_Handler,), {"upstream": urlsplit(url).netloc})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
        finally:
            server.shutdown()
