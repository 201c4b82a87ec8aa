# SPDX-License-Identifier: Apache-2.0
"""Exporting artifacts in the order of (slot, nonce) as JSON lines, CSV or Parquet, a bounded number at a time.

Every chunk is read in a transaction of its own, so that a slow client keeps neither SQLite's log from being folded into
the database nor PostgreSQL from vacuuming. The result is what was stored when the export began, less what had been read
before: both are positions of `poc_gateway.query.cursor`, and what is stored meanwhile lies beyond them.
"""

import io
import json
import operator
from abc import ABC, abstractmethod
from binascii import b2a_base64
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, reduce
from http import HTTPStatus
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, func, or_, select

from poc_gateway.errors import Refusal
from poc_gateway.query.cursor import BEGIN, Position, Positions
from poc_gateway.query.messages import ArtifactsQuery, Format
from poc_gateway.query.queries import value_name
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseUnavailable
from poc_gateway.store.rounds import KnownRound, RoundTerms
from vllm_poc.wire.messages import Protocol, scheme_of

#: Artifacts that are read, held in memory and written at once.
CHUNK_ROWS = 65_536
#: And fewer of long vectors: so many bytes of them, of which writing makes several copies.
CHUNK_BYTES = 8 * 2**20

#: Rows that the driver hands over at once: fewer than make Python's collector of garbage run, which would take more
#: time than everything else if tens of thousands of tuples lived at a time.
_DRIVER_ROWS = 512

#: pyarrow has no types, and is not there before it is needed: itself or something of it, and one of its tables.
Arrow = Any
Table = Any
#: nonce, vector or distance, received_at.
Columns = tuple[list[int], list[bytes | float], list[int]]

MEDIA_TYPES = {
    Format.JSONL: "application/x-ndjson",
    Format.CSV: "text/csv",
    Format.PARQUET: "application/vnd.apache.parquet",
}
#: Key of the terms in a Parquet file's metadata; their value is JSON.
TERMS_KEY = "poc.round"
_ANY = ("*/*", "")


@cache
def arrow() -> Arrow:
    """Return pyarrow. It takes a while to load, so a gateway starts without it: call this first in a thread."""
    import pyarrow.compute  # noqa: PLC0415
    import pyarrow.parquet  # noqa: PLC0415

    return pyarrow


class _Stretch(NamedTuple):
    """Artifacts of a slot that are still to be read: those with ``after < nonce <= last``.

    Or, if ``below`` is given, what arrived late or was replaced with ``after < number <= last``, up to that nonce.
    """

    offset: int
    slot_id: int
    after: int
    last: int
    below: int | None = None


class Scan:
    """Walks over the artifacts of a round between two positions; each `read` continues where the last one ended.

    What arrived late or was replaced comes first of its slot, then the others in the order of their nonces.
    """

    def __init__(self, known: KnownRound, query: ArtifactsQuery, begin: Positions, end: Positions) -> None:
        self._round = known
        self._query = query
        self._end = end
        self._replaced = dict[int, Mapping[int, int]]()  # by slot id: the last number of each nonce that was replaced
        offsets = sorted(known.slots) if query.slot is None else [query.slot]
        self._left = deque(
            stretch
            for offset in offsets
            for stretch in self._stretches(offset, begin.get(offset, BEGIN), end.get(offset, BEGIN))
        )

    @property
    def done(self) -> bool:
        """Whether everything was read."""
        return not self._left

    def _stretches(self, offset: int, begin: Position, end: Position) -> Iterator[_Stretch]:
        slot_id = self._round.slots[offset]
        if begin.nonce >= 0 and end.late > begin.late:
            yield _Stretch(offset, slot_id, begin.late, end.late, below=begin.nonce)
        after, last = max(begin.nonce, self._query.nonce_from - 1), min(end.nonce, self._query.nonce_to)
        if after < last:
            yield _Stretch(offset, slot_id, after, last)

    def read(self, connection: Connection) -> Sequence[tuple[int, Columns]]:
        """Return the next rows of the next slots; DatabaseUnavailable if the round was deleted meanwhile."""
        parts, room = list[tuple[_Stretch, Columns]](), chunk_rows(self._round.terms)
        while self._left and room:
            stretch = self._left.popleft()
            columns = self._fetch(connection, stretch, room)
            count = len(columns[0])
            after = stretch.last
            if stretch.below is not None:
                after = stretch.after + room
            elif count == room:
                after = columns[0][-1]
            if after < stretch.last:
                self._left.appendleft(stretch._replace(after=after))
            if count:
                parts.append((stretch, columns))
            room -= count if after >= stretch.last else room
        # Afterwards: what was read before a deletion began is whole, and what is of later has its number.
        kept = select(schema.rounds.c.id).where(schema.rounds.c.id == self._round.id, schema.ROUND_IS_KEPT)
        if connection.execute(kept).first() is None:
            raise DatabaseUnavailable("the round was deleted while it was read: there is nothing left to export")
        later = self._later(connection)
        return [(one.offset, _without(columns, later.get(one.slot_id))) for one, columns in parts]

    def _fetch(self, connection: Connection, stretch: _Stretch, room: int) -> Columns:
        table = schema.artifacts.c
        value = table.distance if self._round.terms.protocol is Protocol.DISTANCE else table.vector
        query = select(table.nonce, value, table.received_at).where(table.slot_id == stretch.slot_id)
        if stretch.below is None:
            query = query.where(table.nonce > stretch.after, table.nonce <= stretch.last).limit(room)
        else:
            late = schema.late_arrivals.c
            same = and_(late.slot_id == table.slot_id, late.nonce == table.nonce)
            numbers = and_(late.number > stretch.after, late.number <= min(stretch.last, stretch.after + room))
            nonces = and_(
                table.nonce >= self._query.nonce_from, table.nonce <= min(stretch.below, self._query.nonce_to)
            )
            query = query.join(schema.late_arrivals, same).where(numbers, nonces)
            if stretch.slot_id not in self._replaced:
                self._replaced[stretch.slot_id] = _replaced(connection, stretch)
            if again := self._replaced[stretch.slot_id]:
                # Such a nonce has several numbers, and comes with the last of them.
                query = query.where(or_(late.nonce.not_in(again), late.number.in_(again.values())))
        # The driver's tuples: SQLAlchemy would make an object of each.
        cursor = connection.execute(query.order_by(table.nonce)).cursor
        assert cursor is not None  # noqa: S101 - a select has one
        nonces_, values, moments = list[int](), list[bytes | float](), list[int]()
        while rows := cursor.fetchmany(_DRIVER_ROWS):
            some_nonces, some_values, some_moments = zip(*rows, strict=True)
            nonces_ += some_nonces
            values += some_values
            moments += some_moments
        return nonces_, values, moments

    def _later(self, connection: Connection) -> Mapping[int, set[int]]:
        """Return, by slot, what has arrived late since the end was set: it belongs to the next export.

        What was replaced meanwhile belongs to both.
        """
        slots, late = schema.slots.c, schema.late_arrivals.c
        grown = connection.execute(select(slots.id, slots.slot, slots.late).where(slots.round_id == self._round.id))
        found = dict[int, set[int]]()
        for id_, offset, number in grown:
            end = self._end.get(offset, BEGIN).late
            if number > end:
                query = select(late.nonce).where(late.slot_id == id_, late.number > end, ~late.replaced)
                found[id_] = set(connection.scalars(query))
        return found


def _replaced(connection: Connection, stretch: _Stretch) -> Mapping[int, int]:
    """Return the nonces of a stretch that were replaced, each with its last number: as few as a slot has conflicts."""
    late = schema.late_arrivals.c
    within = and_(late.slot_id == stretch.slot_id, late.number > stretch.after, late.number <= stretch.last)
    query = select(late.nonce, func.max(late.number)).where(within, late.replaced).group_by(late.nonce)
    return dict(connection.execute(query).all())


def _without(columns: Columns, nonces: set[int] | None) -> Columns:
    if not nonces or nonces.isdisjoint(columns[0]):
        return columns
    kept = [place for place, nonce in enumerate(columns[0]) if nonce not in nonces]
    return [columns[0][i] for i in kept], [columns[1][i] for i in kept], [columns[2][i] for i in kept]


async def chunks(
    database: Database, known: KnownRound, query: ArtifactsQuery, begin: Positions, end: Positions
) -> AsyncGenerator[Table]:
    """Yield the artifacts that ``query`` asks for, as tables of nonce, slot, node_id, received_at and value.

    Those are left out that were read up to ``begin``, or have arrived since ``end``.
    ``received_at`` is in milliseconds, ``value`` a vector's or a chain's bytes, or a distance. DatabaseError if the
    database fails.
    """
    scan, left = Scan(known, query, begin, end), query.limit

    def read(connection: Connection) -> Table:
        return _filtered(tabulate(known.terms, scan.read(connection)), query)

    while not scan.done and left != 0:
        table = (await database.read(read)).slice(0, left)
        if left is not None:
            left -= table.num_rows
        if table.num_rows:
            yield table


def chunk_rows(terms: RoundTerms) -> int:
    """Return how many artifacts of the round are read, held in memory and written at once."""
    value_bytes = terms.value_bytes
    return CHUNK_ROWS if value_bytes is None else min(CHUNK_ROWS, rows_within(CHUNK_BYTES, value_bytes))


def rows_within(size: int, value_bytes: int) -> int:
    """Return how many results of ``value_bytes`` have ``size`` bytes together, but at least one."""
    return max(1, size // value_bytes)


def tabulate(terms: RoundTerms, parts: Sequence[tuple[int, Columns]]) -> Table:
    """Return the rows of ``parts``, each the first nonce of a slot and its columns, as a table without gaps."""
    pa = arrow()
    value = pa.float64() if terms.value_bytes is None else pa.binary(terms.value_bytes)
    names = {"nonce": pa.int32(), "slot": pa.int32(), "node_id": pa.int32(), "received_at": pa.int64(), "value": value}
    schema_ = pa.schema(list(names.items()))
    batches = [_batch(terms, offset, columns, schema_) for offset, columns in parts]
    return pa.Table.from_batches(batches, schema_).combine_chunks()


def _batch(terms: RoundTerms, offset: int, columns: Columns, schema_: Arrow) -> Arrow:
    pa = arrow()
    nonces, values, moments = columns
    count, small = len(nonces), pa.int32()
    slot = pa.repeat(pa.scalar(offset, small), count)
    node = pa.repeat(pa.scalar(offset % terms.node_count, small), count)
    arrays = [pa.array(nonces, small), slot, node, pa.array(moments, pa.int64()), pa.array(values, schema_.types[-1])]
    return pa.record_batch(arrays, schema=schema_)


def _filtered(table: Table, query: ArtifactsQuery) -> Table:
    pc = arrow().compute
    conditions = []
    if query.received_from is not None:
        conditions.append(pc.field("received_at") >= query.received_from)
    if query.received_to is not None:
        conditions.append(pc.field("received_at") < query.received_to)
    if query.below is not None:
        conditions.append(pc.field("value") < query.below)
    return table.filter(reduce(operator.and_, conditions)).combine_chunks() if conditions else table


def accepted(accept: str) -> Format:
    """Return the first format that the header ``accept`` names, JSON lines if it takes any; 406 if we have none."""
    by_type = {media: format_ for format_, media in MEDIA_TYPES.items()} | dict.fromkeys(_ANY, Format.JSONL)
    for part in accept.split(","):
        media = part.partition(";")[0].strip().lower()
        if media in by_type:
            return by_type[media]
    detail = f"Accept names none of {', '.join(MEDIA_TYPES.values())}: send one of them, or set the parameter format"
    raise Refusal(HTTPStatus.NOT_ACCEPTABLE, "NotAcceptable", detail)


def public_terms(terms: RoundTerms) -> dict[str, object]:
    """Return the terms of a round that those may know who read its results."""
    told = {name: value for name, value in asdict(terms).items() if not name.startswith("receiver")}
    return told | {"scheme": scheme_of(terms.protocol)}


def writer(format_: Format, terms: RoundTerms) -> "Writer":
    """Return a writer for one answer."""
    classes: Mapping[Format, Callable[[RoundTerms], Writer]] = {
        Format.JSONL: _JsonLines,
        Format.CSV: _Csv,
        Format.PARQUET: _Parquet,
    }
    return classes[format_](terms)


class Writer(ABC):
    """Turns the tables of `chunks` into the bytes of one answer."""

    def __init__(self, terms: RoundTerms) -> None:
        self._terms = terms

    def begin(self) -> bytes:
        """Return what comes before all chunks."""
        return b""

    @abstractmethod
    def chunk(self, table: Table) -> bytes:
        """Return what ``table`` adds."""

    def end(self) -> bytes:
        """Return what comes after all chunks."""
        return b""

    def _rows(self, table: Table) -> Iterator[tuple[int, int, int, str, str | float]]:
        pa = arrow()
        # A zone would make Arrow look for the machine's time zone database.
        moments = pa.compute.strftime(table["received_at"].cast(pa.timestamp("ms")), format="%Y-%m-%dT%H:%M:%SZ")
        values = table["value"].to_pylist()
        if self._terms.value_bytes is not None:
            values = [b2a_base64(vector, newline=False).decode() for vector in values]
        columns = (table[name].to_pylist() for name in ("nonce", "slot", "node_id"))
        return zip(*columns, moments.to_pylist(), values, strict=True)


class _JsonLines(Writer):
    def chunk(self, table: Table) -> bytes:
        # Neither base64 nor a moment has a character that JSON escapes, and repr writes a float as JSON does.
        name = value_name(self._terms) or "distance"
        mark = "" if self._terms.value_bytes is None else '"'
        lines = [
            f'{{"nonce":{nonce},"slot":{slot},"node_id":{node},"received_at":"{moment}","{name}":{mark}{value}{mark}}}\n'
            for nonce, slot, node, moment, value in self._rows(table)
        ]
        return "".join(lines).encode()


class _Csv(Writer):
    def begin(self) -> bytes:
        name = value_name(self._terms) or "distance"
        return f"nonce,slot,node_id,received_at,{name}\r\n".encode()

    def chunk(self, table: Table) -> bytes:
        lines = [
            f"{nonce},{slot},{node},{moment},{value}\r\n" for nonce, slot, node, moment, value in self._rows(table)
        ]
        return "".join(lines).encode()


class _Parquet(Writer):
    def __init__(self, terms: RoundTerms) -> None:
        super().__init__(terms)
        self._sink = _Sink()
        pa = arrow()
        small, moment = pa.int32(), pa.timestamp("ms", "UTC")
        fields = [("nonce", small), ("slot", small), ("node_id", small), ("received_at", moment)]
        fields.append(_value_field(terms))
        self._schema = pa.schema(fields, {TERMS_KEY: json.dumps(public_terms(terms))})
        self._writer = pa.parquet.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            use_dictionary=["slot", "node_id"],
            # Rising numbers: their differences take a fraction of the room.
            column_encoding={"nonce": "DELTA_BINARY_PACKED", "received_at": "DELTA_BINARY_PACKED"},
            write_statistics=["nonce", "slot", "node_id", "received_at", "distance"],
        )

    def chunk(self, table: Table) -> bytes:
        value = table["value"].combine_chunks()
        if self._terms.protocol is Protocol.ARTIFACT and self._terms.k_dim is not None:
            value = _as_vectors(value, self._terms.k_dim)
        columns = [table["nonce"], table["slot"], table["node_id"], table["received_at"], value]
        moments = columns[3].cast(self._schema.field("received_at").type)
        table = arrow().Table.from_arrays([*columns[:3], moments, value], schema=self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)
        return self._sink.take()

    def end(self) -> bytes:
        self._writer.close()
        return self._sink.take()


def _value_field(terms: RoundTerms) -> tuple[str, Arrow]:
    """Return name and type of the results: of chains the leaf, one byte for each step."""
    if terms.max_tokens is not None:
        return "chain", arrow().binary(terms.value_bytes)
    return ("distance", arrow().float64()) if terms.k_dim is None else ("vector", _vectors(terms.k_dim))


def _vectors(k_dim: int) -> Arrow:
    pa = arrow()
    return pa.list_(pa.field("element", pa.float16(), nullable=False), k_dim)


def _as_vectors(values: Arrow, k_dim: int) -> Arrow:
    # The bytes are the numbers already: nothing is copied.
    pa = arrow()
    first, count = values.offset * k_dim, len(values) * k_dim
    numbers = pa.Array.from_buffers(pa.float16(), count, [None, values.buffers()[1]], offset=first)
    return pa.FixedSizeListArray.from_arrays(numbers, type=_vectors(k_dim))


class _Sink(io.RawIOBase):
    """A file that is taken away piece by piece while it is written."""

    def __init__(self) -> None:
        self._pieces = list[bytes]()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self._pieces.append(piece)
        return len(piece)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
