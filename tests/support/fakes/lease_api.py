# SPDX-License-Identifier: Apache-2.0
"""The one corner of the Kubernetes API that the Lease uses, made to fail at an exact moment."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from kubernetes.aio import client

UID = "lease-uid"
PATH = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class LeaseApi:
    """One Lease with optimistic concurrency. ``fault`` answers all requests with this HTTP status; 0 hangs.

    There is nothing else: all other requests are answered 404, and hang with ``others_hang``.
    """

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.fault: int | None = None
        self.requests = 0
        self.others_hang = False
        self.hanging = 0

    @property
    def holder(self) -> str | None:
        """Who holds the lease."""
        return self.lease["spec"].get("holderIdentity") if self.lease else None

    async def answer(self, request: web.Request) -> web.Response:
        """Serve get, create and update."""
        self.requests += 1
        if self.fault == 0:
            await asyncio.sleep(60)
        if self.fault is not None:
            return _failure(self.fault)
        if request.method == "GET":
            return web.json_response(self.lease) if self.lease else _failure(404)
        body = await request.json()
        stale = self.lease and body["metadata"].get("resourceVersion") != self.lease["metadata"]["resourceVersion"]
        if stale or (request.method == "POST" and self.lease):
            return _failure(409)
        self.version += 1
        self.lease = body
        body["metadata"] |= {"resourceVersion": str(self.version), "uid": UID}
        return web.json_response(body)

    async def answer_other(self, _: web.Request) -> web.Response:
        """Serve whatever is no Lease."""
        if self.others_hang:
            self.hanging += 1
            await asyncio.sleep(60)
        return _failure(404)


def _failure(status: int) -> web.Response:
    return web.json_response({"kind": "Status", "code": status}, status=status)


@asynccontextmanager
async def lease_api() -> AsyncIterator[tuple[LeaseApi, client.ApiClient]]:
    """Serve a LeaseApi and return a client for it."""
    api = LeaseApi()
    app = web.Application()
    app.router.add_route("*", PATH, api.answer)
    app.router.add_route("*", PATH + "/{name}", api.answer)
    app.router.add_route("*", "/{path:.*}", api.answer_other)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    connection = client.ApiClient(configuration)
    try:
        yield api, connection
    finally:
        await connection.close()  # type: ignore[no-untyped-call]
        await runner.cleanup()
