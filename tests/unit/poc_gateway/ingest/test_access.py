# SPDX-License-Identifier: Apache-2.0
import aiohttp
import pytest

from poc_operator.clients.gateway import round_password
from tests.support.builders.deliveries import JSON, a_round, artifacts, path
from tests.unit.poc_gateway.ingest.conftest import Start

TOKEN = "secret"  # noqa: S105 - a test's
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def basic(password: str, user: str = "pod") -> dict[str, str]:
    return {"Authorization": aiohttp.encode_basic_auth(user, password)}


def test_the_password_is_the_rounds_own() -> None:
    # printf uid-1 | openssl dgst -sha256 -hmac secret
    assert round_password(TOKEN, "uid-1") == "410e2752734c59df89f1a8f603764a57"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (basic(round_password(TOKEN, "uid-1")), 200),
        (BEARER, 200),
        ({}, 401),
        (basic(round_password(TOKEN, "uid-2")), 401),
        (basic(round_password("other", "uid-1")), 401),
        (basic(round_password(TOKEN, "uid-1"), user="root"), 401),
        (basic("secret"), 401),
        ({"Authorization": "Bearer other"}, 401),
        ({"Authorization": f"Bearer {round_password(TOKEN, 'uid-1')}"}, 401),
    ],
)
async def test_pods_deliver_with_their_rounds_password(start: Start, headers: dict[str, str], status: int) -> None:
    async with (
        start(a_round(), token=TOKEN) as gateway,
        gateway.session.post(path(), data=artifacts([0]), headers=headers) as answer,
    ):
        assert answer.status == status
        body = await answer.json()
        assert body.get("reason") == (None if status == 200 else "Unauthorized")
        assert ("WWW-Authenticate" in answer.headers) == (status == 401)


async def test_progress_needs_the_token(start: Start) -> None:
    url = "/rounds/ns/round-uid-1/progress"
    async with start(a_round(), token=TOKEN) as gateway:
        await gateway.session.post(path(), data=artifacts([0]), headers=BEARER)
        for headers, status in ((BEARER, 200), ({}, 401), (basic(round_password(TOKEN, "uid-1")), 401)):
            async with gateway.session.get(url, headers=headers) as answer:
                assert answer.status == status
        assert (await gateway.get("/readyz"))[0] == 200


async def test_the_password_in_the_address_suffices(start: Start) -> None:
    async with start(a_round(), token=TOKEN) as gateway:
        url = gateway.url.with_user("pod").with_password(round_password(TOKEN, "uid-1")).with_path(path())
        async with aiohttp.ClientSession(headers=JSON) as session, session.post(url, data=artifacts([0])) as answer:
            assert answer.status == 200
