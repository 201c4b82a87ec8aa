# SPDX-License-Identifier: Apache-2.0
"""Each pod gets the token of its own namespace, and none that of another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from poc_operator.clients.errors import PodError, PodUnreachable, StoreForbidden, StoreUnavailable
from poc_operator.clients.pods.client import base_url
from poc_operator.clients.pods.tokens import REFRESH_SECONDS, PodClients, Tokens

TOKENS: dict[str, str | Exception | None] = {"a": "token-a", "b": "token-b", "open": None}


class World:
    """A pod that notes what it is sent, the tokens of the namespaces, and a clock."""

    def __init__(self) -> None:
        self.tokens = dict(TOKENS)
        self.sent: list[str | None] = []
        self.reads: list[str] = []
        self.seconds = 1000.0
        self.port = 0

    async def read(self, namespace: str) -> str | None:
        """Return the token of a namespace."""
        self.reads.append(namespace)
        await asyncio.sleep(0)
        found = self.tokens[namespace]
        if isinstance(found, Exception):
            raise found
        return found

    async def told(self, clients: PodClients, namespace: str) -> str | None:
        """Ask the pod as one of a namespace; return what it was sent."""
        client = await clients.of(namespace)
        with pytest.raises(PodError):
            await client.status(base_url("127.0.0.1", self.port))
        return self.sent.pop()

    async def answer(self, request: web.Request) -> web.Response:
        """Note the request, and answer as no pod does."""
        self.sent.append(request.headers.get("Authorization"))
        return web.json_response({}, status=500)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[PodClients]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", world.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    world.port = runner.addresses[0][1]
    async with PodClients(Tokens(world.read, lambda: world.seconds)) as clients:
        yield clients
    await runner.cleanup()


async def test_each_namespace_has_its_own_token() -> None:
    world = World()
    async with running(world) as clients:
        told = [await world.told(clients, namespace) for namespace in ("a", "b", "open", "a")]
    assert told == ["Bearer token-a", "Bearer token-b", None, "Bearer token-a"]
    assert world.reads == ["a", "b", "open"]


async def test_many_at_once_read_it_once() -> None:
    world = World()
    async with running(world) as clients:
        found = await asyncio.gather(*(clients.of("a") for _ in range(50)))
    assert len({id(client) for client in found}) == 1
    assert world.reads == ["a"]


async def test_a_token_that_changes_is_sent_after_a_while() -> None:
    world = World()
    async with running(world) as clients:
        await clients.of("a")
        world.tokens["a"] = "token-c"
        assert await world.told(clients, "a") == "Bearer token-a"
        world.seconds += REFRESH_SECONDS
        assert await world.told(clients, "a") == "Bearer token-c"
        world.tokens["a"] = None
        world.seconds += REFRESH_SECONDS
        assert await world.told(clients, "a") is None


async def test_all_clients_of_a_process_change_to_another_token_together() -> None:
    """Else a pod that is polled with the new one would be asked for nonces with the old one, and be charged for it."""
    world = World()
    async with running(world):
        tokens = Tokens(world.read, lambda: world.seconds)
        async with PodClients(tokens) as polls, PodClients(tokens) as asks:
            await polls.of("a")
            world.seconds += REFRESH_SECONDS / 2
            await asks.of("a")
            world.tokens["a"] = "token-c"
            world.seconds += REFRESH_SECONDS / 2
            assert [await world.told(clients, "a") for clients in (polls, asks)] == ["Bearer token-c"] * 2
            assert world.reads == ["a", "a"]


async def test_while_the_api_server_is_away_the_last_token_counts() -> None:
    world = World()
    async with running(world) as clients:
        await clients.of("a")
        world.tokens = dict.fromkeys(TOKENS, StoreUnavailable("away"))
        world.seconds += REFRESH_SECONDS
        assert await world.told(clients, "a") == "Bearer token-a"
        with pytest.raises(PodUnreachable, match='the token of namespace "b" cannot be read: away'):
            await clients.of("b")
        world.tokens = dict(TOKENS)
        assert await world.told(clients, "b") == "Bearer token-b", "it is tried again at once"


@pytest.mark.parametrize("fault", [StoreForbidden("HTTP 403: Forbidden"), ValueError("has no key")])
async def test_without_a_right_or_a_fit_secret_no_token_is_sent(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    async with running(world) as clients:
        await clients.of("a")
        world.tokens["a"] = fault
        for _ in range(3):
            world.seconds += REFRESH_SECONDS
            assert await world.told(clients, "a") is None
    assert caplog.text.count(f'namespace "a": its pods get no token: {fault}') == 1
