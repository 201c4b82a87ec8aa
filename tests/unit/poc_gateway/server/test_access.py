# SPDX-License-Identifier: Apache-2.0
"""Without the token no route does anything, not even receive a body."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.types import Message

from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.middleware import OPEN_PATHS
from poc_gateway.server.process import Components, inside_app, network_app
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from poc_operator.credentials import GATEWAY_TOKEN_HEADER
from tests.support.builders.secrets import ENVIRONMENT, TOKEN

NETWORK_TOKEN = "token-of-the-network"  # noqa: S105 - a test's
SETTINGS = {**ENVIRONMENT, "POC_GATEWAY_NETWORK_TOKEN": f"newer,{NETWORK_TOKEN}"}
APPS = {"inside": inside_app, "network": network_app}
TOKENS = {"inside": TOKEN, "network": NETWORK_TOKEN}


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Components]:
    async def no_round(_: str, __: str) -> None:
        return None

    settings, database = Settings.from_environment(SETTINGS), Database.open(f"sqlite:///{tmp_path}/gateway.db")
    rounds, outbox = Rounds(database, no_round), Outbox(database, settings)
    yield Components(settings=settings, database=database, rounds=rounds, outbox=outbox)
    database.close()


async def ask(
    app: FastAPI, method: str, path: str, authorization: str | None = None, *, header: str = "authorization"
) -> tuple[int, bool]:
    """Send a request with a body; return its status, and whether any of the body was received."""
    received, statuses = False, list[int]()

    async def receive() -> Message:
        nonlocal received
        received = True
        return {"type": "http.request", "body": b"[[],[]]", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-type", b"application/json")]
    if authorization is not None:
        headers.append((header.lower().encode(), authorization.encode()))
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": headers,
        "client": ("192.0.2.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return statuses[0], received


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("authorization", [None, "Bearer other", "Bearer", f"Basic {TOKEN}", TOKEN, "Basic cG9kOg=="])
async def test_without_the_token_no_body_is_received(parts: Components, name: str, authorization: str | None) -> None:
    app = APPS[name](parts)
    operations = [(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item]
    guarded = [one for one in operations if one[1] not in OPEN_PATHS]
    assert len(guarded) > 8
    for method, path in guarded:
        assert await ask(app, method, path, authorization) == (401, False), (method, path)
        for odd in (f"{path}/", f"/{path}", f"{path}/../readyz"):
            assert await ask(app, method, odd, authorization) == (401, False), (method, odd)


@pytest.mark.parametrize("name", APPS)
async def test_with_the_token_bodies_are_received(parts: Components, name: str) -> None:
    app = APPS[name](parts)
    path = "/rounds/ns/name/dead-letters/replay" if name == "inside" else "/api/v1/pow/generate"
    for authorization in (f"Bearer {TOKENS[name]}", f"bearer  {TOKENS[name]}"):
        status, received = await ask(app, "POST", path, authorization)
        assert (status != 401, received) == (True, True)


@pytest.mark.parametrize(("token", "known"), [(TOKEN, True), ("other", False), ("", False), (NETWORK_TOKEN, False)])
async def test_people_behind_the_api_servers_proxy_send_the_token_in_a_header_of_its_own(
    parts: Components, token: str, known: bool
) -> None:
    app, path = inside_app(parts), "/rounds/ns/name/dead-letters/replay"
    status, received = await ask(app, "POST", path, token, header=GATEWAY_TOKEN_HEADER)
    assert (status != 401, received) == (known, known)
    delivery = "/callbacks/ns/name/uid/generated"
    assert await ask(app, "POST", delivery, token, header=GATEWAY_TOKEN_HEADER) == (401, False)


async def test_two_tokens_of_the_network_are_good_at_the_same_time(parts: Components) -> None:
    app = network_app(parts)
    for token, expected in ((NETWORK_TOKEN, True), ("newer", True), (f"newer,{NETWORK_TOKEN}", False)):
        status, _ = await ask(app, "POST", "/api/v1/pow/generate", f"Bearer {token}")
        assert (status != 401) is expected


def test_secrets_are_set_together_and_not_shared() -> None:
    for name in ENVIRONMENT:
        others = {other: value for other, value in ENVIRONMENT.items() if other != name}
        with pytest.raises(ValidationError, match=f"without {name}: set all of them, or none"):
            Settings.from_environment(others)
        for other in others:
            shared = ENVIRONMENT | {name: f"x,{ENVIRONMENT[other]}"}
            with pytest.raises(ValidationError, match="share a secret: give each its own"):
                Settings.from_environment(shared)
    with pytest.raises(ValidationError, match="share a secret"):
        Settings.from_environment(ENVIRONMENT | {"POC_GATEWAY_NETWORK_TOKEN": TOKEN})


@pytest.mark.parametrize("name", APPS)
async def test_the_open_paths_need_no_token(parts: Components, name: str) -> None:
    for path in OPEN_PATHS:
        assert (await ask(APPS[name](parts), "GET", path))[0] == 200
