# SPDX-License-Identifier: Apache-2.0
"""A round stores results of its own scheme alone, whatever is delivered, and they come out as they came in."""

import csv
import io
import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from poc_gateway.errors import Refusal
from poc_gateway.ingest import storing
from poc_gateway.ingest.deliveries import read_generated
from poc_gateway.ingest.storing import store
from poc_gateway.outbox.commands import Commands
from poc_gateway.outbox.ledger import next_in_order, slots_with_work
from poc_gateway.outbox.round_sender import _generated
from poc_gateway.query.export import TERMS_KEY
from poc_gateway.query.routes import router
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, RoundTerms, write_down
from poc_operator.apis.v1alpha1.round import PoCRound
from tests.support.builders.deliveries import MAX_TOKENS, artifacts, chain, chains, distances
from tests.support.builders.deliveries import a_round as built

SPECS: Mapping[str, dict[str, Any]] = {
    "prefill": {},
    "decode": {"decode": {"maxTokens": MAX_TOKENS}},
    "distance": {"rTarget": "1.4"},
}
FORWARDED = {"callbackURL": "http://collector/poc"}
nonces = st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True)
deliveries = st.one_of(
    nonces.map(artifacts),
    nonces.map(chains),
    nonces.map(lambda some: distances((nonce, 0.5) for nonce in some)),
    nonces.map(lambda some: chains(some).replace(b'"k_points_steps"', b'"k_points"')),
    nonces.map(lambda some: chains(some).replace(b"]}", b", 3]}")),
    nonces.map(lambda some: chains(some).replace(b", 0]}", b", 16]}")),
    nonces.map(lambda some: artifacts(some).replace(b'"vector_b64"', b'"k_points_steps": [1, 2], "vector_b64"')),
)


def known(terms: PoCRound) -> KnownRound:
    return KnownRound(1, RoundTerms.of(terms), {0: 1})


@pytest.mark.parametrize("scheme", SPECS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies=st.lists(deliveries, min_size=1, max_size=6))
def test_no_sequence_of_deliveries_mixes_schemes(scheme: str, bodies: list[bytes]) -> None:
    round_ = known(built(**SPECS[scheme]))
    stored = dict[int, bytes | float]()
    for body in bodies:
        try:
            found = read_generated(round_, body).checked
        except Refusal:
            continue
        stored |= {one.nonce: one.value for one in found}
    if scheme == "distance":
        assert set(stored.values()) <= {0.5}
    else:
        size = MAX_TOKENS + 1 if scheme == "decode" else 24
        assert {len(value) for value in stored.values() if isinstance(value, bytes)} <= {size}
        assert not [value for value in stored.values() if isinstance(value, float)]
    if scheme == "decode":
        assert stored == {nonce: bytes(chain(nonce)) for nonce in stored}


async def stored_round(database: Database, bodies: list[bytes]) -> KnownRound:
    round_ = built(**SPECS["decode"], **FORWARDED)
    written = await database.write(lambda connection: write_down(connection, round_))
    for body in bodies:
        delivery = read_generated(written, body)
        await database.write(lambda connection, one=delivery: store(connection, [one], 1_000))  # type: ignore[misc]
    return written


@pytest.fixture
async def client(database: Database) -> AsyncClient:
    app = FastAPI(routes=router(database, Commands(database), limits=False).routes)
    return AsyncClient(transport=ASGITransport(app), base_url="http://gateway")


async def test_chains_come_out_of_every_format_as_they_came_in(database: Database, client: AsyncClient) -> None:
    written = await stored_round(database, [chains(range(10)), chains(range(5, 20))])
    expected = {nonce: bytes(chain(nonce)) for nonce in range(20)}
    path = "/rounds/ns/round-uid-1/artifacts"
    lines = [json.loads(line) for line in (await client.get(path, params={"format": "jsonl"})).text.splitlines()]
    assert {line["nonce"]: b64decode(line["chain_b64"]) for line in lines} == expected
    rows = csv.DictReader(io.StringIO((await client.get(path, params={"format": "csv"})).text))
    assert {int(row["nonce"]): b64decode(row["chain_b64"]) for row in rows} == expected
    file = pq.ParquetFile(io.BytesIO((await client.get(path, params={"format": "parquet"})).content))
    assert {row["nonce"]: row["chain"] for row in file.read().to_pylist()} == expected
    terms = json.loads(file.schema_arrow.metadata[TERMS_KEY.encode()])
    assert (terms["protocol"], terms["scheme"], terms["max_tokens"], terms["k_dim"]) == ("decode", "decode", 5, None)
    sample = (await client.get("/rounds/ns/round-uid-1/sample", params={"nonces": 20})).json()
    assert {proof["nonce"]: b64decode(proof["chain"]) for proof in sample} == expected
    summary = (await client.get("/rounds/ns/round-uid-1/summary")).json()
    assert (summary["round"]["scheme"], summary["round"]["max_tokens"]) == ("decode", MAX_TOKENS)
    assert sum(summary["histogram"]["counts"][:16]) == 20 * (MAX_TOKENS + 1)
    slots = await database.read(lambda connection: slots_with_work(connection, written.id))
    part = await database.read(lambda connection: next_in_order(connection, slots[0], 3))
    assert json.loads(_generated(written.terms, part)) == json.loads(chains(range(3)))


async def test_another_chain_is_kept_beside_the_first_and_holds_nothing_back(
    database: Database, client: AsyncClient
) -> None:
    other = chains([3]).replace(b"[3, 0", b"[4, 0")
    written = await stored_round(database, [chains(range(5)), other])
    page = (await client.get("/rounds/ns/round-uid-1/conflicts")).json()
    found = [
        (one["nonce"], b64decode(one["chain_b64"])[0], b64decode(one["stored_chain_b64"])[0])
        for one in page["conflicts"]
    ]
    assert found == [(3, 4, 3)]
    progress = (await client.get("/rounds/ns/round-uid-1/progress")).json()
    assert (progress["stored"], progress["conflicts"], progress["undecided"]) == (5, 1, 0)
    slots = await database.read(lambda connection: slots_with_work(connection, written.id))
    part = await database.read(lambda connection: next_in_order(connection, slots[0], 10))
    assert [item.nonce for item in part.items] == list(range(5))


async def test_other_chains_take_no_more_room_than_the_first_of_them(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference pod that starts again computes all of its slot again, and honest chains fork."""
    monkeypatch.setattr(storing, "MOST_CONFLICTS", 2)
    others = [chains(range(5)).replace(b", 0]", f", {last}]".encode()) for last in (1, 2)]
    await stored_round(database, [chains(range(5)), *others])
    kept = await database.read(lambda connection: connection.scalar(select(func.count()).select_from(schema.conflicts)))
    assert kept == 2
