# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from poc_gateway.query.queries import nothing
from poc_gateway.store import schema
from tests.support.builders.deliveries import R_TARGET, a_round, artifacts, distances, encoded, vector
from tests.unit.poc_gateway.ingest.conftest import Start, receipt

PROGRESS = "/rounds/ns/round-uid-1/progress"


async def test_artifacts_are_stored_as_delivered(start: Start) -> None:
    async with start(a_round(groups=2)) as gateway:
        assert await gateway.deliver(artifacts([0, 2, 1, 4])) == (200, receipt(stored=4))
        rows = await gateway.rows(schema.artifacts)
        slots = await gateway.rows(schema.slots)
        progress = await gateway.get(PROGRESS)
        assert await gateway.get(f"{PROGRESS}?uid=uid-1") == progress
    stored = {row.nonce: (row.slot_id, row.vector) for row in rows}
    even, odd = (slot.id for slot in slots)
    assert stored == {nonce: (odd if nonce % 2 else even, vector(nonce)) for nonce in (0, 1, 2, 4)}
    zero = {"duplicates": 0, "conflicts": 0, "forwarded": 0}
    first = {"slot": 0, "stored": 3, "last_nonce": 4, "delivered_index": 3, **zero, "rivals": []}
    second = {"slot": 1, "stored": 1, "last_nonce": 1, "delivered_index": 1, **zero, "rivals": []}
    told = {"slots": [first, second], "refused": [], "undecided": 0, "forgers": [], "limit_reached": None}
    receiver = {"forwarding_error": None, "waiting": 0}
    assert progress == (200, {"uid": "uid-1", "stored": 4, **zero, **told, **receiver})


async def test_distances_are_stored_as_delivered(start: Start) -> None:
    async with start(a_round(rTarget=str(R_TARGET))) as gateway:
        assert await gateway.deliver(distances([(3, 0.1), (5, 0.0), (9, 1.3999)])) == (200, receipt(stored=3))
        assert await gateway.deliver(distances([(3, 0.1), (5, 0.5)])) == (200, receipt(duplicates=1, conflicts=1))
        rows = await gateway.rows(schema.artifacts)
    assert [(row.nonce, row.distance, row.vector) for row in rows] == [
        (3, 0.1, None),
        (5, 0.0, None),
        (9, 1.3999, None),
    ]


async def test_duplicates_are_stored_once(start: Start) -> None:
    async with start(a_round()) as gateway:
        assert await gateway.deliver(artifacts([0, 1, 1, 0])) == (200, receipt(stored=2, duplicates=2))
        assert await gateway.deliver(artifacts([0, 1])) == (200, receipt(duplicates=2))
        assert await gateway.deliver(artifacts([1, 2])) == (200, receipt(stored=1, duplicates=1))
        (slot,) = await gateway.rows(schema.slots)
    assert (slot.stored, slot.last_nonce, slot.duplicates, slot.conflicts) == (3, 2, 5, 0)


async def test_other_content_is_a_conflict(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    other = {"nonce": 1, "vector_b64": encoded(2)}
    async with start(a_round()) as gateway:
        await gateway.deliver(artifacts([0, 1]))
        assert await gateway.deliver(artifacts([], artifacts=[other])) == (200, receipt(conflicts=1))
        twice = [{"nonce": 2, "vector_b64": encoded(nonce)} for nonce in (2, 3)]
        assert await gateway.deliver(artifacts([], artifacts=twice)) == (200, receipt(stored=1, conflicts=1))
        conflicts = await gateway.rows(schema.conflicts)
        rows = await gateway.rows(schema.artifacts)
        (slot,) = await gateway.rows(schema.slots)
    assert [(row.nonce, row.vector) for row in conflicts] == [(1, vector(2)), (2, vector(3))]
    assert {row.nonce: row.vector for row in rows} == {nonce: vector(nonce) for nonce in range(3)}
    assert (slot.stored, slot.conflicts) == (3, 2)
    assert "1 nonces came again with other content: 1 of slot 0" in caplog.text


@pytest.mark.parametrize(("receiver", "late"), [("http://receiver/r", [1]), (None, [])])
async def test_late_artifacts_are_sent_by_themselves(start: Start, receiver: str | None, late: list[int]) -> None:
    async with start(a_round(callbackURL=receiver)) as gateway:
        await gateway.deliver(artifacts([0, 5, 4]))
        assert await gateway.deliver(artifacts([1, 6])) == (200, receipt(stored=2))
        found = await gateway.rows(schema.late_items)
        (slot,) = await gateway.rows(schema.slots)
    assert [(row.nonce, row.state, row.reason) for row in found] == [(nonce, "waiting", "late") for nonce in late]
    assert (slot.stored, slot.last_nonce) == (5, 6)


async def test_an_unknown_round_is_not_found(start: Start) -> None:
    async with start(a_round()) as gateway:
        status, body = await gateway.deliver(artifacts([0]), uid="uid-2")
        assert (status, body["reason"]) == (404, "RoundUnknown")
        status, body = await gateway.get(PROGRESS)
        assert (status, body["reason"]) == (404, "RoundUnknown")


async def test_a_round_that_waits_for_pods_is_asked_about_without_an_error(start: Start) -> None:
    """The operator asks every 2 s, and each error is a line in the log."""
    async with start(a_round()) as gateway:
        await gateway.deliver(artifacts([0]))
        status, body = await gateway.get(f"{PROGRESS}?uid=uid-2")
    assert (status, body) == (200, nothing("uid-2").model_dump())
    assert (body["uid"], body["stored"], body["slots"]) == ("uid-2", 0, [])


async def test_a_round_written_down_needs_no_api_server(start: Start) -> None:
    async with start(a_round(), a_round("uid-2")) as gateway:
        await gateway.deliver(artifacts([0]))
        gateway.api_server_away = True
        assert await gateway.deliver(artifacts([1])) == (200, receipt(stored=1))
        status, body = await gateway.deliver(artifacts([0]), uid="uid-2")
        assert (status, body["reason"]) == (503, "ApiServerUnavailable")
        gateway.api_server_away = False
        assert await gateway.deliver(artifacts([0]), uid="uid-2") == (200, receipt(stored=1))


async def test_results_of_a_round_that_cannot_be_read_are_not_lost(start: Start) -> None:
    async with start(a_round()) as gateway:
        gateway.unreadable = True
        status, body = await gateway.deliver(artifacts([0]))
        assert (status, body["reason"]) == (503, "RoundUnreadable")
        assert body["detail"].startswith(
            "PoCRound ns/round-uid-1 cannot be read (spec.nodes: Field required): install the CRDs"
        )
        gateway.unreadable = False
        assert await gateway.deliver(artifacts([0])) == (200, receipt(stored=1))


VERDICT = {"request_id": "1", "node_id": 0, "n_total": 4, "n_mismatch": 0, "mismatch_nonces": []}


@pytest.mark.parametrize(
    ("receiver", "url", "state"),
    [("http://receiver/r/", "http://receiver/r/validated", "waiting"), (None, None, "kept")],
)
async def test_verdicts_are_kept(start: Start, receiver: str | None, url: str | None, state: str) -> None:
    verdict = {**json.loads(artifacts([])), **VERDICT, "p_value": 1.0, "fraud_detected": False}
    async with start(a_round(callbackURL=receiver)) as gateway:
        assert await gateway.deliver(json.dumps(verdict).encode(), end="validated") == (200, {"status": "OK"})
        wrong = json.dumps(verdict | {"block_height": 1}).encode()
        assert (await gateway.deliver(wrong, end="validated"))[0] == 400
        (row,) = await gateway.rows(schema.callbacks)
    assert (row.url, row.state, json.loads(row.body)) == (url, state, verdict)
