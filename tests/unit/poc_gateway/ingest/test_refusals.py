# SPDX-License-Identifier: Apache-2.0
from base64 import b64encode
from typing import Any

import pytest

from poc_gateway.store import schema
from tests.support.builders.deliveries import (
    MAX_TOKENS,
    R_TARGET,
    a_round,
    artifacts,
    chains,
    distances,
    encoded,
    path,
    vector,
)
from tests.unit.poc_gateway.ingest.conftest import Answer, Gateway, Start, receipt


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


async def test_a_long_value_leaves_room_for_the_remedy(start: Start) -> None:
    async with start(a_round()) as gateway:
        _, body = await gateway.deliver(artifacts([0], public_key="x" * 5000))
    assert body["detail"].startswith("public_key is xxx")
    assert body["detail"].endswith("has key: deliver to its own")


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


@pytest.mark.parametrize(
    ("end", "body"),
    [
        ("generated", b"{"),
        ("generated", artifacts([0], public_key="other")),
        ("generated", artifacts([], artifacts=[{"nonce": -1, "vector_b64": ""}])),
        ("validated", b"{"),
        ("validated", artifacts([], public_key="other")),
    ],
)
async def test_what_is_refused_makes_no_round_known(start: Start, end: str, body: bytes) -> None:
    async with start(a_round()) as gateway:
        status, _ = await gateway.deliver(body, end=end)
        assert (status, list(await gateway.rows(schema.rounds))) == (400, [])
        assert await gateway.deliver(artifacts([0])) == (200, receipt(stored=1))


@pytest.mark.parametrize("url", [path(), "/rounds/ns/round-uid-1/dead-letters/replay"])
@pytest.mark.parametrize("body", [b"[" * 5000, b"\xff\xfe", b"1" * 5000, b"[]", b"3"])
async def test_a_wrong_body_is_named(start: Start, url: str, body: bytes) -> None:
    async with start(a_round()) as gateway:
        status, answer = await _send(gateway, "POST", url, body)
    assert (status, answer["reason"]) in [(400, "InvalidRequest"), (422, "InvalidRequest")]
    assert answer["detail"].startswith("body: ")
    assert [error["field"] for error in answer["errors"]] == ["body"]


async def _send(gateway: Gateway, method: str, url: str, body: bytes = b"") -> Answer:
    headers = {"Content-Type": "application/json"}
    async with gateway.session.request(method, url, data=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_a_wrong_address_is_told_apart_from_a_wrong_method(start: Start) -> None:
    async with start() as gateway:
        status, answer = await gateway.get("/nowhere")
        assert (status, answer["reason"]) == (404, "NotFound")
        assert "GET /openapi.json" in answer["detail"]
        status, answer = await _send(gateway, "PUT", path())
        assert (status, answer["reason"]) == (405, "MethodNotAllowed")
        assert "send POST" in answer["detail"]


@pytest.mark.parametrize("url", ["/rounds/ns/%00", "/rounds?name=a%00", "/rounds/ns/x/summary?uid=%00"])
async def test_a_nul_in_the_address_is_refused(start: Start, url: str) -> None:
    async with start() as gateway:
        status, answer = await gateway.get(url)
    assert (status, answer["reason"]) == (400, "InvalidRequest")
    assert "NUL" in answer["detail"]


async def test_chains_of_a_codebook_that_is_not_the_networks_are_refused(start: Start) -> None:
    """Once stored they would be forwarded as the network's."""
    round_ = a_round(decode={"maxTokens": MAX_TOKENS})
    async with start(round_) as gateway:
        status, body = await gateway.deliver(chains([0], rebuilt_codebook=True))
        assert (status, body["reason"]) == (403, "RebuiltCodebook")
        assert "set VLLM_POC_DECODE_CODEBOOK of the pod" in body["detail"]
        assert list(await gateway.rows(schema.artifacts)) == []
        assert await gateway.deliver(chains([0])) == (200, receipt(stored=1))
