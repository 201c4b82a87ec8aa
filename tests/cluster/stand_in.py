# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM pod of the reference implementation, for namespaces in which nobody loads vLLM.

Run with Python alone: ``python3 -c SOURCE NAME RECEIVER`` and ``silent``, if it is to take its start and answer nothing
any more. It says that it computes, and tells the receiver's ``/generated`` of a stop. As the first process of its
container it does not hear SIGTERM, so it lives for its whole grace period.
"""

import json
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

PORT = 8000
#: Nonces per second that it says to compute.
RATE = 100.0

SILENT = "silent"
#: Seconds for which a silent one does not answer.
FOR_EVER = 3600.0


class Handler(BaseHTTPRequestHandler):
    """The routes that the operator uses, at any prefix."""

    name: ClassVar[str]
    receiver: ClassVar[str]
    silent: ClassVar[bool]
    computed: ClassVar[dict[str, Any]] = {}  # the parameters of the round, and when it began

    def do_GET(self) -> None:
        """Tell the status."""
        if not self.computed:
            self._answer({"status": "IDLE", "config": None, "stats": None})
            return
        if self.silent:
            time.sleep(FOR_EVER)
        processed = int(RATE * (time.monotonic() - self.computed["begin"]))
        stats = {"total_processed": processed, "nonces_per_second": RATE}
        self._answer({"status": "GENERATING", "config": self.computed["config"], "stats": stats})

    def do_POST(self) -> None:
        """Start or stop."""
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        if self.path.partition("?")[0].endswith("/stop"):
            self.computed.clear()
            self._tell({"stopped": self.name})
        else:
            names = ("block_hash", "block_height", "public_key", "node_id", "node_count", "group_id", "n_groups")
            params = {name: body["params"][name] for name in ("seq_len", "k_dim")}
            config = {name: body[name] for name in names} | params
            self.computed.update(config=config, begin=time.monotonic())
        self._answer({"status": "OK"})

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _tell(self, body: dict[str, Any]) -> None:
        headers = {"content-type": "application/json"}
        told = urllib.request.Request(f"{self.receiver}/generated", json.dumps(body).encode(), headers)  # noqa: S310
        urllib.request.urlopen(told, timeout=10).close()  # noqa: S310


if __name__ == "__main__":
    Handler.name, Handler.receiver, *rest = sys.argv[1:]
    Handler.silent = rest == [SILENT]
    ThreadingHTTPServer(("", PORT), Handler).serve_forever()
