# SPDX-License-Identifier: Apache-2.0
"""Parameters of an export that are wrong, and how its format is chosen."""

from typing import Any

import pytest
from httpx import AsyncClient

from poc_gateway.query.export import MEDIA_TYPES
from poc_gateway.query.messages import Format
from poc_gateway.store.database import Database
from tests.support.builders.deliveries import a_round
from tests.support.builders.stored import store

EXPORT = "/rounds/ns/round-uid-1/artifacts"


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"slot": "x"}, "slot"),
        ({"slot": 5}, "slot"),
        ({"below": "0.5"}, "below"),
        ({"below": "nan"}, "below"),
        ({"from": "2026-01-01T00:00:00"}, "from"),
        ({"to": "soon"}, "to"),
        ({"from": "0001-01-01T00:00:00+14:00"}, "from"),
        ({"nonce_from": -1}, "nonce_from"),
        ({"nonce_to": 2**31}, "nonce_to"),
        ({"limit": 0}, "limit"),
        ({"format": "xml"}, "format"),
        ({"slots": 1}, "slots"),
        ({"nonce_from": 2, "nonce_to": 1}, ""),
        ({"from": 2, "to": 2}, ""),
    ],
)
async def test_bad_parameters_are_named(
    database: Database, client: AsyncClient, parameters: dict[str, Any], field: str
) -> None:
    await store(database, a_round(), range(3))
    answer = await client.get(EXPORT, params=parameters)
    body = answer.json()
    assert (answer.status_code, body["reason"]) == (422, "InvalidRequest")
    assert [error["field"] for error in body["errors"]] == [field]
    assert all(name in body["detail"] for name in parameters)


@pytest.mark.parametrize("format_", Format)
async def test_accept_decides_without_a_format(database: Database, client: AsyncClient, format_: Format) -> None:
    await store(database, a_round(), range(3))
    answer = await client.get(EXPORT, headers={"Accept": f"text/html;q=0.1, {MEDIA_TYPES[format_]};q=0.9"})
    assert answer.headers["content-type"].split(";")[0] == MEDIA_TYPES[format_]
    assert answer.headers["content-disposition"] == f'attachment; filename="ns-round-uid-1-uid-1.{format_}"'


async def test_a_format_goes_before_accept(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(), range(3))
    answer = await client.get(EXPORT, params={"format": "csv"}, headers={"Accept": "image/png"})
    assert answer.headers["content-type"].startswith("text/csv")
    refused = await client.get(EXPORT, headers={"Accept": "image/png"})
    assert (refused.status_code, refused.json()["reason"]) == (406, "NotAcceptable")
