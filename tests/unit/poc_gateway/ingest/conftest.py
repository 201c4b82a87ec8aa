# SPDX-License-Identifier: Apache-2.0
"""A gateway on a real port, whose PoCRounds are in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from sqlalchemy import Row, Table, select
from yarl import URL

from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.process import Components, inside_app
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import StoreUnavailable, UnreadableObject
from tests.support.builders.deliveries import JSON, path
from tests.support.servers.http_server import free_port, serve

Answer = tuple[int, Any]


class Gateway:
    """What tests do with it."""

    def __init__(self, session: aiohttp.ClientSession, url: URL, database: Database) -> None:
        self.session = session
        self.url = url
        self.database = database
        self.found: dict[str, PoCRound] = {}
        self.api_server_away = False
        self.unreadable = False
        self.looking = asyncio.Event()  # while it is not set, the API server does not answer
        self.looking.set()
        self.forget: Callable[[str], None] = lambda _: None

    async def read_round(self, namespace: str, name: str) -> PoCRound | None:
        await self.looking.wait()
        if self.api_server_away:
            raise StoreUnavailable("no answer")
        if self.unreadable:
            metadata = {"namespace": namespace, "name": name, "generation": 1}
            raise UnreadableObject("spec.nodes: Field required", {"metadata": metadata})
        return self.found.get(f"{namespace}/{name}")

    def add(self, *rounds: PoCRound) -> None:
        self.found |= {f"{round_.metadata.namespace}/{round_.metadata.name}": round_ for round_ in rounds}

    async def deliver(self, body: bytes, uid: str = "uid-1", end: str = "generated") -> Answer:
        async with self.session.post(path(uid, end), data=body) as answer:
            return answer.status, await answer.json()

    async def get(self, url: str) -> Answer:
        async with self.session.get(url) as answer:
            return answer.status, await answer.json()

    async def rows(self, table: Table) -> Sequence[Row[*tuple[Any, ...]]]:
        query = select(table).order_by(*table.primary_key.columns)
        return await self.database.read(lambda connection: connection.execute(query).all())


def receipt(stored: int = 0, duplicates: int = 0, conflicts: int = 0) -> dict[str, object]:
    """The answer to a delivery of which nothing was refused."""
    return {"stored": stored, "duplicates": duplicates, "conflicts": conflicts, "refused": []}


Start = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def start(database: Database) -> Start:
    @asynccontextmanager
    async def started(*rounds: PoCRound, **settings: object) -> AsyncIterator[Gateway]:
        port = free_port()
        names = {f"POC_GATEWAY_{name.upper()}": str(value) for name, value in settings.items()}
        url = URL(f"http://127.0.0.1:{port}")
        async with aiohttp.ClientSession(url, headers=JSON) as session:
            gateway = Gateway(session, url, database)
            gateway.add(*rounds)
            known = Rounds(database, gateway.read_round)
            gateway.forget = known.forget
            values = Settings.from_environment(names)
            outbox = Outbox(database, values)
            parts = Components(settings=values, database=database, rounds=known, outbox=outbox)
            async with serve(inside_app(parts), "127.0.0.1", port):
                yield gateway

    return started
