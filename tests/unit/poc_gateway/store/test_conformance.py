# SPDX-License-Identifier: Apache-2.0
"""What any database behind the gateway must do, whichever it is: the gateway relies on each of these statements.

They run on every one of `ENGINES`. A database that joins them gets a URL in ``tests/unit/poc_gateway/conftest.py``, and
is supported when this module passes.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Table, delete, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from poc_gateway.store import migrations, schema
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseUnavailable, create_engine
from poc_gateway.store.reserve import release_free_pages, size_bytes, used_bytes
from poc_gateway.store.schema import artifacts, callbacks, conflicts, jobs, late_items, one_line, rounds, slots
from tests.support.builders.deliveries import a_round
from tests.support.builders.stored import store
from tests.support.fakes.held_write import HeldWrite

SECONDS = 10
#: The largest of each kind that is stored.
LARGEST_NONCE, LARGEST_MOMENT = 2**31 - 1, 2**63 - 1
TEXTS = ["", "a'b\"c;--", "%s %(x)s :x ?", "line\nbreak", "Größe", "\N{PILE OF POO}", "x" * 1_000_000]


def add_job(id_: str = "a", **values: Any) -> Callable[[Connection], None]:  # noqa: ANN401
    """A write of a row that nothing else needs."""

    def write(connection: Connection) -> None:
        row = {"id": id_, "request": "{}", "state": "queued", "created_at": 0} | values
        connection.execute(insert(jobs).values(row))

    return write


def count(table: Table) -> Callable[[Connection], int]:
    """A read of how many rows there are."""
    return lambda connection: int(connection.scalar(select(func.count()).select_from(table)) or 0)


# The schema.


async def test_the_migrations_make_the_schema(database: Database) -> None:
    def differences(connection: Connection) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection), schema.metadata))

    assert await database.read(differences) == []


def test_what_an_older_gateway_stored_is_kept(database_url: str) -> None:
    config, engine = Config(), create_engine(database_url)
    config.set_main_option("script_location", migrations.__path__[0])
    round_ = {"uid": "u", "namespace": "ns", "name": "n", "block_hash": "b", "block_height": 1, "public_key": "k"}
    terms = {"protocol": "artifact", "model": "m", "seq_len": 1, "node_count": 1, "n_groups": 1, "created_at": 3}
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        round_id = connection.scalar(insert(rounds).values(**round_, **terms).returning(rounds.c.id))
        row = {"round_id": round_id, "slot": 0, "node_id": 0, "group_id": 0}
        slot_id = connection.scalar(insert(slots).values(row).returning(slots.c.id))
        letter = text("INSERT INTO letters VALUES (:slot, 7, 'dead', 'HTTP 400', 5)")
        connection.execute(letter, {"slot": slot_id})
    Database.open(database_url).close()
    with engine.begin() as connection:
        assert connection.execute(select(late_items)).all() == [(slot_id, 7, "refused", "HTTP 400", 5)]
        # Its clock is not trusted yet.
        assert connection.scalar(text("SELECT steady FROM clock")) == 0
        # It was last heard of when the round was written down.
        assert connection.scalars(select(slots.c.heard_at)).all() == [3]
        config.attributes["connection"] = connection
        command.downgrade(config, "0002")
        assert connection.execute(text("SELECT nonce, state FROM letters")).all() == [(7, "dead")]
    engine.dispose()


@pytest.mark.parametrize(
    ("stored", "missing"),
    [([], 1), ([1, 4, 7], 10), ([4, 7], 1), ([1, 4, 10, 13], 7), ([1], 4), ([10], 1)],
    ids=str,
)
def test_the_first_gap_of_what_an_older_gateway_stored_is_found(
    database_url: str, stored: list[int], missing: int
) -> None:
    config, engine = Config(), create_engine(database_url)
    config.set_main_option("script_location", migrations.__path__[0])
    round_ = {"uid": "u", "namespace": "ns", "name": "n", "block_hash": "b", "block_height": 1, "public_key": "k"}
    terms = {"protocol": "artifact", "model": "m", "seq_len": 1, "node_count": 1, "n_groups": 3, "created_at": 0}
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
        round_id = connection.scalar(insert(rounds).values(**round_, **terms).returning(rounds.c.id))
        counts = {"stored": len(stored), "last_nonce": max(stored, default=-1)}
        row = {"round_id": round_id, "slot": 1, "node_id": 0, "group_id": 1, **counts}
        slot_id = connection.scalar(insert(slots).values(row).returning(slots.c.id))
        for nonce in stored:
            values = {"slot": slot_id, "nonce": nonce}
            artifact = "INSERT INTO artifacts (slot_id, nonce, received_at) VALUES (:slot, :nonce, 0)"
            connection.execute(text(artifact), values)
    Database.open(database_url).close()
    with engine.begin() as connection:
        assert connection.scalar(select(slots.c.missing_nonce)) == missing
        config.attributes["connection"] = connection
        command.downgrade(config, "0003")
        assert len(connection.execute(text("SELECT nonce FROM artifacts")).all()) == len(stored)
    engine.dispose()


def test_what_a_newer_gateway_made_is_refused(database_url: str) -> None:
    database = Database.open(database_url)
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(DatabaseUnavailable, match="use a newer gateway"):
        Database.open(database_url)


# Writes and reads.


async def test_a_write_is_there_when_it_returns(database: Database, database_url: str) -> None:
    await database.write(add_job())
    engine = create_engine(database_url)
    with engine.connect() as other:
        assert count(jobs)(other) == 1
    engine.dispose()


async def test_what_was_written_outlives_the_process(database_url: str) -> None:
    first = Database.open(database_url)
    await first.write(add_job())
    first.close()
    second = Database.open(database_url)
    assert await second.read(count(jobs)) == 1
    second.close()


async def test_a_write_that_fails_changes_nothing_and_takes_no_other_along(database: Database) -> None:
    def fail(connection: Connection) -> None:
        add_job("failed")(connection)
        raise LookupError("a defect")

    held = HeldWrite()
    first = asyncio.create_task(database.write(held))
    await held.begun()
    # All of these wait for the first, and are committed together.
    others = [database.write(fail if number == 5 else add_job(f"job {number}")) for number in range(10)]
    waiting = asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)
    held.release.set()
    await first
    assert [type(result) for result in await waiting if result is not None] == [LookupError]
    ids = await database.read(lambda connection: connection.scalars(select(jobs.c.id)).all())
    assert sorted(ids) == [f"job {number}" for number in range(10) if number != 5]


async def test_a_write_may_rely_on_what_it_has_read(database: Database) -> None:
    await database.write(add_job())

    def increment(connection: Connection) -> None:
        before = connection.scalar(select(jobs.c.created_at)) or 0
        connection.execute(update(jobs).values(created_at=before + 1))

    await asyncio.gather(*[database.write(increment) for _ in range(50)])
    assert await database.read(lambda connection: connection.scalar(select(jobs.c.created_at))) == 50


async def test_a_read_neither_waits_for_a_write_nor_sees_half_of_it(database: Database) -> None:
    held = HeldWrite()

    def half(connection: Connection) -> None:
        add_job()(connection)
        held(connection)
        add_job("b")(connection)

    writing = asyncio.create_task(database.write(half))
    await held.begun()
    async with asyncio.timeout(SECONDS):
        assert await database.read(count(jobs)) == 0
    held.release.set()
    await writing
    assert await database.read(count(jobs)) == 2


# Values.


@pytest.mark.parametrize("content", TEXTS, ids=lambda content: content[:12])
async def test_a_text_is_stored_as_it_is(database: Database, content: str) -> None:
    await database.write(add_job(result=content))
    assert await database.read(lambda connection: connection.scalar(select(jobs.c.result))) == content


@pytest.mark.parametrize("content", ["a\0b", "a\ud800b", "a\nb", "a\N{LINE SEPARATOR}b", "a\x1b[0mb"])
async def test_whatever_others_say_can_be_stored_as_one_line(database: Database, content: str) -> None:
    await database.write(add_job(error=one_line(content)))
    stored = await database.read(lambda connection: connection.scalar(select(jobs.c.error)))
    assert stored in ("a b", "a [0mb")


async def test_numbers_and_bytes_are_exact(database: Database) -> None:
    known = await store(database, a_round(), [])
    (slot,) = known.slots.values()
    values = {0: 0.1, 1: 5e-324, 2: 1.7976931348623157e308, LARGEST_NONCE: 1 / 3}
    vectors = {3: b"", 4: bytes(range(256)), 5: b"\0" * 4_096}
    rows: list[dict[str, Any]] = [
        {"slot_id": slot, "nonce": nonce, "vector": None, "distance": value, "received_at": LARGEST_MOMENT}
        for nonce, value in values.items()
    ]
    rows += [
        {"slot_id": slot, "nonce": nonce, "vector": value, "distance": None, "received_at": 0}
        for nonce, value in vectors.items()
    ]
    await database.write(lambda connection: connection.execute(insert(artifacts), rows) and None)
    columns = select(artifacts.c.nonce, artifacts.c.vector, artifacts.c.distance, artifacts.c.received_at)
    found = await database.read(lambda connection: connection.execute(columns.order_by(artifacts.c.nonce)).all())
    assert [row.nonce for row in found] == [0, 1, 2, 3, 4, 5, LARGEST_NONCE]
    assert {row.nonce: row.distance for row in found if row.distance is not None} == values
    assert {row.nonce: bytes(row.vector) for row in found if row.vector is not None} == vectors
    assert {row.received_at for row in found} == {0, LARGEST_MOMENT}


# Keys.


async def test_a_nonce_is_stored_once(database: Database) -> None:
    known = await store(database, a_round(), [0])

    def again(connection: Connection) -> None:
        add_job()(connection)
        row = {"slot_id": known.slots[0], "nonce": 0, "received_at": 0}
        connection.execute(insert(artifacts).values(row))

    with pytest.raises(IntegrityError):
        await database.write(again)
    assert await database.read(count(jobs)) == 0


async def test_an_id_is_never_given_again(database: Database) -> None:
    first = await store(database, a_round("uid-1"), [])
    await database.write(lambda connection: connection.execute(delete(rounds)) and None)
    second = await store(database, a_round("uid-2"), [])
    assert second.id > first.id
    assert min(second.slots.values()) > max(first.slots.values())


async def test_with_a_round_goes_everything_of_it_and_nothing_else(database: Database) -> None:
    kept = await store(database, a_round("uid-1"), range(3))
    gone = await store(database, a_round("uid-2"), range(3))

    def fill(connection: Connection) -> None:
        for known in (kept, gone):
            key = {"slot_id": known.slots[0], "nonce": 1}
            connection.execute(insert(conflicts).values(**key, received_at=0))
            connection.execute(insert(late_items).values(**key, state="waiting", reason="late", since=0))
            connection.execute(insert(callbacks).values(round_id=known.id, body="{}", state="kept", created_at=0))
        connection.execute(delete(rounds).where(rounds.c.id == gone.id))

    await database.write(fill)
    expected = {rounds: 1, slots: 1, artifacts: 3, conflicts: 1, late_items: 1, callbacks: 1}
    assert {table: await database.read(count(table)) for table in expected} == expected


async def test_with_a_job_go_its_callbacks(database: Database) -> None:
    await database.write(add_job())
    row = {"job_id": "a", "body": "{}", "state": "waiting", "created_at": 0}
    await database.write(lambda connection: connection.execute(insert(callbacks).values(row)) and None)
    await database.write(lambda connection: connection.execute(delete(jobs)) and None)
    assert await database.read(count(callbacks)) == 0


# Space.


async def test_what_rows_take_is_known_and_less_when_they_are_gone(database: Database) -> None:
    empty, size = await database.read(used_bytes), await database.read(size_bytes)
    await store(database, a_round(), range(20_000))
    full = await database.read(used_bytes)
    assert full - empty > 20_000 * 24
    assert await database.read(size_bytes) > size
    await database.write(lambda connection: connection.execute(delete(rounds)) and None)
    async with asyncio.timeout(SECONDS):
        while await database.write(release_free_pages):
            pass
    assert await database.read(used_bytes) < (empty + full) / 2
