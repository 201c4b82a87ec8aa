# SPDX-License-Identifier: Apache-2.0
"""Storing deliveries: each nonce once, with its slot's counts in the same transaction.

What arrives during one commit is stored together in the next. New results of a round that has reached a limit are
refused, so that it leaves room for others; what it has stored already is taken again.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field

import psycopg
from sqlalchemy import Connection, bindparam, exists, select, update

from poc_gateway.errors import Refusal
from poc_gateway.ingest.deliveries import CheckedArtifact, Delivery, Value
from poc_gateway.ingest.quotas import Allowance, Allowances, Quota, round_full
from poc_gateway.metrics import WAITING_ARTIFACTS
from poc_gateway.outbox import ledger, rivals
from poc_gateway.outbox.ledger import SlotArrivals
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError, DatabaseUnavailable
from vllm_poc.wire.messages import Protocol

#: Artifacts of one commit, unless a single delivery has more: so few that the first need not wait long.
COMMIT_ARTIFACTS = 4_096
#: Most artifacts that wait: some seconds' worth, in memory as much as a hundred megabytes.
MOST_WAITING = 250_000

#: Conflicts of a slot that are kept whatever they are of. From then on a pod's first one for each nonce is kept alone,
#: and others are only counted: who sends many different results must not fill the disk, nor use up what others need.
MOST_CONFLICTS = 1_000

_COLUMNS = ("slot_id", "nonce", "vector", "distance", "received_at", "author")
#: Of PostgreSQL, for the same columns.
_TYPES = ("int8", "int4", "bytea", "float8", "int8", "int8")

#: Another process that stores something for the round holds its row, as this one does: two that waited for each other's
#: would never end. What is not written down now is with a later delivery, once the row was read again.
_NOT_HELD = (
    select(schema.rounds.c.id)
    .where(schema.rounds.c.id == bindparam("of"))
    .with_for_update(key_share=True, skip_locked=True)
)
_TELLS_LIMIT = update(schema.rounds).where(schema.rounds.c.id.in_(_NOT_HELD)).values(limit_reached=bindparam("told"))

#: slot_id, nonce, vector, distance, received_at, author
Row = tuple[int, int, bytes | None, float | None, int, int | None]
#: slot_id, nonce
Key = tuple[int, int]
#: slot_id, nonce, author
ConflictKey = tuple[int, int, int | None]


@dataclass
class StoreResult:
    """What became of a delivery: counts, and the nonces whose stored content is another.

    ``by_slot`` says of which slots the stored results are.
    """

    stored: int = 0
    duplicates: int = 0
    conflicts: list[int] = field(default_factory=list)
    by_slot: Counter[int] = field(default_factory=Counter, compare=False)


#: What becomes of a delivery: the Refusal if its round has reached a limit, None if the round was deleted meanwhile.
Outcome = StoreResult | Refusal | None
_Waiting = tuple[Delivery, "asyncio.Future[Outcome]"]


class Intake:
    """The deliveries on their way to the database. One per process."""

    def __init__(self, database: Database, quota: Quota) -> None:
        self._database = database
        self._allowances = Allowances(quota)
        self._waiting = deque[_Waiting]()
        self._artifacts = 0
        self._task: asyncio.Task[None] | None = None

    async def store(self, delivery: Delivery) -> Outcome:
        """Store a delivery and return what became of it once it is durable; None if its round was deleted meanwhile.

        If the round has reached a limit, the Refusal is returned. DatabaseError if the database fails or is far behind.
        Then nothing is stored.
        """
        if self._artifacts > MOST_WAITING:
            raise DatabaseUnavailable(f"the database is behind: {self._artifacts} artifacts wait")
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, done))
        self._count(len(delivery.checked))
        if self._task is None:
            # It stores deliveries of all rounds: what the log says of it is about none.
            self._task = asyncio.create_task(self._run(), context=Context())
        return await done

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._commit(self._next())
        finally:
            self._task = None

    def _next(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        artifacts = len(batch[0][0].checked)
        while self._waiting and artifacts + len(self._waiting[0][0].checked) <= COMMIT_ARTIFACTS:
            batch.append(self._waiting.popleft())
            artifacts += len(batch[-1][0].checked)
        self._count(-artifacts)
        return batch

    def _count(self, more: int) -> None:
        self._artifacts += more
        WAITING_ARTIFACTS.set(self._artifacts)

    async def _commit(self, batch: list[_Waiting]) -> None:
        deliveries = [delivery for delivery, _ in batch]
        now = time.time_ns() // 1_000_000
        try:
            outcomes = await self._database.write(
                lambda connection: store(connection, deliveries, now, self._allowances.of(connection, deliveries)),
                grows=True,
            )
        except Exception as error:
            if len(batch) == 1 or isinstance(error, DatabaseError):
                _fail(batch, error)
                return
            # One of them took the others along: each by itself.
            for one in batch:
                await self._commit([one])
            return
        for (delivery, done), outcome in zip(batch, outcomes, strict=True):
            if outcome is not None:
                self._allowances.learn(delivery, None if isinstance(outcome, Refusal) else outcome.by_slot)
            if not done.done():
                done.set_result(outcome)


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for _, done in batch:
        if not done.done():
            done.set_exception(error)


def store(
    connection: Connection, deliveries: Sequence[Delivery], now: int, allowances: Mapping[int, Allowance] | None = None
) -> list[Outcome]:
    """Store the deliveries in their order; None for one whose round was deleted meanwhile, or is being deleted.

    Of a delivery with more new results than its round may store nothing is, and its Refusal is returned. None is
    raised: that would undo what others write beside it.
    """
    slots = ledger.slots_of(connection, {found.slot_id for delivery in deliveries for found in delivery.checked})
    alive = [all(found.slot_id in slots for found in delivery.checked) for delivery in deliveries]
    late = {
        (found.slot_id, found.nonce)
        for delivery, lives in zip(deliveries, alive, strict=True)
        if lives
        for found in delivery.checked
        if found.nonce <= slots[found.slot_id].before
    }
    transaction = _Transaction(slots, stored_values(connection, late), now, allowances or {})
    results = [transaction.take(delivery) if lives else None for delivery, lives in zip(deliveries, alive, strict=True)]
    transaction.write(connection)
    return results


class _Transaction:
    def __init__(
        self,
        slots: Mapping[int, SlotArrivals],
        known: dict[Key, Value],
        now: int,
        allowances: Mapping[int, Allowance],
    ) -> None:
        self._slots = slots
        self._known = known
        self._now = now
        self._allowances = allowances
        self._stored = Counter[int]()  # by the slot's id
        self._told = dict[int, str | None]()  # what the rows of rounds say from now on of limits
        self._artifacts: list[Row] = []
        self._conflicts: list[Row] = []
        self._forwards = set[int]()  # slots of conflicts that are to be forwarded
        self._chains = set[int]()  # slots of conflicts of the decode scheme
        self._filled = dict[int, int]()  # slots whose first missing nonce has come, with their strides

    def take(self, delivery: Delivery) -> Outcome:
        if (refusal := self._beyond_limit(delivery)) is not None:
            return refusal
        result = StoreResult()
        terms = delivery.known.terms
        forwards, stride = terms.receiver is not None, terms.node_count * terms.n_groups
        now, author = self._now, delivery.author
        for found in delivery.checked:
            slot_id, nonce, value = found
            slot = self._slots[slot_id]
            if nonce > slot.last:
                slot.last = nonce
            elif (known := self._known.get((slot_id, nonce))) is not None:
                self._met_again(delivery, found, known, result)
                continue
            elif nonce <= slot.before:
                # The outbox and readers may have passed it; what is new in this transaction they have not seen.
                slot.late.append(nonce)
                slot.forwards = forwards
            if nonce == slot.missing:
                slot.missing += stride
                self._filled[slot_id] = stride
            self._known[slot_id, nonce] = value
            self._artifacts.append(_row(found, now, author))
            slot.stored += 1
            result.by_slot[slot_id] += 1
        result.stored = result.by_slot.total()
        self._stored += result.by_slot
        allowance = self._allowances.get(delivery.known.id)
        if result.stored and allowance is not None and not allowance.full - result.by_slot.keys():
            self._told.setdefault(delivery.known.id, None)
        return result

    def _beyond_limit(self, delivery: Delivery) -> Refusal | None:
        """Return the refusal of a delivery whose new results are more than its round may store."""
        known, checked = delivery.known, delivery.checked
        allowance = self._allowances.get(known.id)
        if allowance is None:
            return None
        also, new = self._stored.copy(), Counter(one.slot_id for one in checked)
        if any(count > allowance.left(slot_id, also) for slot_id, count in new.items()) or len(new) > 1:
            new = Counter(slot_id for slot_id, _ in {(one.slot_id, one.nonce) for one in checked} - self._known.keys())
        for slot_id, count in new.items():
            left = allowance.left(slot_id, also)
            if count > left:
                self._told[known.id] = allowance.why
                return round_full(known.terms, count, left, allowance.why)
            also[slot_id] += count
        return None

    def write(self, connection: Connection) -> None:
        if self._artifacts:
            _insert_artifacts(connection, self._artifacts)
        kept = self._kept_conflicts(connection)
        if kept:
            connection.execute(schema.conflicts.insert(), [dict(zip(_COLUMNS, row, strict=True)) for row in kept])
        for slot_id, stride in self._filled.items():
            slot = self._slots[slot_id]
            if slot.missing <= slot.last:
                slot.missing = _missing(connection, slot_id, slot.missing, stride)
        ledger.arrived(connection, self._slots, self._now)
        rivals.hold(connection, {(slot_id, nonce) for slot_id, nonce, *_ in kept if slot_id in self._forwards})
        for round_id, told in self._told.items():
            if told != self._allowances[round_id].told:
                connection.execute(_TELLS_LIMIT, {"of": round_id, "told": told})

    def _kept_conflicts(self, connection: Connection) -> list[Row]:
        """Return the conflicts that are kept: `MOST_CONFLICTS` of a slot, and each author's first one for a nonce.

        Of chains those of the first are enough: nobody decides between them.
        """
        counts = Counter({slot_id: slot.conflicts_before for slot_id, slot in self._slots.items()})
        kept, beyond = list[Row](), list[Row]()
        for row in self._conflicts:
            counts[row[0]] += 1
            if counts[row[0]] <= MOST_CONFLICTS:
                kept.append(row)
            elif row[0] not in self._chains:
                beyond.append(row)
        if beyond:
            known = _conflict_keys(connection, {row[:2] for row in beyond}) | {_conflict_key(row) for row in kept}
            first = {_conflict_key(row): row for row in reversed(beyond)}
            kept += [row for key, row in first.items() if key not in known]
        return kept

    def _met_again(self, delivery: Delivery, found: CheckedArtifact, known: Value, result: StoreResult) -> None:
        slot = self._slots[found.slot_id]
        if known == found.value:
            slot.duplicates += 1
            result.duplicates += 1
        else:
            self._conflicts.append(_row(found, self._now, delivery.author))
            terms = delivery.known.terms
            if terms.protocol is Protocol.DECODE:
                # Chains of honest pods differ near borders, and then all later steps do: the first one counts, as for
                # the network, and nobody decides.
                self._chains.add(found.slot_id)
            elif terms.receiver is not None:
                self._forwards.add(found.slot_id)
            slot.conflicts += 1
            result.conflicts.append(found.nonce)


def _conflict_key(row: Row) -> ConflictKey:
    slot_id, nonce, _, _, _, author = row
    return slot_id, nonce, author


def _conflict_keys(connection: Connection, keys: Collection[Key]) -> set[ConflictKey]:
    """Return of which authors there are conflicts for these nonces."""
    nonces, columns = defaultdict[int, list[int]](list), schema.conflicts.c
    for slot_id, nonce in sorted(keys):
        nonces[slot_id].append(nonce)
    query, found = select(columns.slot_id, columns.nonce, columns.author).distinct(), set[ConflictKey]()
    for slot_id, of_slot in nonces.items():
        for some in ledger.in_parts(of_slot):
            rows = connection.execute(query.where(columns.slot_id == slot_id, columns.nonce.in_(some)))
            found.update((slot_id, nonce, author) for _, nonce, author in rows)
    return found


def _row(found: CheckedArtifact, now: int, author: int | None) -> Row:
    slot_id, nonce, value = found
    if isinstance(value, bytes):
        return slot_id, nonce, value, None, now, author
    return slot_id, nonce, None, value, now, author


def _missing(connection: Connection, slot_id: int, nonce: int, stride: int) -> int:
    """Return the slot's first nonce from ``nonce`` on that is not stored. Each stored one is passed once ever."""
    here, after = schema.artifacts.alias(), schema.artifacts.alias()
    is_next = exists().where(after.c.slot_id == here.c.slot_id, after.c.nonce == here.c.nonce + stride)
    of_slot = select(here.c.nonce).where(here.c.slot_id == slot_id)
    if connection.scalar(of_slot.where(here.c.nonce == nonce)) is None:
        return nonce
    ends = of_slot.where(here.c.nonce >= nonce, ~is_next).order_by(here.c.nonce).limit(1)
    last: int = connection.execute(ends).scalar_one()  # the largest nonce has none after it
    return last + stride


def _insert_artifacts(connection: Connection, rows: Sequence[Row]) -> None:
    """Insert rows that are not there yet: what everything waits for, so on each database in the way that is fastest."""
    columns = ", ".join(_COLUMNS)
    if connection.dialect.name == "sqlite":
        # SQLAlchemy's own insert handles each value by itself: twice as long here, three times on PostgreSQL.
        connection.exec_driver_sql(f"INSERT INTO artifacts ({columns}) VALUES (?, ?, ?, ?, ?, ?)", list(rows))  # noqa: S608
        return
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)  # noqa: S101 - `create_engine` made it
    with driver.cursor().copy(f"COPY artifacts ({columns}) FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(_TYPES)
        for row in rows:
            copy.write_row(row)


def stored_values(connection: Connection, keys: Collection[Key]) -> dict[Key, Value]:
    """Return what is stored of these nonces, each with the id of its slot."""
    columns = schema.artifacts.c
    nonces = defaultdict[int, list[int]](list)
    for slot_id, nonce in sorted(keys):
        nonces[slot_id].append(nonce)
    values: dict[Key, Value] = {}
    query = select(columns.nonce, columns.vector, columns.distance)
    for slot_id, of_slot in nonces.items():
        for some in ledger.in_parts(of_slot):
            rows = connection.execute(query.where(columns.slot_id == slot_id, columns.nonce.in_(some)))
            for nonce, vector, distance in rows:
                values[slot_id, nonce] = distance if vector is None else vector
    return values
