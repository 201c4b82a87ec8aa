# SPDX-License-Identifier: Apache-2.0
"""Which rounds are deleted, and that their room is given back."""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from poc_gateway.outbox import ledger
from poc_gateway.outbox.ledger import SlotArrivals
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.reserve import size_bytes, used_bytes
from poc_gateway.store.retention import CHUNK_ROWS, Clock, Retention, begin, deletable
from poc_gateway.store.rounds import write_down
from tests.support.builders.deliveries import a_round, vector

DAY = 86_400
RECEIVER = "http://receiver"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def add(database: Database, uid: str, *, days: float, count: int = 3, **changes: Any) -> int:  # noqa: ANN401
    """Write a round down whose last artifact came so many days ago; ``changes`` are of its slot."""
    receiver = changes.pop("receiver", None)
    moment = now_ms() - int(days * DAY * 1000)

    def work(connection: Connection) -> int:
        known = write_down(connection, a_round(uid, callbackURL=receiver))
        slot = known.slots[0]
        rows = [{"slot_id": slot, "nonce": n, "vector": vector(n), "received_at": moment} for n in range(count)]
        connection.execute(schema.artifacts.insert(), rows)
        connection.execute(update(schema.rounds).where(schema.rounds.c.id == known.id).values(created_at=moment))
        values = {"stored": count, "last_nonce": count - 1, "heard_at": moment, **changes}
        connection.execute(update(schema.slots).where(schema.slots.c.id == slot).values(**values))
        return slot

    return await database.write(work)


async def letter(database: Database, slot: int, nonce: int, *, state: str, days: float) -> None:
    since = now_ms() - int(days * DAY * 1000)
    values = {"slot_id": slot, "nonce": nonce, "state": state, "reason": "HTTP 400", "since": since}
    await database.write(lambda one: one.execute(schema.late_items.insert().values(values)))


async def look(database: Database, *, seconds: int = 0, size: int = 0) -> list[str]:
    """Let the retention look once; return the uids that it told were deleted."""
    forgotten: list[str] = []
    names = {"POC_GATEWAY_RETENTION_SECONDS": str(seconds), "POC_GATEWAY_RETENTION_BYTES": str(size)}
    await Retention(database, Settings.from_environment(names), forgotten.append).sweep()
    return forgotten


async def uids(database: Database) -> set[str]:
    return set(await database.read(lambda one: one.scalars(select(schema.rounds.c.uid)).all()))


async def test_old_rounds_are_deleted_whole(database: Database) -> None:
    await add(database, "old", days=3, count=2 * CHUNK_ROWS + 1)
    await add(database, "sent", days=3, receiver=RECEIVER, forwarded=3, forwarded_nonce=2)
    await add(database, "young", days=1)
    assert await look(database, seconds=2 * DAY) == ["old", "sent"]
    assert await uids(database) == {"young"}
    left: Iterable[int] = await database.read(lambda one: one.scalars(select(schema.artifacts.c.nonce)).all())
    assert list(left) == [0, 1, 2]


async def test_a_deletion_that_was_begun_goes_on_after_a_restart(database: Database) -> None:
    await add(database, "begun", days=0, receiver=RECEIVER)
    await database.write(lambda one: one.execute(update(schema.rounds).values(deleted_at=1)))
    await add(database, "kept", days=0)
    assert await look(database) == ["begun"]
    assert await uids(database) == {"kept"}


@pytest.mark.parametrize(("days_ago", "begins"), [(3, True), (0, False)])
async def test_a_round_that_something_arrived_for_meanwhile_is_kept(
    database: Database, days_ago: int, *, begins: bool
) -> None:
    await add(database, "old", days=3)
    query = deletable(now_ms() - DAY * 1000, 0)
    heard = now_ms() - days_ago * DAY * 1000
    found = await database.read(lambda one: one.execute(query).one())
    await database.write(lambda one: one.execute(update(schema.slots).values(heard_at=heard)))
    assert await database.write(lambda one: begin(one, query, found.id)) is begins
    deleted_at = await database.read(lambda one: one.scalar(select(schema.rounds.c.deleted_at)))
    assert (deleted_at is not None) is begins


async def test_without_retention_everything_is_kept(database: Database) -> None:
    await add(database, "old", days=3000)
    assert await look(database) == []


async def test_a_round_that_still_receives_is_kept(database: Database) -> None:
    await add(database, "running", days=1)
    await database.write(lambda one: one.execute(update(schema.rounds).values(created_at=0)))
    assert await look(database, seconds=2 * DAY) == []


async def test_a_round_whose_results_only_come_again_or_late_is_kept(database: Database) -> None:
    """Its largest nonce is old, and it runs all the same."""
    await add(database, "running", days=3)
    slot = await add(database, "late", days=3)
    await database.write(lambda one: one.execute(update(schema.rounds).values(created_at=0)))
    for_late = partial(ledger.arrived, arrivals={slot: SlotArrivals(2, 2, 3, duplicates=1)}, moment=now_ms())
    await database.write(for_late)
    assert await look(database, seconds=2 * DAY) == ["running"]
    assert await look(database, size=1) == []


@pytest.mark.parametrize("days", [-40, 40])
async def test_after_a_step_of_the_clock_nothing_is_deleted_for_a_while(database: Database, days: int) -> None:
    wall, passed = [time.time()], [0.0]
    clock = Clock(database, wall=lambda: wall[0], monotonic=lambda: passed[0])
    names = {"POC_GATEWAY_RETENTION_SECONDS": str(30 * DAY), "POC_GATEWAY_RETENTION_BYTES": "1"}
    retention = Retention(database, Settings.from_environment(names), lambda _: None, clock)
    await retention.sweep()
    # To the gateway the running round now looks as old as the step is long.
    await add(database, "running", days=abs(days))
    wall[0] += days * DAY
    for _ in range(3):
        await retention.sweep()
        wall[0], passed[0] = wall[0] + 600, passed[0] + 600
    assert await uids(database) == {"running"}
    wall[0], passed[0] = wall[0] + DAY, passed[0] + DAY
    await retention.sweep()
    assert await uids(database) == set()


@pytest.mark.parametrize(("away", "trusted"), [(-3600, False), (-30, True), (3600, True), (40 * DAY, False)])
async def test_a_clock_that_was_set_while_the_gateway_was_off_is_found(
    database: Database, away: float, *, trusted: bool
) -> None:
    before = Clock(database, wall=lambda: 1_000_000.0, monotonic=lambda: 5.0)
    assert await before.is_steady(DAY)
    after = Clock(database, wall=lambda: 1_000_000.0 + away, monotonic=lambda: 9.0)
    assert await after.is_steady(DAY) is trusted
    again = Clock(database, wall=lambda: 1_000_000.0 + away, monotonic=lambda: 9.0)
    assert await again.is_steady(DAY) is trusted


@pytest.mark.parametrize("limits", [{"seconds": DAY}, {"size": 1}])
async def test_what_is_not_forwarded_is_kept(database: Database, limits: dict[str, int]) -> None:
    await add(database, "backlog", days=30, receiver=RECEIVER, forwarded=2, forwarded_nonce=1)
    slot = await add(database, "late", days=30, receiver=RECEIVER, forwarded=2, forwarded_nonce=2)
    await letter(database, slot, 1, state="waiting", days=30)
    await add(database, "counted-twice", days=30, receiver=RECEIVER, forwarded=3, forwarded_nonce=1)
    known = await add(database, "verdict", days=30, receiver=RECEIVER, forwarded=3, forwarded_nonce=2)
    values = {"round_id": known, "url": RECEIVER, "body": "{}", "state": "waiting", "created_at": 0}
    await database.write(lambda one: one.execute(schema.callbacks.insert().values(values)))
    assert await look(database, **limits) == []


async def test_young_dead_letters_are_kept(database: Database) -> None:
    for uid, days in (("old-letter", 20), ("young-letter", 1)):
        slot = await add(database, uid, days=30, receiver=RECEIVER, forwarded=2, forwarded_nonce=2)
        await letter(database, slot, 1, state="refused", days=days)
    assert await look(database, seconds=10 * DAY) == ["old-letter"]


async def test_the_oldest_go_while_the_database_is_too_large(database: Database) -> None:
    for number, uid in enumerate(("oldest", "older", "old")):
        await add(database, uid, days=10 - number, count=3 * CHUNK_ROWS)
    await add(database, "running", days=0, count=CHUNK_ROWS)
    used = await database.read(used_bytes)
    assert await look(database, size=used - 1) == ["oldest"]
    assert await look(database, size=1) == ["older", "old"]
    assert await uids(database) == {"running"}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_room_is_given_back(database: Database) -> None:
    await add(database, "old", days=10, count=20 * CHUNK_ROWS)
    before = await database.read(size_bytes)
    await look(database, seconds=DAY)
    after = await database.read(size_bytes)
    assert after < before / 10
    assert after == await database.read(used_bytes)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_the_estimate_of_the_rows_is_near_the_truth(database: Database) -> None:
    empty = await database.read(size_bytes)
    await add(database, "round", days=0, count=20 * CHUNK_ROWS)
    grown = await database.read(size_bytes) - empty
    assert await database.read(used_bytes) == pytest.approx(grown, rel=0.25)
