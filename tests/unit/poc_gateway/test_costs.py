# SPDX-License-Identifier: Apache-2.0
"""Nothing that the gateway does takes longer because more artifacts are stored: a round of a day has 20 million.

The databases count for us: SQLite the steps of its machine, PostgreSQL the rows that it reads of the artifacts.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, insert, text, update

from poc_gateway.ingest.deliveries import CheckedArtifact, Delivery
from poc_gateway.ingest.quotas import Allowances, Quota
from poc_gateway.ingest.storing import store
from poc_gateway.outbox import endings, ledger, listing
from poc_gateway.outbox.states import Event, State
from poc_gateway.query import queries, summary
from poc_gateway.query.archive import unarchived
from poc_gateway.query.cursor import cursor_of, positions, read_cursor
from poc_gateway.query.export import Scan
from poc_gateway.query.messages import ArtifactsQuery, ConflictsQuery, RoundsQuery
from poc_gateway.server import gauges
from poc_gateway.store import retention, schema
from poc_gateway.store.database import Database
from poc_gateway.store.reserve import Room, used_bytes
from poc_gateway.store.rounds import KnownRound, write_down
from tests.support.builders.deliveries import a_round, vector

#: Artifacts of a slot, before and after many have come: more than any transaction or page may take, and five times.
FEW, MANY = 15_000, 75_000
SLOTS = 2
#: SQLite calls after so many of its machine's steps.
STEPS = 100
_FILL = {
    "sqlite": "WITH RECURSIVE each(i) AS (SELECT :begin UNION ALL SELECT i + 1 FROM each WHERE i + 1 < :end)",
    "postgresql": "WITH each(i) AS (SELECT generate_series(CAST(:begin AS int), CAST(:end AS int) - 1))",
}
_INSERT = "INSERT INTO artifacts (slot_id, nonce, vector, received_at) "
#: The second nonce of each slot is missing, and what comes after the next gap is most of the slot.
_ROWS = "SELECT :slot_id, :slot + i * 2, :vector, i FROM each WHERE i NOT IN (1, 3)"
_READ = "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = 'artifacts'"

Case = Callable[[Connection, KnownRound], Any]


def _work(known: KnownRound) -> ledger.SlotWork:
    return ledger.SlotWork(known.slots[0], 0, 0, is_behind=True, has_late=True)


def _deliver(connection: Connection, known: KnownRound, nonces: list[int]) -> None:
    checked = [CheckedArtifact(known.slots[nonce % SLOTS], nonce, vector(nonce)) for nonce in nonces]
    (result,) = store(connection, [Delivery(known, checked=checked)], ledger.now())
    assert result is not None


def _gauges(connection: Connection, _: KnownRound) -> object:
    return gauges._values(connection)


def _export(connection: Connection, known: KnownRound) -> object:
    query = ArtifactsQuery(nonce_from=900, nonce_to=1_100)
    return Scan(known, query, {}, positions(connection, known)).read(connection)


def _continue(connection: Connection, known: KnownRound) -> object:
    return read_cursor(connection, known, cursor_of(connection, known, positions(connection, known)))


def _count(connection: Connection, known: KnownRound) -> object:
    quota = Quota(Room(None), results=10, percent=0)
    found = Allowances(quota).of(connection, [Delivery(known, checked=[])])
    assert found[known.id].left(known.slots[0], Counter()) == 0
    return found


CASES: dict[str, Case] = {
    "deliver the next ones": lambda one, known: _deliver(one, known, list(range(10**6, 10**6 + 100))),
    "deliver what is there": lambda one, known: _deliver(one, known, list(range(100, 200))),
    "fill a gap before another": lambda one, known: _deliver(one, known, [2]),
    "rounds with work": lambda one, _: ledger.rounds_with_work(one),
    "slots with work": lambda one, known: ledger.slots_with_work(one, known.id),
    "forward in order": lambda one, known: ledger.next_in_order(one, _work(known), 1_000),
    "forward late items": lambda one, known: ledger.next_late(one, _work(known), 1_000),
    "accept": lambda one, known: ledger.accepted(one, ledger.next_in_order(one, _work(known), 100)),
    "rounds overdue": lambda one, _: endings.rounds_overdue(one, ledger.now() + 10**6),
    "expire late items": lambda one, known: endings.end_some(one, known.id, Event.EXPIRED, "old"),
    "counts": lambda one, known: listing.counts(one, known.id),
    "dead letters": lambda one, known: listing.dead_letters(one, known.id, after=-1, limit=100),
    **{
        f"what is {state}": lambda one, known, state=state: listing.entries(  # type: ignore[misc]
            one, known.id, state, after=-1, limit=100
        )
        for state in State
    },
    "due for deletion": lambda one, _: one.execute(retention.deletable(ledger.now() + 10**6, 0)).all(),
    "due for the archive": lambda one, _: one.execute(unarchived(ledger.now() + 10**6)).all(),
    "count for a limit": _count,
    "delete some": lambda one, known: retention.delete_some(one, known.id),
    "used bytes": lambda one, _: used_bytes(one),
    "list rounds": lambda one, _: queries.round_page(one, RoundsQuery()),
    "list undelivered rounds": lambda one, _: queries.round_page(one, RoundsQuery(undelivered=True)),
    "progress": lambda one, known: queries.progress(one, "ns", known.terms.name, None),
    "a round": lambda one, known: (queries.round_entry(one, known), queries.slot_entries(one, known)),
    "arrivals": queries.slot_arrivals,
    "conflicts": lambda one, known: queries.conflict_page(one, known, ConflictsQuery()),
    "sample": lambda one, known: summary.draw(one, known, 200, "seed"),
    "rates": summary.rates,
    "chunk of an export": _export,
    "cursor of an export": _continue,
    "gauges": _gauges,
}


def add(connection: Connection, known: KnownRound, begin: int, end: int) -> None:
    """Store the slots' artifacts from one index to another, half of them forwarded."""
    fill = text(f"{_INSERT}{_FILL[connection.dialect.name]} {_ROWS}")
    if connection.dialect.name == "postgresql":
        fill = text(f"{_FILL['postgresql']} {_INSERT}{_ROWS}")
    for slot, slot_id in known.slots.items():
        values = {"slot_id": slot_id, "slot": slot, "vector": vector(7), "begin": begin, "end": end}
        connection.execute(fill, values)
        last = slot + (end - 1) * SLOTS
        counts = {"stored": end - 2, "last_nonce": last, "missing_nonce": slot + SLOTS, "heard_at": 1}
        place = {"forwarded": end // 4 - 2, "forwarded_nonce": slot + end // 4 * SLOTS}
        connection.execute(update(schema.slots).where(schema.slots.c.id == slot_id).values(**counts, **place))


def a_filled_round(connection: Connection) -> KnownRound:
    """A round with late items in every state, and conflicts."""
    known = write_down(connection, a_round(groups=SLOTS, callbackURL="http://receiver"))
    add(connection, known, 0, FEW)
    for slot, slot_id in known.slots.items():
        late = [
            {"slot_id": slot_id, "nonce": slot + place * SLOTS, "state": state, "reason": "late", "since": 1}
            for place, state in enumerate((State.WAITING, State.REFUSED, State.EXPIRED, State.ABANDONED), 100)
        ]
        connection.execute(insert(schema.late_items), late)
        other = {"slot_id": slot_id, "nonce": slot, "vector": vector(8), "received_at": 1}
        connection.execute(insert(schema.conflicts), [other] * 10)
    connection.execute(update(schema.slots).values(conflicts=10))
    return known


@contextmanager
def counted(connection: Connection) -> Iterator[list[int]]:
    """Count what the database does meanwhile."""
    cost = [0]
    if connection.dialect.name == "sqlite":
        driver = connection.connection.driver_connection
        assert driver is not None

        def step() -> int:
            cost[0] += 1
            return 0

        driver.set_progress_handler(step, STEPS)
        yield cost
        driver.set_progress_handler(None, 0)
        return
    before = connection.execute(text(_READ)).scalar_one()
    yield cost
    cost[0] = connection.execute(text(_READ)).scalar_one() - before


def costs(database: Database, known: KnownRound) -> dict[str, int]:
    found = dict[str, int]()
    for name, case in CASES.items():
        with database.engine.connect() as connection, connection.begin() as transaction:
            with counted(connection) as cost:
                case(connection, known)
            found[name] = cost[0]
            transaction.rollback()
    return found


def analysed(database: Database) -> None:
    """Let PostgreSQL learn what its tables hold, as it does by itself after a while."""
    with database.engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("ANALYZE"))


def test_nothing_takes_longer_because_more_is_stored(database: Database) -> None:
    with database.engine.begin() as connection:
        known = a_filled_round(connection)
    analysed(database)
    few = costs(database, known)
    with database.engine.begin() as connection:
        add(connection, known, FEW, MANY)
    analysed(database)
    many = costs(database, known)
    grown = {name: (few[name], many[name]) for name in CASES if many[name] > 1.5 * few[name] + 50}
    assert not grown, "work before and after"
