# SPDX-License-Identifier: Apache-2.0
"""When the Secret of a receiver is read, and what is said when it cannot be."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.kube.callback_secret import REFRESH_SECONDS, RETRY_SECONDS, CallbackSecretReader
from poc_operator.clients.kube.objects import ObjectStore

SECRET = 'Secret "collector" (spec.callbackSecretRef)'  # noqa: S105 - how messages name it


def secret(password: str = "c2VjcmV0", kind: str = "kubernetes.io/basic-auth") -> dict[str, Any]:  # noqa: S107
    return {"kind": "Secret", "type": kind, "data": {"username": "cG9k", "password": password}}


class World:
    """An API server with one Secret, a clock, and the reader."""

    def __init__(self) -> None:
        self.status, self.body = 200, secret()
        self.asked = 0
        self.now = 0.0

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"apiVersion": "v1", **self.body}, status=self.status)

    def read_with(self, store: ObjectStore) -> None:
        self.warnings: list[str] = []
        self.reader = CallbackSecretReader(
            store.basic_auth, "ns", "collector", warn=self.warnings.append, clock=lambda: self.now
        )

    async def read(self, after: float = 0.0) -> BasicAuth | str:
        self.now += after
        return await self.reader.read()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world, app = World(), web.Application()
    app.router.add_get("/api/v1/namespaces/ns/secrets/collector", world.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    store = ObjectStore(client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")))
    world.read_with(store)
    yield world
    await store.close()
    await runner.cleanup()


async def test_it_is_read_about_once_a_minute(world: World) -> None:
    assert await world.read() == BasicAuth("pod", "secret")
    world.body = secret("YW5vdGhlcg==")
    assert await world.read(REFRESH_SECONDS - 1) == BasicAuth("pod", "secret")
    assert await world.read(1) == BasicAuth("pod", "another")
    assert world.asked == 2


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, {"kind": "Status"}, f'{SECRET} does not exist in namespace "ns": create it'),
        (
            403,
            {"kind": "Status"},
            f"{SECRET} cannot be read (HTTP 403: Forbidden): install the chart with rbac.readSecrets=true",
        ),
        (
            200,
            secret(kind="Opaque"),
            f"{SECRET} is of type Opaque: create it anew with the type kubernetes.io/basic-auth",
        ),
    ],
)
async def test_a_secret_that_cannot_be_had_is_named_with_the_remedy(
    world: World, status: int, body: dict[str, Any], message: str
) -> None:
    assert await world.read() == BasicAuth("pod", "secret")
    world.status, world.body = status, body
    assert await world.read(REFRESH_SECONDS) == message
    assert await world.read(RETRY_SECONDS) == message
    assert world.warnings == [message]
    world.status, world.body = 200, secret()
    assert await world.read(RETRY_SECONDS) == BasicAuth("pod", "secret")


async def test_while_the_api_server_fails_what_was_read_before_counts(world: World) -> None:
    world.status = 503
    found = await world.read()
    assert isinstance(found, str)
    assert found.startswith(f"{SECRET} cannot be read yet: HTTP 503")
    world.status = 200
    assert await world.read(RETRY_SECONDS) == BasicAuth("pod", "secret")
    world.status = 503
    assert await world.read(REFRESH_SECONDS) == BasicAuth("pod", "secret")
