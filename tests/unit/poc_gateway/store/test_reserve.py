# SPDX-License-Identifier: Apache-2.0
"""A database file that was not made by the gateway, such as one restored from a dump, cannot give room back."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.reserve import size_bytes, used_bytes
from poc_gateway.store.retention import Retention


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with free pages."""
    path = tmp_path / "gateway.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE other (content)")
        other.executemany("INSERT INTO other VALUES (?)", [(b"x" * 3_000,)] * 100)
        other.execute("DELETE FROM other")
        other.commit()
    return path


async def look(path: Path) -> int:
    """Let the retention look once; return how many bytes are free afterwards."""
    database = Database.open(f"sqlite:///{path}")
    try:
        async with asyncio.timeout(30):
            await Retention(database, Settings(), lambda _: None).sweep()
        return await database.read(size_bytes) - await database.read(used_bytes)
    finally:
        database.close()


async def test_a_file_that_keeps_its_room_is_told_of_and_does_not_hold_the_retention(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await look(path) > 0
    (record,) = [record for record in caplog.records if record.name.startswith("poc_gateway")]
    assert "PRAGMA auto_vacuum=INCREMENTAL; VACUUM" in record.getMessage()


async def test_what_the_log_says_helps(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await look(path) > 0
    caplog.clear()
    with closing(sqlite3.connect(path)) as other:
        other.executescript("PRAGMA auto_vacuum=INCREMENTAL; VACUUM; CREATE TABLE junk (content)")
        other.executemany("INSERT INTO junk VALUES (?)", [(b"x" * 3_000,)] * 100)
        other.execute("DELETE FROM junk")
        other.commit()
    assert await look(path) == 0
    assert not [record for record in caplog.records if record.name.startswith("poc_gateway")]
