# SPDX-License-Identifier: Apache-2.0
"""Rounds, their slots, summaries and conflicts."""

from itertools import pairwise
from typing import Any

import pytest
from httpx import AsyncClient

from poc_gateway.query import summary
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, newest
from tests.support.builders.deliveries import a_round, encoded, vector
from tests.support.builders.stored import BEGAN, distance, store

ROUND = "/rounds/ns/round-uid-1"
DISTANCES = {"rTarget": "1.4"}


def renamed(uid: str, name: str) -> Any:  # noqa: ANN401
    round_ = a_round(uid)
    return round_.model_copy(update={"metadata": round_.metadata.model_copy(update={"name": name})})


async def insert(database: Database, table: Any, **values: Any) -> None:  # noqa: ANN401
    await database.write(lambda connection: connection.execute(table.insert(), values))


async def conflicting(database: Database, known: KnownRound, nonces: range) -> None:
    for nonce in nonces:
        slot_id = known.slots[known.terms.offset_of(nonce)]
        values = {"slot_id": slot_id, "nonce": nonce, "vector": vector(nonce + 1), "received_at": BEGAN}
        await insert(database, schema.conflicts, **values)


async def test_rounds_are_listed_newest_first_page_by_page(database: Database, client: AsyncClient) -> None:
    for number in range(5):
        await store(database, a_round(f"uid-{number}", nodes=2), range(number))
    first = (await client.get("/rounds", params={"limit": 3})).json()
    assert [(entry["uid"], entry["stored"], entry["slots"]) for entry in first["rounds"]] == [
        ("uid-4", 4, 2),
        ("uid-3", 3, 2),
        ("uid-2", 2, 2),
    ]
    last = (await client.get("/rounds", params={"limit": 3, "after": first["next"]})).json()
    assert [entry["uid"] for entry in last["rounds"]] == ["uid-1", "uid-0"]
    assert last["next"] is None


async def test_a_round_that_is_being_deleted_is_gone(database: Database, client: AsyncClient) -> None:
    older = await store(database, renamed("uid-0", "round-uid-1"), range(2))
    known = await store(database, a_round(), range(3))
    begun = schema.rounds.update().where(schema.rounds.c.id == known.id).values(deleted_at=1)
    await database.write(lambda connection: connection.execute(begun))
    assert [entry["uid"] for entry in (await client.get("/rounds")).json()["rounds"]] == [older.terms.uid]
    assert (await client.get(ROUND)).json()["round"]["uid"] == older.terms.uid
    sample = {"nonces": "9", "seed": "a"}
    assert len((await client.get(f"{ROUND}/sample", params=sample)).json()) == 2
    for end, needed in (
        ("", {}),
        ("/summary", {}),
        ("/rates", {}),
        ("/conflicts", {}),
        ("/sample", sample),
        ("/artifacts", {}),
    ):
        answer = await client.get(f"{ROUND}{end}", params={"uid": "uid-1", **needed})
        assert (answer.status_code, answer.json()["reason"]) == (404, "RoundUnknown")


@pytest.mark.parametrize(
    ("parameters", "uids"),
    [
        ({"name": "round-uid-1"}, ["uid-1"]),
        ({"namespace": "ns", "block_hash": "cd" * 32}, ["uid-2"]),
        ({"namespace": "other"}, []),
    ],
)
async def test_rounds_are_filtered(
    database: Database, client: AsyncClient, parameters: dict[str, Any], uids: list[str]
) -> None:
    await store(database, a_round("uid-1"), ())
    await store(database, a_round("uid-2", blockHash="cd" * 32), ())
    found = (await client.get("/rounds", params=parameters)).json()["rounds"]
    assert [entry["uid"] for entry in found] == uids


async def test_a_round_has_its_terms_sums_and_slots(database: Database, client: AsyncClient) -> None:
    known = await store(database, a_round(nodes=2), range(5))
    await insert(
        database, schema.late_items, slot_id=known.slots[1], nonce=1, state="refused", reason="HTTP 400", since=1
    )
    await insert(database, schema.late_items, slot_id=known.slots[1], nonce=3, state="waiting", reason="late", since=1)
    body = (await client.get(ROUND)).json()
    entry, slots = body["round"], body["slots"]
    assert (entry["block_hash"], entry["public_key"], entry["protocol"], entry["model"]) == (
        "ab" * 32,
        "key",
        "artifact",
        "demo",
    )
    assert (entry["stored"], entry["dead"], entry["slots"]) == (5, 1, 2)
    assert [(slot["slot"], slot["stored"], slot["last_nonce"], slot["dead"]) for slot in slots] == [
        (0, 3, 4, 0),
        (1, 2, 3, 1),
    ]


async def test_the_newest_round_of_a_name_unless_its_uid_says_another(database: Database, client: AsyncClient) -> None:
    for uid in ("old", "new"):
        await store(database, renamed(uid, "same"), ())
    assert (await client.get("/rounds/ns/same")).json()["round"]["uid"] == "new"
    assert (await client.get("/rounds/ns/same", params={"uid": "old"})).json()["round"]["uid"] == "old"
    assert await database.read(lambda connection: newest(connection, "ns", "none")) is None


@pytest.mark.parametrize("end", ["", "/summary", "/rates", "/conflicts", "/artifacts", "/sample?seed=1", "?uid=uid-2"])
async def test_unknown_rounds(database: Database, client: AsyncClient, end: str) -> None:
    await store(database, a_round("uid-2"), ())
    answer = await client.get(f"/rounds/ns/round-uid-1{end}")
    assert (answer.status_code, answer.json()["reason"]) == (404, "RoundUnknown")
    assert "ns/round-uid-1" in answer.json()["detail"]


async def test_a_summary_counts_distances(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(nodes=2, **DISTANCES), range(1001))
    body = (await client.get(f"{ROUND}/summary")).json()
    shown, edges = body["histogram"], body["histogram"]["edges"]
    values = [distance(nonce) for nonce in range(1001)]
    assert (edges[0], edges[-1], len(edges), shown["counted"], shown["sampled"]) == (0, 1.4, 21, 1001, False)
    assert shown["counts"] == [sum(low <= value < high for value in values) for low, high in pairwise(edges)]
    assert body["rate"] == 1001.0
    assert (body["first_arrival"], body["last_arrival"]) == ("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z")
    assert [slot["stored"] for slot in body["slots"]] == [501, 500]
    assert body["slots"][1]["last_arrival"] == "2026-01-01T00:00:00.999000Z"


@pytest.mark.parametrize("most", [1000, 0])
@pytest.mark.parametrize("r_target", [1.4, 1.3999, 0.5])
@pytest.mark.parametrize("odd", [(), (0.03,), (0.0, -1000.0)])
async def test_the_bins_of_distances_begin_at_the_smallest(
    database: Database,
    client: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    r_target: float,
    odd: tuple[float, ...],
) -> None:
    monkeypatch.setattr(summary, "MOST_COUNTED", most)
    known = await store(database, a_round(**DISTANCES | {"rTarget": str(r_target)}), ())
    honest = [1.3901 + nonce % 9 / 1000 for nonce in range(50)]
    for nonce, value in enumerate([*odd, *honest]):
        row = {"slot_id": known.slots[0], "nonce": nonce, "distance": value, "received_at": BEGAN}
        await insert(database, schema.artifacts, **row)
    stored = 50 + len(odd)
    counts = {"stored": stored, "last_nonce": stored - 1}
    await database.write(lambda connection: connection.execute(schema.slots.update().values(**counts)))
    shown = (await client.get(f"{ROUND}/summary")).json()["histogram"]
    assert (shown["counted"], shown["sampled"], shown["edges"][-1]) == (stored, not most, r_target)
    if r_target < 1:
        assert shown["above"] == 50
        return
    assert (shown["below"], shown["above"]) == (len(odd), 0)
    assert 1.3885 < shown["edges"][0] <= 1.3901
    assert shown["counts"] == [sum(low <= value < high for value in honest) for low, high in pairwise(shown["edges"])]
    assert sum(1 for count in shown["counts"] if count) == 9


async def test_a_summary_samples_many_distances(
    database: Database, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "MOST_COUNTED", 1000)
    monkeypatch.setattr(summary, "SAMPLED_VALUES", 500)
    await store(database, a_round(nodes=2, **DISTANCES), range(1001))
    shown = (await client.get(f"{ROUND}/summary")).json()["histogram"]
    assert (shown["quantity"], shown["sampled"], shown["counted"], shown["above"]) == ("distance", True, 500, 0)
    values = [distance(nonce) for nonce in range(1001)]
    every = [sum(low <= value < high for value in values) for low, high in pairwise(shown["edges"])]
    assert all(bool(some) <= bool(of) and some <= of for some, of in zip(shown["counts"], every, strict=True))


async def test_a_summary_samples_vectors(database: Database, client: AsyncClient) -> None:
    known = await store(database, a_round(), ())
    halves, ones = b"\x00\x38" + bytes(22), b"\x00\x3c" * 12  # norms 0.5 and 3.46
    for nonce, value in enumerate((halves, halves, ones)):
        values = {"slot_id": known.slots[0], "nonce": nonce, "vector": value, "received_at": BEGAN}
        await insert(database, schema.artifacts, **values)
    await database.write(lambda connection: connection.execute(schema.slots.update().values(stored=3, last_nonce=2)))
    shown = (await client.get(f"{ROUND}/summary")).json()["histogram"]
    assert (shown["quantity"], shown["sampled"], shown["counted"], shown["above"]) == ("vector norm", True, 3, 1)
    assert shown["counts"] == [0] * 5 + [2] + [0] * 14


async def test_an_empty_round_has_a_summary(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(nodes=2), ())
    body = (await client.get(f"{ROUND}/summary")).json()
    assert (body["rate"], body["first_arrival"], body["histogram"]["counted"]) == (None, None, 0)


async def test_conflicts_are_shown_beside_what_is_stored(database: Database, client: AsyncClient) -> None:
    known = await store(database, a_round(nodes=2), range(5))
    await conflicting(database, known, range(3))
    first = (await client.get(f"{ROUND}/conflicts", params={"limit": 2})).json()
    found = [
        (each["nonce"], each["slot"], each["vector_b64"], each["stored_vector_b64"]) for each in first["conflicts"]
    ]
    assert found == [(0, 0, encoded(1), encoded(0)), (1, 1, encoded(2), encoded(1))]
    last = (await client.get(f"{ROUND}/conflicts", params={"limit": 2, "after": first["next"]})).json()
    assert [each["nonce"] for each in last["conflicts"]] == [2]
    assert "next" not in last
