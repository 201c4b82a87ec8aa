# SPDX-License-Identifier: Apache-2.0
import json
from base64 import b64encode
from typing import Any

import pytest

from poc_gateway.store import schema
from tests.support.deliveries import R_TARGET, a_round, artifacts, distances, encoded, vector
from tests.unit.poc_gateway.collector.conftest import Start

PROGRESS = "/rounds/ns/round-uid-1/progress"


def receipt(stored: int = 0, duplicates: int = 0, conflicts: int = 0) -> dict[str, object]:
    return {"stored": stored, "duplicates": duplicates, "conflicts": conflicts, "refused": []}


async def test_artifacts_are_stored_as_delivered(start: Start) -> None:
    async with start(a_round(groups=2)) as gateway:
        assert await gateway.deliver(artifacts([0, 2, 1, 4])) == (200, receipt(stored=4))
        rows = await gateway.rows(schema.artifacts)
        slots = await gateway.rows(schema.slots)
        progress = await gateway.get(PROGRESS)
    stored = {row.nonce: (row.slot_id, row.vector) for row in rows}
    even, odd = (slot.id for slot in slots)
    assert stored == {nonce: (odd if nonce % 2 else even, vector(nonce)) for nonce in (0, 1, 2, 4)}
    zero = {"duplicates": 0, "conflicts": 0, "forwarded": 0}
    first = {"slot": 0, "stored": 3, "last_nonce": 4, "delivered_index": 3, **zero}
    second = {"slot": 1, "stored": 1, "last_nonce": 1, "delivered_index": 1, **zero}
    assert progress == (200, {"uid": "uid-1", "stored": 4, **zero, "slots": [first, second]})


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
    assert "round uid-1: 1 nonces came again with other content: 1 of slot 0" in caplog.text


@pytest.mark.parametrize(("receiver", "letters"), [("http://receiver/r", [1]), (None, [])])
async def test_late_artifacts_are_sent_by_themselves(start: Start, receiver: str | None, letters: list[int]) -> None:
    async with start(a_round(callbackURL=receiver)) as gateway:
        await gateway.deliver(artifacts([0, 5, 4]))
        assert await gateway.deliver(artifacts([1, 6])) == (200, receipt(stored=2))
        late = await gateway.rows(schema.letters)
        (slot,) = await gateway.rows(schema.slots)
    assert [(row.nonce, row.state, row.reason) for row in late] == [(nonce, "waiting", "late") for nonce in letters]
    assert (slot.stored, slot.last_nonce) == (5, 6)


@pytest.mark.parametrize(
    "fields",
    [{"public_key": "other"}, {"block_hash": "cd" * 32}, {"block_height": 8}, {"encoding": {"k_dim": 6}}],
)
async def test_another_rounds_message_is_refused(start: Start, fields: dict[str, Any]) -> None:
    async with start(a_round()) as gateway:
        status, body = await gateway.deliver(artifacts([0], **fields))
        rows = await gateway.rows(schema.artifacts)
    assert (status, body["reason"], list(rows)) == (400, "WrongRound", [])
    assert next(iter(fields)) in body["detail"]


async def test_another_protocols_message_is_refused(start: Start) -> None:
    async with start(a_round()) as gateway:
        status, body = await gateway.deliver(distances([(0, 0.5)]))
    assert (status, body["reason"]) == (400, "InvalidRequest")
    assert body["detail"].startswith("artifacts: Field required")


BAD = {
    "not base64": ("?", "BadVector"),
    "too short": (b64encode(vector(1)[:-2]).decode(), "BadVector"),
    "too long": (b64encode(vector(1) + b"\0\0").decode(), "BadVector"),
    "NaN": (b64encode(vector(1)[:-2] + b"\x00\x7e").decode(), "BadVector"),
    "infinite": (b64encode(b"\x00\xfc" + vector(1)[2:]).decode(), "BadVector"),
    "no text": (7, "Malformed"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_vector_costs_no_other(start: Start, case: str) -> None:
    text, reason = BAD[case]
    bad = {"nonce": 1, "vector_b64": text}
    good = [{"nonce": nonce, "vector_b64": encoded(nonce)} for nonce in (0, 2)]
    async with start(a_round()) as gateway:
        answer = await gateway.deliver(artifacts([], artifacts=[good[0], bad, good[1]]))
        assert answer == (200, receipt(stored=2) | {"refused": [{"nonce": 1, "reason": reason}]})
        status, body = await gateway.deliver(artifacts([], artifacts=[bad]))
        rows = await gateway.rows(schema.artifacts)
    assert (status, body["reason"]) == (400, "ArtifactsRefused")
    assert f"1 {reason}" in body["detail"]
    assert [row.nonce for row in rows] == [0, 2]


@pytest.mark.parametrize("nonce", [-1, 2**31, True, "x", None, 1.5])
async def test_a_bad_nonce_costs_no_other(start: Start, nonce: object) -> None:
    items = [{"nonce": nonce, "vector_b64": encoded(1)}, {"nonce": 4, "vector_b64": encoded(4)}]
    async with start(a_round()) as gateway:
        status, body = await gateway.deliver(artifacts([], artifacts=items))
    named = nonce if nonce in (-1, 2**31) and nonce is not True else None
    assert (status, body) == (200, receipt(stored=1) | {"refused": [{"nonce": named, "reason": "Malformed"}]})


@pytest.mark.parametrize(
    ("value", "reason"), [("NaN", "Malformed"), ("-0.1", "BadDistance"), ("1.4", "BadDistance"), ("1e999", "Malformed")]
)
async def test_a_bad_distance_costs_no_other(start: Start, value: str, reason: str) -> None:
    body = distances([(0, 0.5), (1, 0.25)]).replace(b"0.25", value.encode())
    async with start(a_round(rTarget=str(R_TARGET))) as gateway:
        answer = await gateway.deliver(body)
    assert answer == (200, receipt(stored=1) | {"refused": [{"nonce": 1, "reason": reason}]})


async def test_lists_that_differ_in_length_are_refused(start: Start) -> None:
    async with start(a_round(rTarget=str(R_TARGET))) as gateway:
        status, body = await gateway.deliver(distances([(0, 0.5), (1, 0.25)], dist=[0.5]))
    assert (status, body["reason"]) == (400, "InvalidRequest")
    assert "nonces and dist differ in length" in body["detail"]


async def test_nonces_of_others_are_refused(start: Start) -> None:
    async with start(a_round(nodes=2, of_nodes=3)) as gateway:
        status, body = await gateway.deliver(artifacts([0, 1, 2, 3]))
    refused = [{"nonce": 1, "reason": "WrongNode"}, {"nonce": 2, "reason": "UnknownSlot"}]
    assert (status, body) == (200, receipt(stored=2) | {"refused": refused})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"artifacts": 3}'])
async def test_what_is_no_message_is_refused(start: Start, body: bytes) -> None:
    async with start(a_round()) as gateway:
        status, answer = await gateway.deliver(body)
        verdict_status, verdict = await gateway.deliver(body, end="validated")
    assert (status, answer["reason"]) == (400, "InvalidRequest")
    assert (verdict_status, verdict["reason"]) == (400, "InvalidRequest")


async def test_an_unknown_round_is_not_found(start: Start) -> None:
    async with start(a_round()) as gateway:
        status, body = await gateway.deliver(artifacts([0]), uid="uid-2")
        assert (status, body["reason"]) == (404, "RoundUnknown")
        status, body = await gateway.get(PROGRESS)
        assert (status, body["reason"]) == (404, "RoundUnknown")


async def test_a_round_written_down_needs_no_api_server(start: Start) -> None:
    async with start(a_round(), a_round("uid-2")) as gateway:
        await gateway.deliver(artifacts([0]))
        gateway.api_server_away = True
        assert await gateway.deliver(artifacts([1])) == (200, receipt(stored=1))
        status, body = await gateway.deliver(artifacts([0]), uid="uid-2")
        assert (status, body["reason"]) == (503, "ApiServerUnavailable")
        gateway.api_server_away = False
        assert await gateway.deliver(artifacts([0]), uid="uid-2") == (200, receipt(stored=1))


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
