# SPDX-License-Identifier: Apache-2.0
"""A client that exports a round again with the cursor gets what came after, each artifact once, whatever arrives.

An artifact that a decision has replaced comes again.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import AsyncClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Select, delete, func, select, update

from poc_gateway.ingest.deliveries import CheckedArtifact, Delivery
from poc_gateway.ingest.storing import store
from poc_gateway.outbox import rivals
from poc_gateway.query import cursor, export
from poc_gateway.query.cursor import Positions, cursor_of, positions, read_cursor
from poc_gateway.query.messages import MAX_CURSOR, ArtifactsQuery
from poc_gateway.query.routes import NEXT_SINCE
from poc_gateway.store import retention, schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, load, write_down
from poc_operator.apis.v1alpha1.round import MAX_SLOTS
from poc_operator.observed import Decision, Truth
from tests.support.builders.deliveries import a_round, vector

EXPORT = "/rounds/ns/round-{uid}/artifacts"
#: Nonces that a client remembers without their values.
Nonces = list[int]
uids = (f"uid-{number}" for number in count(1))
now = count(1_767_225_600_000)


async def begin(database: Database, slots: int = 3, uid: str | None = None) -> KnownRound:
    round_ = a_round(uid or next(uids), nodes=slots)
    return await database.write(lambda connection: write_down(connection, round_))


async def deliver(database: Database, known: KnownRound, *batches: Sequence[int]) -> None:
    """Store the batches in one transaction, as the intake does."""
    deliveries = [
        Delivery(known, checked=[CheckedArtifact(known.slots[known.terms.offset_of(n)], n, vector(n)) for n in some])
        for some in batches
    ]
    await database.write(lambda connection: store(connection, deliveries, next(now)), grows=True)


async def dispute(database: Database, known: KnownRound, nonce: int, value: bytes) -> int:
    """Let another pod deliver another result; return the id of the conflict."""
    slot_id = known.slots[known.terms.offset_of(nonce)]
    delivery = Delivery(known, checked=[CheckedArtifact(slot_id, nonce, value)])
    await database.write(lambda connection: store(connection, [delivery], next(now)), grows=True)
    last = select(func.max(schema.conflicts.c.id)).where(
        schema.conflicts.c.slot_id == slot_id, schema.conflicts.c.nonce == nonce
    )
    return int(await database.read(lambda connection: connection.execute(last).scalar_one()))


async def decide(database: Database, known: KnownRound, nonce: int, conflict: int, truth: Truth = Truth.OTHER) -> None:
    """Say which result is honest, as the operator does when a third pod has computed the nonce."""
    chosen = conflict if truth is Truth.OTHER else None
    decision = Decision(nonce=nonce, truth=truth, conflict=chosen, up_to=conflict, pod="third")
    assert await database.write(lambda connection: rivals.decide(connection, known, [decision])) == 1


async def replace(database: Database, known: KnownRound, nonce: int, value: bytes) -> None:
    """Replace the result of a nonce by a decision."""
    await decide(database, known, nonce, await dispute(database, known, nonce, value))


class Client:
    """Exports a round again and again; ``between`` is called after each chunk."""

    def __init__(self, database: Database, known: KnownRound) -> None:
        self._database = database
        self._known = known
        self.cursor: str | None = None
        self.nonces = Nonces()
        self.values = dict[int, bytes]()

    async def export(self, between: Callable[[], Any] | None = None, *, breaks_off: bool = False) -> Nonces:
        start, end, after = await self._database.read(self._span)
        got = Nonces()
        async for table in export.chunks(self._database, self._known, ArtifactsQuery(), start, end):
            got += table["nonce"].to_pylist()
            if not breaks_off:
                self.values |= zip(table["nonce"].to_pylist(), table["value"].to_pylist(), strict=True)
            if between is not None:
                await between()
            if breaks_off:
                return got
        self.cursor = after
        self.nonces += got
        return got

    def _span(self, connection: Connection) -> tuple[Positions, Positions, str]:
        start = {} if self.cursor is None else read_cursor(connection, self._known, self.cursor)
        end = positions(connection, self._known)
        return start, end, cursor_of(connection, self._known, end)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "CHUNK_ROWS", 5)


async def a_life(database: Database, seed: int, locality: int, exports: int) -> None:
    random, known = Random(seed), await begin(database)  # noqa: S311
    client, stored, largest = Client(database, known), set[int](), 60

    async def arrives() -> None:
        batches = [
            [
                random.randrange(max(0, min(len(stored), largest) - locality), largest)
                for _ in range(random.randrange(6))
            ]
            for _ in range(random.randrange(4))
        ]
        await deliver(database, known, *batches)
        stored.update(nonce for batch in batches for nonce in batch)

    for _ in range(exports):
        await arrives()
        await client.export(arrives if random.random() < 0.7 else None, breaks_off=random.random() < 0.3)
    await client.export()
    assert Counter(client.nonces) == Counter(stored)
    assert await client.export() == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), locality=st.integers(1, 60), exports=st.integers(1, 8))
def test_every_artifact_comes_once_whatever_arrives_meanwhile(
    database: Database, seed: int, locality: int, exports: int
) -> None:
    asyncio.run(a_life(database, seed, locality, exports))


async def test_what_arrives_late_comes_with_the_next_export(database: Database) -> None:
    known = await begin(database, slots=1)
    client = Client(database, known)
    await deliver(database, known, [5, 9])
    assert await client.export() == [5, 9]
    await deliver(database, known, [2, 7, 12], [0])
    assert await client.export() == [0, 2, 7, 12]
    await deliver(database, known, [9, 2])  # known already
    assert await client.export() == []


async def test_what_arrives_during_an_export_comes_with_the_next(database: Database) -> None:
    known = await begin(database, slots=1)
    client, late = Client(database, known), iter([[31], [33, 90], [35]])
    await deliver(database, known, range(0, 60, 2))

    async def between() -> None:
        if (some := next(late, None)) is not None:
            await deliver(database, known, some)

    assert await client.export(between) == list(range(0, 60, 2))
    assert sorted(await client.export()) == [31, 33, 35, 90]


async def test_late_arrivals_are_read_in_bounded_chunks(database: Database) -> None:
    known = await begin(database, slots=1)
    client, sizes = Client(database, known), list[int]()
    await deliver(database, known, [100])
    await client.export()
    await deliver(database, known, range(50))

    async def between() -> None:
        sizes.append(1)

    assert await client.export(between) == list(range(50))
    assert len(sizes) == 10


async def test_a_decided_result_comes_again_once(database: Database) -> None:
    known = await begin(database, slots=1)
    client = Client(database, known)
    await deliver(database, known, range(9))
    await client.export()
    conflict = await dispute(database, known, 3, vector(100))
    assert await client.export() == []
    await decide(database, known, 3, conflict)
    await deliver(database, known, [9])
    assert await client.export() == [3, 9]
    assert client.values[3] == vector(100)
    assert await client.export() == []
    # Who begins now gets it once, in its place.
    assert await Client(database, known).export() == list(range(10))


async def test_a_decision_for_what_is_stored_brings_nothing_again(database: Database) -> None:
    known = await begin(database, slots=1)
    client = Client(database, known)
    await deliver(database, known, range(9))
    await client.export()
    for nonce, truth in ((3, Truth.STORED), (4, Truth.NEITHER)):
        await decide(database, known, nonce, await dispute(database, known, nonce, vector(100)), truth)
    assert await client.export() == []


async def test_what_arrived_late_and_was_replaced_comes_once(database: Database) -> None:
    known = await begin(database, slots=1)
    client = Client(database, known)
    await deliver(database, known, [20])
    await client.export()
    await deliver(database, known, range(9))
    await replace(database, known, 3, vector(100))
    await replace(database, known, 3, vector(101))
    await replace(database, known, 20, vector(102))
    assert sorted(await client.export()) == [*range(9), 20]
    assert (client.values[3], client.values[20]) == (vector(101), vector(102))
    await replace(database, known, 3, vector(103))
    assert await client.export() == [3]
    assert client.values[3] == vector(103)


async def test_a_decision_during_an_export_takes_nothing_from_it(database: Database) -> None:
    known = await begin(database, slots=1)
    client, decided = Client(database, known), list[int]()
    await deliver(database, known, range(20))

    async def between() -> None:
        if not decided:
            decided.extend([2, 12])
            for nonce in decided:
                await replace(database, known, nonce, vector(100 + nonce))

    assert await client.export(between) == list(range(20))
    assert await client.export() == [2, 12]
    assert (client.values[2], client.values[12]) == (vector(102), vector(112))


async def a_life_with_decisions(database: Database, seed: int) -> None:
    random, known = Random(seed), await begin(database)  # noqa: S311
    client, stored, replaced = Client(database, known), set[int](), Counter[int]()

    async def goes_on() -> None:
        for _ in range(random.randrange(3)):
            batch = [random.randrange(40) for _ in range(random.randrange(5))]
            await deliver(database, known, batch)
            stored.update(set(batch))
        for nonce in random.sample(sorted(stored), min(len(stored), random.randrange(3))):
            replaced[nonce] += 1
            await replace(database, known, nonce, vector(1_000 * replaced[nonce] + nonce))

    for _ in range(random.randrange(1, 6)):
        await goes_on()
        await client.export(goes_on if random.random() < 0.5 else None, breaks_off=random.random() < 0.2)
    await client.export()
    rows = select(schema.artifacts.c.nonce, schema.artifacts.c.vector).where(
        schema.artifacts.c.slot_id.in_(known.slots.values())
    )
    found = await database.read(lambda connection: dict(connection.execute(rows).all()))
    assert client.values == found
    assert set(found) == stored
    for nonce, times in Counter(client.nonces).items():
        assert times <= 1 + replaced[nonce]
    assert await client.export() == []


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_who_reads_on_ends_with_what_is_stored_whatever_is_decided(database: Database, seed: int) -> None:
    asyncio.run(a_life_with_decisions(database, seed))


async def test_a_restore_is_noticed_that_lost_a_decision_alone(database: Database, client: AsyncClient) -> None:
    known = await begin(database, slots=1)
    await deliver(database, known, range(9))
    await replace(database, known, 3, vector(100))
    _, since = await lines(client, known)
    back = [delete(schema.late_arrivals), update(schema.slots).values(late=0)]
    await database.write(lambda connection: [connection.execute(one) for one in back])
    assert (await refused(client, known, str(since)))[:2] == (410, "CursorExpired")


async def lines(client: AsyncClient, known: KnownRound, **parameters: Any) -> tuple[Nonces, str | None]:  # noqa: ANN401
    query = {"format": "jsonl", "uid": known.terms.uid, **parameters}
    answer = await client.get(EXPORT.format(uid=known.terms.uid), params=query)
    assert answer.status_code == 200, answer.text
    return [json.loads(line)["nonce"] for line in answer.text.splitlines()], answer.headers.get(NEXT_SINCE)


async def refused(client: AsyncClient, known: KnownRound, since: str, **parameters: Any) -> tuple[int, str, str]:  # noqa: ANN401
    answer = await client.get(EXPORT.format(uid=known.terms.uid), params={"since": since, **parameters})
    return answer.status_code, answer.json()["reason"], answer.json()["detail"]


async def test_the_header_of_an_export_is_since_of_the_next(database: Database, client: AsyncClient) -> None:
    known = await begin(database)
    await deliver(database, known, range(20))
    first, since = await lines(client, known)
    assert sorted(first) == list(range(20))
    await deliver(database, known, range(20, 26))
    assert await lines(client, known, since=since, slot=1) == ([22, 25], (await lines(client, known))[1])
    assert sorted((await lines(client, known, since=since))[0]) == list(range(20, 26))


async def test_a_limited_export_has_no_cursor(database: Database, client: AsyncClient) -> None:
    known = await begin(database)
    await deliver(database, known, range(20))
    _, since = await lines(client, known)
    assert await lines(client, known, limit=3) == ([0, 3, 6], None)
    status, reason, detail = await refused(client, known, str(since), limit=3)
    assert (status, reason) == (422, "InvalidRequest")
    assert "leave out limit or since" in detail


async def test_a_cursor_that_is_none_says_what_to_send(database: Database, client: AsyncClient) -> None:
    known = await begin(database)
    await deliver(database, known, range(20))
    _, since = await lines(client, known)
    assert since is not None
    for bad in ("", "x", "17", since[:-1], since[1:], since[:40] + "A" + since[41:], "ä" * 40, "A" * 60, "-_" * 99):
        status, reason, detail = await refused(client, known, bad)
        assert (status, reason) == (422, "InvalidRequest"), bad
        assert detail.startswith("since: is no cursor: send X-Next-Since"), bad
    assert (await refused(client, known, "A" * (MAX_CURSOR + 1)))[:2] == (422, "InvalidRequest")


async def test_a_cursor_of_another_round_is_refused(database: Database, client: AsyncClient) -> None:
    known, other = await begin(database), await begin(database)
    _, since = await lines(client, other)
    status, reason, detail = await refused(client, known, str(since))
    assert (status, reason) == (422, "InvalidRequest")
    assert "of another round" in detail


async def test_other_rounds_may_be_deleted(database: Database, client: AsyncClient) -> None:
    old, known = await begin(database), await begin(database)
    await deliver(database, old, range(9))
    await deliver(database, known, range(9))
    _, since = await lines(client, known)
    await delete_round(database, old)
    await deliver(database, known, [9])
    assert (await lines(client, known, since=since))[0] == [9]


async def delete_round(database: Database, known: KnownRound) -> None:
    gone = update(schema.rounds).where(schema.rounds.c.id == known.id).values(deleted_at=1)
    await database.write(lambda connection: connection.execute(gone))
    while await database.write(lambda connection: retention.delete_some(connection, known.id)):
        pass


async def test_a_round_that_began_anew_says_so(database: Database, client: AsyncClient) -> None:
    known = await begin(database)
    await deliver(database, known, range(9))
    _, since = await lines(client, known)
    await delete_round(database, known)
    again = await begin(database, uid=known.terms.uid)
    await deliver(database, again, range(9))
    status, reason, detail = await refused(client, again, str(since))
    assert (status, reason) == (410, "CursorExpired")
    assert "export the round again without since" in detail


@pytest.mark.parametrize("came_again", [range(9), range(30), ()], ids=["as far", "further", "not at all"])
async def test_a_restored_database_is_noticed(
    database: Database, client: AsyncClient, came_again: Sequence[int]
) -> None:
    known = await begin(database)
    await deliver(database, known, range(3))
    await deliver(database, known, range(3, 9))
    _, since = await lines(client, known)
    # As a restore leaves it: what came after the backup is gone, and comes again later.
    table = schema.artifacts.c
    back = [
        delete(schema.artifacts).where(table.nonce >= 3),
        update(schema.slots).values(last_nonce=schema.slots.c.slot),
    ]
    await database.write(lambda connection: [connection.execute(one) for one in back])
    await deliver(database, known, came_again)
    assert (await refused(client, known, str(since)))[:2] == (410, "CursorExpired")


async def test_a_restore_is_noticed_that_lost_late_arrivals_alone(database: Database, client: AsyncClient) -> None:
    known = await begin(database, slots=1)
    await deliver(database, known, [9])
    await deliver(database, known, [3])
    _, since = await lines(client, known)
    back = [
        delete(schema.artifacts).where(schema.artifacts.c.nonce == 3),
        delete(schema.late_arrivals),
        update(schema.slots).values(late=0),
    ]
    await database.write(lambda connection: [connection.execute(one) for one in back])
    await deliver(database, known, [4])
    assert (await refused(client, known, str(since)))[:2] == (410, "CursorExpired")


async def test_a_deleted_round_takes_its_late_arrivals_along(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "CHUNK_ROWS", 3)
    known = await begin(database, slots=2)
    await deliver(database, known, [100, 101])
    await deliver(database, known, range(20))
    rows = select(schema.late_arrivals.c.number)
    assert len(await database.read(lambda connection: connection.scalars(rows).all())) == 20
    await delete_round(database, known)
    assert await database.read(lambda connection: connection.scalars(rows).all()) == []
    assert await database.read(lambda connection: load(connection, known.terms.uid)) is None


async def test_a_cursor_is_made_by_keys_alone(database: Database) -> None:
    """Whatever the tables hold, a cursor takes a look-up per slot: no table may be read as a whole."""
    pairs = [(slot, 7) for slot in range(300)]

    def plan(connection: Connection, query: Select[int, int, int]) -> str:
        explain = "EXPLAIN QUERY PLAN "
        if connection.dialect.name == "postgresql":
            # Empty tables are always read as a whole, unless it is told that this is dear.
            connection.exec_driver_sql("SET enable_seqscan = off")
            explain = "EXPLAIN "
        text = str(query.compile(connection, compile_kwargs={"literal_binds": True}))
        return "\n".join(str(row) for row in connection.exec_driver_sql(explain + text))

    for query in (cursor._moments(pairs), cursor._late_moments(pairs)):
        found = await database.read(partial(plan, query=query))
        assert "SCAN artifacts" not in found
        assert "SCAN late_arrivals" not in found
        assert "Seq Scan" not in found


async def test_the_largest_round_has_a_cursor_that_fits_in_a_header(database: Database, app: FastAPI) -> None:
    """Progress like a real round's: 20 million artifacts, each slot within a tenth of the others."""
    assert app.routes
    known, random = await begin(database, slots=MAX_SLOTS), Random(1)  # noqa: S311
    each = 20_000_000 // MAX_SLOTS
    reached = {
        offset: cursor.Position(offset + MAX_SLOTS * int(each * random.uniform(0.9, 1.0)), random.randrange(3))
        for offset in known.slots
    }
    text = await database.read(lambda connection: cursor_of(connection, known, reached))
    assert len(text) < 8_000
    assert await database.read(lambda connection: read_cursor(connection, known, text)) == reached
