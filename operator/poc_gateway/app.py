# SPDX-License-Identifier: Apache-2.0
"""The two ASGI apps, one for the inside of the cluster and one for the network, and what tells them apart: the port."""

from dataclasses import dataclass

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from poc_gateway import health
from poc_gateway.access import Access, Guard, inside_guard, network_guard
from poc_gateway.collector import routes as collector
from poc_gateway.errors import install_handlers
from poc_gateway.limits import BodyLimit, Limits
from poc_gateway.media_type import JsonBodies
from poc_gateway.network import routes as network_routes
from poc_gateway.network.service import Network
from poc_gateway.outbox import routes as outbox_routes
from poc_gateway.outbox.outbox import Outbox
from poc_gateway.results import routes as results
from poc_gateway.rounds.registry import Rounds
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the routes work on. Without a ``network`` its routes answer that they are not configured."""

    settings: Settings
    database: Database
    rounds: Rounds
    outbox: Outbox
    network: Network | None


class Ports:
    """Serves what arrives at ``network_port`` with the network's app, and everything else with the inside's."""

    def __init__(self, inside: ASGIApp, network: ASGIApp, network_port: int) -> None:
        self._inside = inside
        self._network = network
        self._network_port = network_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        app = self._network if scope["server"][1] == self._network_port else self._inside
        await app(scope, receive, send)


def inside_app(parts: Parts) -> FastAPI:
    """Return the app for pods, the operator and people."""
    database, settings = parts.database, parts.settings
    return _app(
        "Proof-of-Compute gateway",
        parts,
        inside_guard(settings.token),
        BodyLimit("POC_GATEWAY_BODY_BYTES", settings.body_bytes),
        collector.router(database, parts.rounds, stored=parts.outbox.wake),
        outbox_routes.router(database, parts.outbox),
        results.router(database),
    )


def network_app(parts: Parts) -> FastAPI:
    """Return the app for the network's node."""
    settings = parts.settings
    return _app(
        "Proof-of-Compute node",
        parts,
        network_guard(settings.network_token),
        BodyLimit("POC_GATEWAY_NETWORK_BODY_BYTES", settings.network_body_bytes),
        network_routes.router(parts.network),
    )


def _app(title: str, parts: Parts, guard: Guard, body: BodyLimit, *routers: APIRouter) -> FastAPI:
    app = FastAPI(title=title, version="1", docs_url=None, redoc_url=None)
    for router in (health.router(parts.database), *routers):
        app.include_router(router)
    install_handlers(app)
    # What is added last is asked first.
    app.add_middleware(JsonBodies)
    app.add_middleware(Access, guard=guard)
    app.add_middleware(Limits, body=body, peer_requests=parts.settings.peer_requests)
    return app
