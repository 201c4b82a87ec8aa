# SPDX-License-Identifier: Apache-2.0
"""The ASGI app: the routers of all parts behind one set of limits and error answers."""

from dataclasses import dataclass

from fastapi import FastAPI

from poc_gateway import health
from poc_gateway.collector import routes as collector
from poc_gateway.errors import install_handlers
from poc_gateway.limits import Limits
from poc_gateway.rounds.registry import Rounds
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the routes work on."""

    settings: Settings
    database: Database
    rounds: Rounds


def create_app(parts: Parts) -> FastAPI:
    """Return the app that serves all routes."""
    app = FastAPI(title="Proof-of-Compute gateway", version="1", docs_url=None, redoc_url=None)
    app.include_router(health.router(parts.database))
    app.include_router(collector.router(parts.database, parts.rounds, parts.settings))
    install_handlers(app)
    settings = parts.settings
    app.add_middleware(Limits, body_bytes=settings.body_bytes, peer_requests=settings.peer_requests)
    return app
