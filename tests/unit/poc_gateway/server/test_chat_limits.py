# SPDX-License-Identifier: Apache-2.0
"""Chat takes no connection, descriptor or room for bodies from the network's other calls and from pods."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from poc_gateway.node_api.base_url import is_chat
from poc_gateway.server.connections import Connections, bounded_by
from poc_gateway.server.middleware import BodyLimit, Limits
from poc_gateway.server.standby import Gate
from poc_gateway.settings import Settings
from tests.simulation.gateway_process import gateway
from tests.support.builders.deliveries import JSON, artifacts, path, round_body
from tests.support.builders.forwarding import until
from tests.support.fakes.chat_pod import PIECE, ChatPod
from tests.support.servers.http_server import free_port, serve

COMPLETIONS = "/v1/chat/completions"
PEER = "127.0.0.1"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def chat(http: aiohttp.ClientSession, stack: AsyncExitStack) -> aiohttp.ClientResponse:
    """Begin a chat that does not end."""
    answer = await stack.enter_async_context(http.post(COMPLETIONS, json={"stream": True}))
    if answer.status == 200:
        assert await answer.content.readexactly(len(PIECE)) == PIECE
    return answer


async def test_the_networks_other_calls_find_a_connection_beside_chat(tmp_path: Path, stack: AsyncExitStack) -> None:
    """All of them come from one address, as the network's node sends them."""
    (tmp_path / "rounds.json").write_text(json.dumps([round_body()]))
    pod, port = ChatPod("pod"), free_port()
    await stack.enter_async_context(serve(pod, PEER, port))
    spec = {"selector": {"matchLabels": {"a": "b"}}, "port": port}
    (tmp_path / "nodes").write_text(json.dumps([{"name": "a", "template": {"namespace": "ns", "spec": spec}}]))
    settings = {"POC_GATEWAY_ML_NODES": str(tmp_path / "nodes"), "POC_GATEWAY_PEER_CONNECTIONS": "8"}
    running = stack.enter_context(
        gateway(f"sqlite:///{tmp_path}/db", tmp_path / "rounds.json", tmp_path / "log", settings, [PEER])
    )
    http = await stack.enter_async_context(aiohttp.ClientSession(running.network_url))
    others = await stack.enter_async_context(aiohttp.ClientSession(running.network_url))
    pods = await stack.enter_async_context(aiohttp.ClientSession(running.url))
    assert [(await chat(http, stack)).status for _ in range(6)] == [200] * 6
    for _ in range(10):
        beyond = await chat(http, stack)
        assert (beyond.status, int(beyond.headers["Retry-After"]) > 0) == (503, True)
        told = await beyond.json()
        assert told["reason"] == told["error"]["type"] == "TooManyChats"
        assert "three quarters of POC_GATEWAY_PEER_CONNECTIONS" in told["detail"]
        async with others.get("/api/v1/clock") as answer:
            assert answer.status == 204
        async with pods.post(path(), data=artifacts([1]), headers=JSON) as answer:
            assert answer.status == 200
    pod.release()


async def test_a_chat_counts_as_two_descriptors_and_all_have_half_of_them(stack: AsyncExitStack) -> None:
    gate, port = Gate(), free_port()
    connections = Connections(Settings(), most=16)
    asked = asyncio.Event()

    async def hold(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asked.wait()
        await send({"type": "http.response.body", "body": b""})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1":
            await connections.chats.serve(scope["client"][0], hold, scope, receive, send)
        else:
            await gate(scope, receive, send)

    config = uvicorn.Config(app, host=PEER, port=port, log_config=None, lifespan="off")
    config.http = bounded_by(connections)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    async with aiohttp.ClientSession(f"http://{PEER}:{port}", connector=aiohttp.TCPConnector(limit=0)) as http:
        answers = [await http.get("/v1") for _ in range(5)]
        assert [answer.status for answer in answers] == [200] * 4 + [503]
        # Eight descriptors are left to others, and one that is not used makes room.
        silent = [await asyncio.open_connection(PEER, port) for _ in range(9)]
        async with asyncio.timeout(20):
            assert await silent[0][0].read() == b""
        assert not any(reader.at_eof() for reader, _ in silent[1:])
        async with http.get("/livez") as answer:
            assert answer.status == 200
        asked.set()
        assert [await answer.read() for answer in answers[:4]] == [b"x"] * 4
        async with http.get("/v1") as answer:
            assert answer.status == 200
    server.should_exit = True
    await task


async def test_connections_between_two_requests_make_room() -> None:
    port = free_port()
    config = uvicorn.Config(Gate(), host=PEER, port=port, log_config=None, lifespan="off")
    config.http = bounded_by(Connections(Settings.from_environment({"POC_GATEWAY_PEER_CONNECTIONS": "3"}), most=100))
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    opened = []
    for _ in range(5):
        reader, writer = await asyncio.open_connection(PEER, port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            assert (await reader.readuntil(b'"OK"}')).startswith(b"HTTP/1.1 200 ")
        opened.append((reader, writer))  # a writer that nobody has closes its connection
    assert [reader.at_eof() for reader, _ in opened] == [True, True, False, False, False]
    server.should_exit = True
    await task


@pytest.mark.parametrize("sent", ["/v1/chat/completions", "/nodes/a/v1/completions", "/v3.0.8/v1", "/nodes/a/v3/v1/x"])
def test_what_chat_is(sent: str) -> None:
    assert is_chat(sent)
    assert not is_chat(sent.replace("/v1", "/api/v1"))


async def _read(_: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_bodies_and_requests_of_chat_have_limits_of_their_own() -> None:
    limits = Limits(_read, body=BodyLimit("X", 1_000), body_seconds=60, peer_requests=2, apart=is_chat)

    async def ask(where: str, *pieces: bytes, stalls: bool = False) -> int:
        left, told = list(pieces), list[int]()

        async def receive() -> dict[str, object]:
            if not left:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or stalls}

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                told.append(int(str(message["status"])))

        scope = {"type": "http", "path": where, "query_string": b"", "headers": [], "client": (PEER, 1), "state": {}}
        await limits(scope, receive, send)  # type: ignore[arg-type]
        return told[0]

    stalled = [asyncio.create_task(ask("/v1/chat", b" " * 900, stalls=True)) for _ in range(4)]
    await asyncio.sleep(0.01)
    assert await ask("/api/v1/inference/pow/stop", b" " * 900) == 200
    # And so have its requests: eight may come at once.
    assert [await ask("/v1/models", b"") for _ in range(5)] == [200] * 4 + [429]
    assert await ask("/api/v1/state", b"") == 200
    for one in stalled:
        one.cancel()
