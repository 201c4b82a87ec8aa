# SPDX-License-Identifier: Apache-2.0
"""A server of S3 in this process, whose requests can be refused, held up or answered by a blow."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.support.servers.http_server import free_port

BUCKET, PREFIX = "results", "cluster-1"
ACCESS_KEY, SECRET_KEY = "key", "secret"
#: What stops a request instead of its answer; None lets it pass.
Fault = Callable[[str, str], int | None]


class S3Server:
    """The server. ``fault`` is asked for the status of each request by method and path, before it does anything."""

    def __init__(self) -> None:
        self.port = free_port()
        self.fault: Fault = lambda _method, _path: None
        self.requests = list[str]()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: Any = None  # werkzeug's own class depends on how it is started

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def settings(self) -> dict[str, str]:
        """The gateway's settings for an archive here, without delay."""
        return {
            "POC_GATEWAY_ARCHIVE_BUCKET": BUCKET,
            "POC_GATEWAY_ARCHIVE_PREFIX": PREFIX,
            "POC_GATEWAY_ARCHIVE_ENDPOINT": self.url,
            "POC_GATEWAY_ARCHIVE_ACCESS_KEY": ACCESS_KEY,
            "POC_GATEWAY_ARCHIVE_SECRET_KEY": SECRET_KEY,
            "POC_GATEWAY_ARCHIVE_AFTER_SECONDS": "1",
        }

    @cached_property
    def client(self) -> Any:  # noqa: ANN401 - boto3 makes its classes as it runs
        """Another client than the gateway's, which sees what is there."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """The objects of the bucket by their keys, without those that stand for folders."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [one["Key"] for page in pages for one in page.get("Contents", ())]
        found = dict[str, bytes]()
        for key in keys:
            with suppress(self.client.exceptions.NoSuchKey):  # deleted meanwhile
                found[key] = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return {key: content for key, content in found.items() if not key.endswith("/")}

    @property
    def writes(self) -> list[str]:
        """The requests that changed something, or tried to."""
        return [one for one in self.requests if not one.startswith(("GET", "HEAD"))]

    def start(self) -> None:
        """Take requests."""
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Be away."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ.get("QUERY_STRING")
        name = f"{path}?{query}" if query else path
        self.requests.append(f"{method} {name}")
        status = self.fault(method, name)
        if status is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{status} Fault", [("Content-Length", "0")])
            return []
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server with an empty bucket until the block ends."""
    server = S3Server()
    server.start()
    client = server.client
    client.create_bucket(Bucket=BUCKET)
    server.requests.clear()
    try:
        yield server
    finally:
        server.fault = lambda _method, _path: None
        for key in server.objects():
            client.delete_object(Bucket=BUCKET, Key=key)
        server.stop()
