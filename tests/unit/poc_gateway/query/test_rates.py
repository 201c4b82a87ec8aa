# SPDX-License-Identifier: Apache-2.0
"""How fast the results of a round arrived over time: counted of a small round, estimated of a large one."""

from collections.abc import Callable
from typing import Any

import pytest
from httpx import AsyncClient
from sqlalchemy import Connection, delete, update

from poc_gateway.query import summary
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from tests.support.builders.deliveries import a_round
from tests.support.builders.stored import BEGAN, store

RATES = "/rounds/ns/round-uid-1/rates"
#: Second of a round in which the result of a nonce arrives.
Arrival = Callable[[int], float]


async def a_stored_round(database: Database, nonces: range, arrival: Arrival, nodes: int = 2) -> None:
    """Store a result for each nonce, which has arrived so many seconds after the first."""
    known = await store(database, a_round(nodes=nodes), nonces)

    def move(connection: Connection) -> None:
        for nonce in nonces:
            moment = BEGAN + int(1000 * arrival(nonce))
            here = schema.artifacts.c.slot_id == known.slots[known.terms.offset_of(nonce)]
            moved = update(schema.artifacts).where(here, schema.artifacts.c.nonce == nonce)
            connection.execute(moved.values(received_at=moment))

    await database.write(move)


async def rates(client: AsyncClient) -> dict[str, Any]:
    answer = await client.get(RATES)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_small_round_is_counted(database: Database, client: AsyncClient) -> None:
    # Two a second for 10 s, then ten a second for as long.
    await a_stored_round(database, range(121), lambda nonce: nonce / 2 if nonce <= 20 else 10 + (nonce - 20) / 10)
    body = await rates(client)
    assert (body["seconds"], body["counted"], body["sampled"]) == (1.0, 121, False)
    assert body["rates"] == [2.0] * 10 + [10.0] * 9 + [11.0]  # the last one has its end as well
    assert (body["first_arrival"], body["last_arrival"]) == ("2026-01-01T00:00:00Z", "2026-01-01T00:00:20Z")


async def test_a_pause_shows(database: Database, client: AsyncClient) -> None:
    await a_stored_round(database, range(40), lambda nonce: nonce / 10 if nonce < 20 else 8 + (nonce - 19) / 10)
    shown = (await rates(client))["rates"]
    assert len(shown) == 10
    assert [rate > 0 for rate in shown] == [True] * 2 + [False] * 6 + [True] * 2


async def test_a_long_round_has_no_more_spans_than_a_plot_can_show(database: Database, client: AsyncClient) -> None:
    await a_stored_round(database, range(121), lambda nonce: 60.0 * nonce)
    body = await rates(client)
    assert (len(body["rates"]), body["seconds"]) == (summary.MOST_SPANS, 120.0)
    assert sum(body["rates"]) * body["seconds"] == pytest.approx(121, rel=0.01)


@pytest.mark.parametrize("nodes", [1, 3, 40])
async def test_a_large_round_is_estimated(
    database: Database, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    monkeypatch.setattr(summary, "SAMPLED_ARRIVALS", 120)
    monkeypatch.setattr(summary, "MOST_SPANS", 4)
    nonces = range(840)
    await a_stored_round(database, nonces, lambda nonce: nonce / 10 if nonce < 420 else 42 + (nonce - 420) / 100, nodes)
    body = await rates(client)
    assert (body["sampled"], body["counted"] <= 120) == (True, True)
    span = len(body["rates"]) * body["seconds"]
    assert sum(body["rates"]) * body["seconds"] == pytest.approx(840, rel=0.01)
    moments = [nonce / 10 if nonce < 420 else 42 + (nonce - 420) / 100 for nonce in nonces]
    counted = [sum(min(3, int(4 * each / span)) == place for each in moments) for place in range(4)]
    estimated = [rate * body["seconds"] for rate in body["rates"]]
    assert estimated == pytest.approx(counted, rel=0.2, abs=45)


async def test_missing_nonces_are_no_burst(
    database: Database, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "SAMPLED_ARRIVALS", 200)
    monkeypatch.setattr(summary, "MOST_SPANS", 10)
    await store(database, a_round(), [*range(200), *range(1_000, 1_200)])
    late = update(schema.artifacts).where(schema.artifacts.c.nonce >= 1_000)
    gone = schema.artifacts.c.received_at - 800
    await database.write(lambda one: one.execute(late.values(received_at=gone)))
    seconds = update(schema.artifacts).values(received_at=BEGAN + (schema.artifacts.c.received_at - BEGAN) * 100)
    await database.write(lambda one: one.execute(seconds))
    body = await rates(client)
    assert body["sampled"]
    # One a tenth of a second throughout, however few aims the nonces that are there got.
    assert body["rates"] == pytest.approx([10.0] * 10, rel=0.35)


async def test_slots_beyond_the_sample_count_as_well(
    database: Database, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "SAMPLED_ARRIVALS", 5)
    await a_stored_round(database, range(40), lambda nonce: nonce / 4, nodes=10)
    body = await rates(client)
    assert (body["sampled"], body["counted"]) == (True, 5)
    assert sum(body["rates"]) * body["seconds"] == pytest.approx(40, rel=0.01)


async def test_what_arrived_late_counts(database: Database, client: AsyncClient) -> None:
    # The first nonce comes last, so that neither end of the slot tells the true end.
    await a_stored_round(database, range(20), lambda nonce: 99.0 if nonce == 0 else nonce / 2, nodes=1)
    body = await rates(client)
    assert sum(body["rates"]) * body["seconds"] == pytest.approx(20, rel=0.01)
    assert (body["first_arrival"], body["last_arrival"]) == ("2026-01-01T00:00:00.500000Z", "2026-01-01T00:01:39Z")
    assert len(body["rates"]) * body["seconds"] == pytest.approx(98.5, rel=0.01)


async def test_arrivals_in_any_order_have_their_true_span(database: Database, client: AsyncClient) -> None:
    # The ends of the round lie in the middle of its nonces.
    await a_stored_round(database, range(20), lambda nonce: {9: 0.0, 10: 30.0}.get(nonce, 10.0), nodes=1)
    body = await rates(client)
    assert len(body["rates"]) * body["seconds"] == pytest.approx(30)
    assert [round(rate * body["seconds"]) for rate in body["rates"] if rate] == [1, 18, 1]


@pytest.mark.parametrize("left", [0, 3])
async def test_a_round_that_is_deleted_meanwhile_is_no_fault(
    database: Database, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Its slots were counted before its artifacts were deleted."""
    monkeypatch.setattr(summary, "SAMPLED_ARRIVALS", 20)
    await store(database, a_round(nodes=1), range(100))
    gone = delete(schema.artifacts).where(schema.artifacts.c.nonce >= left)
    await database.write(lambda one: one.execute(gone))
    assert (await rates(client))["counted"] == left
    sample = await client.get("/rounds/ns/round-uid-1/sample", params={"nonces": 20, "seed": "a"})
    assert (sample.status_code, len(sample.json())) == (200, left)
    assert (await client.get("/rounds/ns/round-uid-1/summary")).status_code == 200


@pytest.mark.parametrize("count", [0, 1])
async def test_without_a_span_of_time_there_is_no_rate(database: Database, client: AsyncClient, count: int) -> None:
    await store(database, a_round(), range(count))
    body = await rates(client)
    assert (body["rates"], body["seconds"], body["counted"], body["sampled"]) == ([], 0.0, count, False)
