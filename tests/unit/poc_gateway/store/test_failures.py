# SPDX-License-Identifier: Apache-2.0
"""What a database that is slow, full or read-only makes of a write, and what its errors say."""

import asyncio
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, event, text

from poc_gateway.server.health import Health
from poc_gateway.store import database as database_module
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseAway, DatabaseFull, DatabaseUnavailable, create_engine, translated
from tests.support.fakes.held_write import HeldWrite


@pytest.fixture
def sqlite(tmp_path: Path) -> Database:
    return Database.open(f"sqlite:///{tmp_path / 'gateway.db'}")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.errors.DiskFull("no space"), DatabaseFull),
        (psycopg.errors.ReadOnlySqlTransaction("read-only"), DatabaseUnavailable),
        (psycopg.OperationalError("gone"), DatabaseAway),
        (psycopg.errors.AdminShutdown("ends"), DatabaseAway),
        (psycopg.errors.QueryCanceled("too slow"), DatabaseUnavailable),
    ],
)
def test_errors_of_the_driver_itself_are_ours_too(error: psycopg.Error, expected: type[Exception]) -> None:
    assert type(translated(error)) is expected


@pytest.mark.parametrize("url", ["postgresql://gw:s3cret", "postgresql://gw:s3cret@host:s3cret/x", "s3cret"])
def test_a_url_that_is_none_is_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="database is not a URL") as raised:
        create_engine(url)
    assert "s3cret" not in str(raised.value)


async def test_a_write_gives_up_before_its_turn_and_never_in_it(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "TURN_SECONDS", 0.1)
    held, done = HeldWrite(), list[str]()

    def slow(connection: Connection) -> None:
        held(connection)
        done.append("slow")

    running = asyncio.create_task(sqlite.write(slow))
    await held.begun()
    with pytest.raises(DatabaseUnavailable, match="took no write"):
        await sqlite.write(lambda _: done.append("late"))
    held.release.set()
    await running
    await sqlite.write(lambda _: None)
    assert done == ["slow"]
    sqlite.close()


async def test_no_more_writes_wait_than_fit(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "MOST_WAITING", 3)
    held = HeldWrite()
    writes = [asyncio.create_task(sqlite.write(held))]
    await held.begun()
    writes += [asyncio.create_task(sqlite.write(lambda _: None)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(DatabaseUnavailable, match="3 writes wait"):
        await sqlite.write(lambda _: None)
    held.release.set()
    await asyncio.gather(*writes)
    sqlite.close()


async def test_a_database_that_may_only_be_read_is_not_ready(
    sqlite: Database, caplog: pytest.LogCaptureFixture
) -> None:
    assert await Health(sqlite).problem() is None
    event.listen(sqlite.engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only=1"))
    sqlite.engine.dispose()
    assert await Health(sqlite).problem() == "the database cannot be used: the gateway's log says more"
    assert "readonly" in caplog.text
    assert await sqlite.read(lambda one: one.execute(text("SELECT 1")).scalar()) == 1
    sqlite.close()
