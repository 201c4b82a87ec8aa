# SPDX-License-Identifier: Apache-2.0
"""Reading artifacts in the order of (slot, nonce), a bounded number at a time.

Every chunk is a transaction of its own, so that a slow client keeps neither SQLite's log from being folded into the
database nor PostgreSQL from vacuuming. What is stored meanwhile is in the result if it comes after what was read.
"""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import reduce
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection, select

from poc_gateway.results.parameters import ArtifactsQuery
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseUnavailable
from poc_gateway.store.rounds import KnownRound, RoundTerms
from vllm_poc.wire.base import Protocol

#: Artifacts that are read, held in memory and written at once.
CHUNK_ROWS = 65_536
#: And fewer of long vectors: so many bytes of them, of which writing makes several copies.
CHUNK_BYTES = 8 * 2**20
_BYTES_PER_NUMBER = 2

#: Rows that the driver hands over at once: fewer than make Python's collector of garbage run, which would take more
#: time than everything else if tens of thousands of tuples lived at a time.
_DRIVER_ROWS = 512

#: nonce, vector or distance, received_at.
Columns = tuple[list[int], list[bytes | float], list[int]]


class Scan:
    """Walks over the artifacts of a round; each `read` continues where the last one ended."""

    def __init__(self, known: KnownRound, query: ArtifactsQuery) -> None:
        self._round = known
        self._before_first = query.nonce_from - 1
        self._after = self._before_first
        self._last = query.nonce_to
        offsets = sorted(known.slots) if query.slot is None else [query.slot]
        self._left = deque((offset, known.slots[offset]) for offset in offsets)

    @property
    def done(self) -> bool:
        """Whether everything was read."""
        return not self._left

    def read(self, connection: Connection) -> Sequence[tuple[int, Columns]]:
        """Return the next rows of the next slots; DatabaseUnavailable if the round was deleted meanwhile."""
        parts, room = list[tuple[int, Columns]](), chunk_rows(self._round.terms)
        while self._left and room:
            offset, slot_id = self._left[0]
            columns = self._fetch(connection, slot_id, room)
            count = len(columns[0])
            if count < room:
                self._left.popleft()
                self._after = self._before_first
            else:
                self._after = columns[0][-1]
            if count:
                parts.append((offset, columns))
            room -= count
        # Afterwards: what was read before a deletion began is whole.
        kept = select(schema.rounds.c.id).where(schema.rounds.c.id == self._round.id, schema.ROUND_IS_KEPT)
        if connection.execute(kept).first() is None:
            raise DatabaseUnavailable("the round was deleted while it was read: there is nothing left to export")
        return parts

    def _fetch(self, connection: Connection, slot_id: int, room: int) -> Columns:
        table = schema.artifacts.c
        value = table.vector if self._round.terms.protocol is Protocol.ARTIFACT else table.distance
        query = (
            select(table.nonce, value, table.received_at)
            .where(table.slot_id == slot_id, table.nonce > self._after, table.nonce <= self._last)
            .order_by(table.nonce)
            .limit(room)
        )
        # The driver's tuples: SQLAlchemy would make an object of each.
        cursor = connection.execute(query).cursor
        assert cursor is not None  # noqa: S101 - a select has one
        nonces, values, moments = list[int](), list[bytes | float](), list[int]()
        while rows := cursor.fetchmany(_DRIVER_ROWS):
            some_nonces, some_values, some_moments = zip(*rows, strict=True)
            nonces += some_nonces
            values += some_values
            moments += some_moments
        return nonces, values, moments


async def chunks(database: Database, known: KnownRound, query: ArtifactsQuery) -> AsyncGenerator[pa.Table]:
    """Yield the artifacts that ``query`` asks for, as tables of nonce, slot, node_id, received_at and value.

    ``received_at`` is in milliseconds, ``value`` a vector's bytes or a distance. DatabaseError if the database fails.
    """
    scan, left = Scan(known, query), query.limit

    def read(connection: Connection) -> pa.Table:
        return _filtered(tabulate(known.terms, scan.read(connection)), query)

    while not scan.done and left != 0:
        table = (await database.read(read)).slice(0, left)
        if left is not None:
            left -= table.num_rows
        if table.num_rows:
            yield table


def chunk_rows(terms: RoundTerms) -> int:
    """Return how many artifacts of the round are read, held in memory and written at once."""
    return CHUNK_ROWS if terms.k_dim is None else min(CHUNK_ROWS, rows_within(CHUNK_BYTES, terms.k_dim))


def rows_within(size: int, k_dim: int) -> int:
    """Return how many vectors have ``size`` bytes together, but at least one."""
    return max(1, size // (_BYTES_PER_NUMBER * k_dim))


def tabulate(terms: RoundTerms, parts: Sequence[tuple[int, Columns]]) -> pa.Table:
    """Return the rows of ``parts``, each the first nonce of a slot and its columns, as a table without gaps."""
    value = pa.float64() if terms.k_dim is None else pa.binary(_BYTES_PER_NUMBER * terms.k_dim)
    names = {"nonce": pa.int32(), "slot": pa.int32(), "node_id": pa.int32(), "received_at": pa.int64(), "value": value}
    schema_ = pa.schema(list(names.items()))
    batches = [_batch(terms, offset, columns, schema_) for offset, columns in parts]
    return pa.Table.from_batches(batches, schema_).combine_chunks()


def _batch(terms: RoundTerms, offset: int, columns: Columns, schema_: pa.Schema) -> pa.RecordBatch:
    nonces, values, moments = columns
    count, small = len(nonces), pa.int32()
    slot = pa.repeat(pa.scalar(offset, small), count)
    node = pa.repeat(pa.scalar(offset % terms.node_count, small), count)
    arrays = [pa.array(nonces, small), slot, node, pa.array(moments, pa.int64()), pa.array(values, schema_.types[-1])]
    return pa.record_batch(arrays, schema=schema_)


def _filtered(table: pa.Table, query: ArtifactsQuery) -> pa.Table:
    conditions = []
    if query.since is not None:
        conditions.append(pc.field("received_at") >= query.since)
    if query.until is not None:
        conditions.append(pc.field("received_at") < query.until)
    if query.below is not None:
        conditions.append(pc.field("value") < query.below)
    return table.filter(reduce(and_, conditions)).combine_chunks() if conditions else table
