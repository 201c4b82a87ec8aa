# SPDX-License-Identifier: Apache-2.0
"""Exports over real HTTP: clients that go away, databases that fail, rounds that are deleted meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import aiohttp
import pytest
from fastapi import FastAPI
from sqlalchemy import Connection, Delete, QueuePool, Update

from poc_gateway.query import export
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from tests.support.builders.deliveries import a_round
from tests.support.builders.stored import store
from tests.support.servers.http_server import free_port, serve

PATH = "/rounds/ns/round-uid-1/artifacts"
COUNT = 60_000  # more than the sockets and the server buffer


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "CHUNK_ROWS", 1_000)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each chunk that was read."""
    counted, read = list[int](), export.Scan.read

    def counting(scan: export.Scan, connection: Connection) -> object:
        counted.append(1)
        return read(scan, connection)

    monkeypatch.setattr(export.Scan, "read", counting)
    return counted


@pytest.fixture
async def url(database: Database, app: FastAPI) -> AsyncIterator[str]:
    await store(database, a_round(), range(COUNT))
    port = free_port()
    async with serve(app, "127.0.0.1", port):
        yield f"http://127.0.0.1:{port}{PATH}"


async def settled(reads: list[int]) -> int:
    """How many chunks were read when no more are."""
    before = -1
    while before != len(reads):
        before = len(reads)
        await asyncio.sleep(0.3)
    return before


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
async def test_a_client_that_goes_away_ends_the_reading(
    database: Database, url: str, reads: list[int], format_: str
) -> None:
    pool = cast(QueuePool, database.engine.pool)
    # With so small a window the server is held back long before the end.
    async with aiohttp.ClientSession(read_bufsize=1024) as session:
        answer = await session.get(url, params={"format": format_})
        await answer.content.readexactly(4)
        answer.close()
    assert 0 < await settled(reads) < COUNT // export.CHUNK_ROWS
    assert pool.checkedout() == 0
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert (await answer.text()).count("\n") == COUNT


async def test_a_client_that_stops_reading_holds_neither_connection_nor_memory(
    database: Database, url: str, reads: list[int]
) -> None:
    pool = cast(QueuePool, database.engine.pool)
    async with aiohttp.ClientSession(read_bufsize=1024) as session, session.get(url) as answer:
        held_back = await settled(reads)
        assert held_back < COUNT // export.CHUNK_ROWS
        assert pool.checkedout() == 0
        assert (await answer.text()).count("\n") == COUNT


@pytest.mark.parametrize(
    "deletion", [schema.rounds.delete(), schema.rounds.update().values(deleted_at=1)], ids=["done", "begun"]
)
async def test_an_export_of_a_round_deleted_meanwhile_is_broken_off(
    database: Database, url: str, reads: list[int], deletion: Delete | Update
) -> None:
    async with aiohttp.ClientSession(read_bufsize=1024) as session, session.get(url) as answer:
        await settled(reads)
        await database.write(lambda connection: connection.execute(deletion))
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
