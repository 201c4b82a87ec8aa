# SPDX-License-Identifier: Apache-2.0
"""A real file system that is full: nothing new is stored, everything else goes on, and all is well when there is room.

The tests mount a file system of some MiB, for which they need the rights of root.
"""

import asyncio
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, update

from poc_gateway.outbox.forward import Outbox
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseFull, DatabaseUnavailable
from poc_gateway.store.reserve import Room
from poc_gateway.store.retention import Retention
from tests.support.builders import forwarding
from tests.support.builders.deliveries import a_round, artifacts
from tests.support.builders.forwarding import Receiver, running, until
from tests.unit.poc_gateway.ingest.conftest import Start

DISK, RESERVE = 24 * 2**20, 4 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def database(disk: Path) -> Iterator[Database]:
    database = Database.open(f"sqlite:///{disk}/gateway.db", reserve_bytes=RESERVE)
    yield database
    database.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver().served() as served:
        yield served


def fill(disk: Path) -> Path:
    """Take all room that is left."""
    junk = disk / "junk"
    with junk.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65_536)
        except OSError:
            pass
        try:
            while True:
                file.write(b"x")
        except OSError:
            pass
    return junk


async def test_on_a_full_disk_everything_goes_on_that_stores_nothing_new(
    disk: Path,
    database: Database,
    start: Start,
    receiver: Receiver,
) -> None:
    async with start(a_round(callbackURL=receiver.url), a_round("uid-2")) as gateway:
        assert (await gateway.deliver(artifacts(range(3_000))))[0] == 200
        assert (await gateway.deliver(artifacts(range(3_000)), uid="uid-2"))[0] == 200
        junk = fill(disk)
        status, nonce = 200, 3_000
        while status == 200:  # what was free inside of the file
            status, body = await gateway.deliver(artifacts(range(nonce, nonce + 1_000)))
            nonce += 1_000 if status == 200 else 0
        assert (status, body["reason"]) == (507, "StorageFull")
        assert (await gateway.deliver(artifacts([0]), uid="uid-2"))[0] == 507
        assert await gateway.get("/readyz") == (200, {"status": "OK", "storage": "full"})
        assert (await gateway.get("/rounds"))[0] == 200

        async with running(Outbox(database, forwarding.settings(payload_artifacts=500))):
            await until(lambda: sum(len(post.body["artifacts"]) for post in receiver.accepted) == nonce)
        await database.write(lambda one: one.execute(update(schema.rounds).values(created_at=0)) and None)
        await database.write(lambda one: one.execute(update(schema.slots).values(heard_at=0)) and None)
        names = {"POC_GATEWAY_RETENTION_SECONDS": "86400"}
        await Retention(database, Settings.from_environment(names), gateway.forget).sweep()
        assert not await gateway.rows(schema.artifacts)

        junk.unlink()
        began = time.monotonic()
        while (await gateway.deliver(artifacts(range(10)), uid="uid-2"))[0] != 200:
            assert time.monotonic() - began < 40
            await asyncio.sleep(0.2)
        assert await gateway.get("/readyz") == (200, {"status": "OK"})
        # The reserve is there again for the next time.
        assert (disk / "gateway.db-reserve").stat().st_blocks * 512 >= RESERVE


async def test_nothing_that_was_acknowledged_is_lost(
    disk: Path,
    database: Database,
    start: Start,
) -> None:
    async with start(a_round()) as gateway:
        taken = list[int]()
        fill(disk)
        for nonce in range(0, 200_000, 500):
            nonces = range(nonce, nonce + 500)
            status, _ = await gateway.deliver(artifacts(nonces))
            if status != 200:
                break
            taken += nonces
        assert status == 507
    database.close()
    again = Database.open(f"sqlite:///{disk}/gateway.db", reserve_bytes=RESERVE)
    try:
        found = await again.read(lambda one: one.scalars(select(schema.artifacts.c.nonce)).all())
        assert sorted(found) == taken
        with pytest.raises(DatabaseFull):
            await again.write(lambda _: None, grows=True)
        await again.write(lambda one: one.execute(update(schema.slots).values(heard_at=1)) and None)
    finally:
        again.close()


async def test_any_failure_on_a_full_disk_gives_the_reserve_to_the_rest(disk: Path, database: Database) -> None:
    """SQLite has failures that do not say that the disk is full."""

    def fail(_: Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    attempts = list[int]()

    def fail_once(_: Connection) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(DatabaseUnavailable):
        await database.write(fail, grows=True)
    fill(disk)
    await database.write(fail_once)
    with pytest.raises(DatabaseFull):
        await database.write(lambda _: None, grows=True)


async def test_a_volume_that_cannot_be_asked_for_its_room_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(116, "Stale file handle")

    def refuse(_: Connection) -> None:
        raise ValueError("no")

    database = Database.open(f"sqlite:///{tmp_path}/gateway.db", reserve_bytes=1 << 20)
    monkeypatch.setattr("poc_gateway.store.reserve.os.statvfs", fail)
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await database.write(refuse)
    finally:
        database.close()


def test_without_a_reserve_a_write_is_tried_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("poc_gateway.store.reserve.time.monotonic", lambda: now[0])
    room = Room.beside("postgresql://u@/d", 1)
    assert not room.ran_out()
    assert not room.admits()
    now[0] = 6.0
    assert [room.admits() for _ in range(3)] == [True, False, False]
    room.stored()
    assert room.admits()
    assert not room.full
