# SPDX-License-Identifier: Apache-2.0
"""The routes of the results, on each database."""

from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from poc_gateway.errors import install_handlers
from poc_gateway.outbox.commands import Commands
from poc_gateway.query.routes import router
from poc_gateway.store.database import Database


@pytest.fixture
def app(database: Database) -> FastAPI:
    app = FastAPI(routes=router(database, Commands(database), limits=True).routes)
    install_handlers(app)
    return app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[AsyncClient]:
    transport = ASGITransport(app, raise_app_exceptions=False)
    async with AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
