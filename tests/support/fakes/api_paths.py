# SPDX-License-Identifier: Apache-2.0
"""An API server that answers with what a test lays down for each path, and keeps what it was asked."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: Any


@dataclass
class ApiPaths:
    """``answers`` has JSON, or text, or (status, JSON), by path; what is missing is 404. A list is answered as one.

    A function is given the query, and returns one of these.
    A path in ``held`` gets its answer when its event is set, at the latest when the server ends.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    held: dict[str, threading.Event] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def kubeconfig(self, path: Path, namespace: str = "poc") -> Path:
        """Write a kubeconfig for this server."""
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": context}],
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "user-token"}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def answer(self, method: str, path: str, query: Mapping[str, list[str]]) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        found = self.answers.get(f"{method} {path}", self.answers.get(path, (404, {"message": f"no {path}"})))
        found = found(query) if callable(found) else found
        status, body = found if isinstance(found, tuple) else (200, found)
        if isinstance(body, list):
            body = {"items": body, "metadata": {}}
        return status, body.encode() if isinstance(body, str) else json.dumps(body).encode()


@contextmanager
def api_paths() -> Iterator[ApiPaths]:
    """Run such a server on the loopback interface."""
    paths = ApiPaths()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            parts = urlsplit(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            headers = {name.lower(): value for name, value in self.headers.items()}
            query = parse_qs(parts.query)
            paths.asked.append(Asked(self.command, parts.path, query, headers, body))
            if parts.path in paths.held:
                paths.held[parts.path].wait()
            status, text = paths.answer(self.command, parts.path, query)
            with suppress(BrokenPipeError):  # whoever asked may wait no longer
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_PUT = _serve  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        paths.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield paths
        finally:
            for event in paths.held.values():
                event.set()
            server.shutdown()
            thread.join()
