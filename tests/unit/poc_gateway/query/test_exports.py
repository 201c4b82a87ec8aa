# SPDX-License-Identifier: Apache-2.0
"""Every stored value comes back in every format, and filters keep what they say."""

import csv
import io
import json
import os
import subprocess
import sys
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from struct import unpack
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from httpx import AsyncClient

from hack.images.site import ROOT as REPOSITORY
from poc_gateway.query import export
from poc_gateway.query.export import TERMS_KEY
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from tests.support.builders.deliveries import a_round, encoded, vector
from tests.support.builders.stored import BEGAN, BEGAN_TEXT, distance, store

ROUND = "/rounds/ns/round-uid-1"
EXPORT = f"{ROUND}/artifacts"
DISTANCES = {"rTarget": "1.4"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "CHUNK_ROWS", 7)


def in_order(nonces: range, slots: int) -> list[int]:
    return sorted(nonces, key=lambda nonce: (nonce % slots, nonce))


def moment(nonce: int) -> datetime:
    return datetime.fromtimestamp(BEGAN / 1000, UTC) + timedelta(milliseconds=nonce)


async def lines(client: AsyncClient, **parameters: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    answer = await client.get(EXPORT, params={"format": "jsonl", **parameters})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def nonces(client: AsyncClient, **parameters: Any) -> list[int]:  # noqa: ANN401
    return [line["nonce"] for line in await lines(client, **parameters)]


async def parquet(client: AsyncClient) -> pq.ParquetFile:
    answer = await client.get(EXPORT, params={"format": "parquet"})
    assert answer.status_code == 200, answer.text
    return pq.ParquetFile(io.BytesIO(answer.content))


@pytest.mark.parametrize(("k_dim", "groups"), [(12, [7, 7, 6]), (64, [5, 5, 5, 5]), (4096, [1] * 20)])
async def test_chunks_are_bounded_in_rows_and_bytes(
    database: Database, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, k_dim: int, groups: list[int]
) -> None:
    monkeypatch.setattr(export, "CHUNK_BYTES", 5 * 2 * 64)
    await store(database, a_round(artifact={"kDim": k_dim}), range(20))
    metadata = (await parquet(client)).metadata
    assert [metadata.row_group(place).num_rows for place in range(metadata.num_row_groups)] == groups
    assert await nonces(client) == list(range(20))


async def test_json_lines_have_vectors_as_on_the_wire(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(nodes=2, groups=2), range(50))
    expected = [
        {
            "nonce": nonce,
            "slot": nonce % 4,
            "node_id": nonce % 2,
            "received_at": f"{BEGAN_TEXT}.{nonce:03}Z",
            "vector_b64": encoded(nonce),
        }
        for nonce in in_order(range(50), 4)
    ]
    assert await lines(client) == expected


async def test_json_lines_have_exact_distances(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(**DISTANCES), range(20))
    assert [line["distance"] for line in await lines(client)] == [distance(nonce) for nonce in range(20)]


async def test_csv_has_vectors(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(nodes=2), range(30))
    answer = await client.get(EXPORT, params={"format": "csv"})
    found = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert [int(row["nonce"]) for row in found] == in_order(range(30), 2)
    for row in found:
        nonce = int(row["nonce"])
        assert b64decode(row["vector_b64"]) == vector(nonce)
        assert (int(row["slot"]), int(row["node_id"])) == (nonce % 2, nonce % 2)
        assert datetime.fromisoformat(row["received_at"]) == moment(nonce)


async def test_csv_has_distances(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(**DISTANCES), range(9))
    answer = await client.get(EXPORT, params={"format": "csv"})
    found = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert [float(row["distance"]) for row in found] == [distance(nonce) for nonce in range(9)]


async def test_parquet_has_every_value(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(nodes=2), range(50))
    file = await parquet(client)
    table, order = file.read(), in_order(range(50), 2)
    assert table.schema.field("vector").type.list_size == 12
    assert table.schema.field("vector").type.value_type == pa.float16()
    assert table["nonce"].to_pylist() == order
    assert table["slot"].to_pylist() == table["node_id"].to_pylist() == [nonce % 2 for nonce in order]
    assert table["received_at"].to_pylist() == [moment(nonce) for nonce in order]
    expected = [unpack("<12e", vector(nonce)) for nonce in order]
    assert [tuple(each) for each in table["vector"].to_pylist()] == expected
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert sizes == [7] * 7 + [1]
    assert file.metadata.row_group(0).column(4).compression == "ZSTD"


async def test_parquet_has_distances(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(**DISTANCES), range(20))
    assert (await parquet(client)).read()["distance"].to_pylist() == [distance(nonce) for nonce in range(20)]


async def test_parquet_tells_the_rounds_terms_but_no_address(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(callbackURL="http://host/secret"), range(3))
    terms = json.loads((await parquet(client)).schema_arrow.metadata[TERMS_KEY.encode()])
    assert (terms["uid"], terms["block_hash"], terms["k_dim"], terms["model"]) == ("uid-1", "ab" * 32, 12, "demo")
    assert "receiver" not in terms
    assert "secret" not in str(terms)


@pytest.mark.parametrize("k_dim", [1, 2, 5])
async def test_vectors_may_have_any_length(database: Database, client: AsyncClient, k_dim: int) -> None:
    values = unpack(f"<{k_dim}e", bytes(range(2 * k_dim)))
    known = await store(database, a_round(artifact={"kDim": k_dim}), ())
    values_row = {"slot_id": known.slots[0], "nonce": 5, "vector": bytes(range(2 * k_dim)), "received_at": BEGAN}
    counts = schema.slots.update().values(stored=1, last_nonce=5)
    await database.write(lambda one: (one.execute(schema.artifacts.insert(), values_row), one.execute(counts)))
    assert (await parquet(client)).read()["vector"].to_pylist() == [list(values)]


async def test_an_empty_round_is_an_empty_file(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(), ())
    assert await lines(client) == []
    assert (await client.get(EXPORT, params={"format": "csv"})).text == "nonce,slot,node_id,received_at,vector_b64\r\n"
    assert (await parquet(client)).read().num_rows == 0


async def test_filters_of_nonces_and_slots(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(nodes=3), range(60))
    assert await nonces(client, slot=1) == list(range(1, 60, 3))
    assert await nonces(client, slot=0, nonce_from=10, nonce_to=33) == [12, 15, 18, 21, 24, 27, 30, 33]
    assert await nonces(client, nonce_from=20, nonce_to=24) == [21, 24, 22, 20, 23]
    assert await nonces(client, limit=25) == in_order(range(60), 3)[:25]


async def test_filters_of_time(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(), range(60))
    expected = list(range(10, 31))
    assert await nonces(client, **{"from": BEGAN + 10, "to": BEGAN + 31}) == expected
    assert await nonces(client, **{"from": f"{BEGAN_TEXT}.010Z", "to": "2026-01-01T01:00:00.031+01:00"}) == expected


async def test_every_filter_holds_with_a_limit(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(**DISTANCES), range(300))
    expected = [nonce for nonce in range(300) if distance(nonce) < 0.5 and nonce >= 20]
    assert await nonces(client, below=0.5, **{"from": BEGAN + 20}) == expected
    assert await nonces(client, below=0.5, limit=8, **{"from": BEGAN + 20}) == expected[:8]


def test_a_gateway_starts_without_what_exports_need() -> None:
    """It takes a while to load."""
    program = "import sys, poc_gateway.__main__; print([name for name in sys.modules if name.startswith('pyarrow')])"
    folders = os.pathsep.join(str(REPOSITORY / name) for name in ("operator", "image"))
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
