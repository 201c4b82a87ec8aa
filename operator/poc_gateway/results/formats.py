# SPDX-License-Identifier: Apache-2.0
"""Writing artifacts as JSON lines, CSV or Parquet, chunk by chunk."""

import io
import json
from abc import ABC, abstractmethod
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from http import HTTPStatus

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from poc_gateway.errors import Refusal
from poc_gateway.results.parameters import Format
from poc_gateway.store.rounds import RoundTerms

MEDIA_TYPES = {
    Format.JSONL: "application/x-ndjson",
    Format.CSV: "text/csv",
    Format.PARQUET: "application/vnd.apache.parquet",
}
#: Key of the terms in a Parquet file's metadata; their value is JSON.
TERMS_KEY = "poc.round"
_ANY = ("*/*", "")


def accepted(accept: str) -> Format:
    """Return the first format that the header ``accept`` names, JSON lines if it takes any; 406 if we have none."""
    by_type = {media: format_ for format_, media in MEDIA_TYPES.items()} | dict.fromkeys(_ANY, Format.JSONL)
    for part in accept.split(","):
        media = part.partition(";")[0].strip().lower()
        if media in by_type:
            return by_type[media]
    detail = f"Accept names none of {', '.join(MEDIA_TYPES.values())}: send one of them, or set the parameter format"
    raise Refusal(HTTPStatus.NOT_ACCEPTABLE, "NotAcceptable", detail)


def writer(format_: Format, terms: RoundTerms) -> "Writer":
    """Return a writer for one answer."""
    classes: Mapping[Format, Callable[[RoundTerms], Writer]] = {
        Format.JSONL: _JsonLines,
        Format.CSV: _Csv,
        Format.PARQUET: _Parquet,
    }
    return classes[format_](terms)


class Writer(ABC):
    """Turns the tables of `poc_gateway.results.chunks` into the bytes of one answer."""

    def __init__(self, terms: RoundTerms) -> None:
        self._terms = terms

    def begin(self) -> bytes:
        """Return what comes before all chunks."""
        return b""

    @abstractmethod
    def chunk(self, table: pa.Table) -> bytes:
        """Return what ``table`` adds."""

    def end(self) -> bytes:
        """Return what comes after all chunks."""
        return b""

    def _rows(self, table: pa.Table) -> Iterator[tuple[int, int, int, str, str | float]]:
        # A zone would make Arrow look for the machine's time zone database.
        moments = pc.strftime(table["received_at"].cast(pa.timestamp("ms")), format="%Y-%m-%dT%H:%M:%SZ")
        values = table["value"].to_pylist()
        if self._terms.k_dim is not None:
            values = [b2a_base64(vector, newline=False).decode() for vector in values]
        columns = (table[name].to_pylist() for name in ("nonce", "slot", "node_id"))
        return zip(*columns, moments.to_pylist(), values, strict=True)


class _JsonLines(Writer):
    def chunk(self, table: pa.Table) -> bytes:
        # Neither base64 nor a moment has a character that JSON escapes, and repr writes a float as JSON does.
        name = "distance" if self._terms.k_dim is None else "vector_b64"
        mark = "" if self._terms.k_dim is None else '"'
        lines = [
            f'{{"nonce":{nonce},"slot":{slot},"node_id":{node},"received_at":"{moment}","{name}":{mark}{value}{mark}}}\n'
            for nonce, slot, node, moment, value in self._rows(table)
        ]
        return "".join(lines).encode()


class _Csv(Writer):
    def begin(self) -> bytes:
        name = "distance" if self._terms.k_dim is None else "vector_b64"
        return f"nonce,slot,node_id,received_at,{name}\r\n".encode()

    def chunk(self, table: pa.Table) -> bytes:
        lines = [
            f"{nonce},{slot},{node},{moment},{value}\r\n" for nonce, slot, node, moment, value in self._rows(table)
        ]
        return "".join(lines).encode()


class _Parquet(Writer):
    def __init__(self, terms: RoundTerms) -> None:
        super().__init__(terms)
        self._sink = _Sink()
        small, moment = pa.int32(), pa.timestamp("ms", "UTC")
        fields = [("nonce", small), ("slot", small), ("node_id", small), ("received_at", moment)]
        fields.append(("distance", pa.float64()) if terms.k_dim is None else ("vector", _vectors(terms.k_dim)))
        public = {name: value for name, value in asdict(terms).items() if name != "receiver"}
        self._schema = pa.schema(fields, {TERMS_KEY: json.dumps(public)})
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            use_dictionary=["slot", "node_id"],
            # Rising numbers: their differences take a fraction of the room.
            column_encoding={"nonce": "DELTA_BINARY_PACKED", "received_at": "DELTA_BINARY_PACKED"},
            write_statistics=["nonce", "slot", "node_id", "received_at", "distance"],
        )

    def chunk(self, table: pa.Table) -> bytes:
        value = table["value"].combine_chunks()
        if self._terms.k_dim is not None:
            value = _as_vectors(value, self._terms.k_dim)
        columns = [table["nonce"], table["slot"], table["node_id"], table["received_at"], value]
        moments = columns[3].cast(self._schema.field("received_at").type)
        table = pa.Table.from_arrays([*columns[:3], moments, value], schema=self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)
        return self._sink.take()

    def end(self) -> bytes:
        self._writer.close()
        return self._sink.take()


def _vectors(k_dim: int) -> pa.DataType:
    return pa.list_(pa.field("element", pa.float16(), nullable=False), k_dim)


def _as_vectors(values: pa.FixedSizeBinaryArray, k_dim: int) -> pa.FixedSizeListArray:
    # The bytes are the numbers already: nothing is copied.
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
