# SPDX-License-Identifier: Apache-2.0
"""Verdicts: each pod's about a batch once, and not without bound."""

import json
from typing import Any

import pytest

from poc_gateway.ingest import validated
from poc_gateway.store import schema
from tests.support.builders.deliveries import ROUND, a_round, path
from tests.support.builders.secrets import SECRETS, a_grant, pod_headers
from tests.unit.poc_gateway.ingest.conftest import Gateway, Start


def verdict(**fields: Any) -> bytes:  # noqa: ANN401
    return json.dumps(ROUND | {"n_total": 3, "fraud_detected": False} | fields).encode()


async def tell(gateway: Gateway, body: bytes, pod: str = "a") -> tuple[int, str | None]:
    headers = pod_headers(a_grant(pod=pod))
    async with gateway.session.post(path(end="validated"), data=body, headers=headers) as answer:
        return answer.status, (await answer.json()).get("reason")


@pytest.mark.parametrize("batch", [{"request_id": "r1"}, {"nonces": [3, 1, 2]}, {}], ids=["request", "nonces", "none"])
async def test_a_repeated_verdict_is_stored_once(start: Start, batch: dict[str, Any]) -> None:
    async with start(a_round(callbackURL="http://receiver.example/"), **SECRETS) as gateway:
        for _ in range(3):
            assert await tell(gateway, verdict(**batch)) == (200, None)
        assert await tell(gateway, verdict(**batch), "b") == (200, None)
        assert await tell(gateway, verdict(**batch | {"request_id": "r2"})) == (200, None)
        assert len(await gateway.rows(schema.callbacks)) == 3


@pytest.mark.parametrize("batch", [[{"request_id": "r1"}] * 2, [{"nonces": [3, 1, 2]}, {"nonces": [1, 2, 3]}]])
async def test_the_first_of_two_verdicts_about_a_batch_stays(start: Start, batch: list[dict[str, Any]]) -> None:
    async with start(a_round(), **SECRETS) as gateway:
        assert await tell(gateway, verdict(**batch[0])) == (200, None)
        assert await tell(gateway, verdict(**batch[1], fraud_detected=True)) == (409, "VerdictConflict")
        (stored,) = await gateway.rows(schema.callbacks)
        assert json.loads(stored.body)["fraud_detected"] is False


async def test_a_pod_has_a_number_of_verdicts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validated, "MOST_VERDICTS", 5)
    async with start(a_round(), **SECRETS) as gateway:
        answers = [await tell(gateway, verdict(request_id=str(number))) for number in range(8)]
        assert answers == [(200, None)] * 5 + [(409, "TooManyVerdicts")] * 3
        assert await tell(gateway, verdict(request_id="0")) == (200, None), "one that is stored is still known"
        assert await tell(gateway, verdict(request_id="0"), "b") == (200, None)


async def test_verdicts_have_a_size_alone_and_together(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validated, "MOST_TOTAL_BYTES", 3_000)
    async with start(a_round(), **SECRETS) as gateway:
        assert await tell(gateway, verdict(x="x" * validated.MOST_BYTES)) == (413, "BodyTooLarge")
        answers = [await tell(gateway, verdict(request_id=str(number), x="x" * 900)) for number in range(4)]
        assert [status for status, _ in answers] == [200, 200, 409, 409]


async def test_a_verdict_by_a_codebook_that_is_not_the_networks_is_refused(start: Start) -> None:
    async with start(a_round(), **SECRETS) as gateway:
        assert await tell(gateway, verdict(rebuilt_codebook=True)) == (403, "RebuiltCodebook")
        assert await gateway.rows(schema.callbacks) == []
