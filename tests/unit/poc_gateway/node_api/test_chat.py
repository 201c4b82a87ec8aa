# SPDX-License-Identifier: Apache-2.0
"""Chat through the gateway: over real connections to servers that stream as vLLM does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import httpx
import pytest

from poc_gateway.node_api import chat
from poc_operator.clients.errors import StoreUnavailable
from tests.support.fakes.chat_pod import PIECE, ChatPod
from tests.support.servers.http_server import free_port, serve
from tests.unit.poc_gateway.node_api.cluster import OF_FLEET, World, running_world
from tests.unit.poc_gateway.node_api.requests import error_of

ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "127.0.0.2")
COMPLETIONS = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "stream": True}
DONE = PIECE * 3 + b"data: [DONE]\n\n"


class Chats:
    """Chat pods, the gateway in front of them on a port, and a client."""

    def __init__(self, world: World, stack: AsyncExitStack) -> None:
        self.world = world
        self.pods: list[ChatPod] = []
        self._stack = stack
        self.url = f"http://{ADDRESS}:{free_port()}"

    async def open(self, pods: int) -> None:
        for host in HOSTS[:pods]:
            self.pods.append(ChatPod(host))
            await self._stack.enter_async_context(serve(self.pods[-1], host, self.world.port))
            self.world.announce(host)
        port = int(self.url.rsplit(":", 1)[1])
        await self._stack.enter_async_context(serve(self.world.app, ADDRESS, port))
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(self.url))

    def release(self) -> None:
        for pod in self.pods:
            pod.release()

    async def whole(self, **options: Any) -> tuple[int, bytes]:  # noqa: ANN401
        async with self.http.post(COMPLETIONS, json=BODY, **options) as answer:
            return answer.status, await answer.read()


async def start(folder: Path, stack: AsyncExitStack, pods: int, **fields: Any) -> Chats:  # noqa: ANN401
    world = await stack.enter_async_context(running_world(folder, pods=0, **fields))
    chats = Chats(world, stack)
    await chats.open(pods)
    return chats


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def pair(tmp_path: Path, stack: AsyncExitStack) -> Chats:
    return await start(tmp_path, stack, 2)


async def test_each_piece_comes_when_the_pod_sends_it(pair: Chats) -> None:
    async with asyncio.timeout(30), pair.http.post(COMPLETIONS, json=BODY) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert await answer.content.readexactly(len(PIECE)) == PIECE  # the pod holds the others back
        pair.release()
        assert PIECE + await answer.read() == DONE


async def test_a_client_that_goes_away_ends_the_pods_work(pair: Chats) -> None:
    async with pair.http.post(COMPLETIONS, json=BODY) as answer:
        await answer.content.readexactly(len(PIECE))
        (pod,) = [pod for pod in pair.pods if pod.asked]
        assert not pod.gone.is_set()
        answer.close()
        await asyncio.wait_for(pod.gone.wait(), 20)  # otherwise it would hold the rest back until the test's end
    assert not +pair.world.service.chat._pods.requests


async def test_the_pod_with_the_fewest_requests_gets_the_next(pair: Chats) -> None:
    async with AsyncExitStack() as held:
        for count in (1, 1, 2, 2, 3, 3):
            answer = await held.enter_async_context(pair.http.post(COMPLETIONS, json=BODY))
            await answer.content.readexactly(len(PIECE))
            assert max(len(pod.asked) for pod in pair.pods) == count
        pair.release()


async def test_what_is_passed_on(pair: Chats) -> None:
    pair.release()
    path, query = "/v1/files/a%2Fb%20c", b"x=%2F&y"
    headers = {"X-Own": "1", "Authorization": "Bearer user", "Connection": "x-hop", "X-Hop": "1", "TE": "trailers"}
    async with httpx.AsyncClient(timeout=30) as client:
        url = f"{pair.url}/nodes/one/v3.0.8{path}?{query.decode()}"
        answer = await client.post(url, content=b'{"a": 1}', headers=headers)
    assert (answer.status_code, answer.content) == (200, DONE)
    assert answer.headers["x-pod"] in HOSTS
    assert "x-private" not in answer.headers
    assert len(answer.headers.get_list("date")) == len(answer.headers.get_list("server")) == 1
    (asked,) = [asked for pod in pair.pods for asked in pod.asked]
    assert (asked.method, asked.raw_path, asked.query, asked.body) == ("POST", path.encode(), query, b'{"a": 1}')
    assert asked.headers["x-own"] == "1"
    assert not {"x-hop", "te", "transfer-encoding"} & asked.headers.keys()
    assert asked.headers["host"].startswith(("127.0.0.1:", "127.0.0.2:"))
    # Without a token of the ML node, a client's own is meant for the pod.
    assert asked.headers["authorization"] == "Bearer user"
    assert asked.headers["content-type"] == "application/json"  # there was none
    assert asked.headers["content-length"] == "8"


@pytest.mark.parametrize("key", [None, "api-key"])
async def test_the_networks_token_stays_here(
    tmp_path: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setenv("API_KEY", key or "")
    one = {"chatToken": {"env": "API_KEY"}} if key is not None else {}
    settings = {"POC_GATEWAY_NETWORK_TOKEN": "secret"}
    chats = await start(tmp_path, stack, 1, one=one, **settings)
    chats.release()
    assert (await chats.whole())[0] == 401
    assert chats.pods[0].asked == []
    bearer = {"Authorization": "Bearer secret", "Content-Type": "multipart/form-data; boundary=x"}
    assert await chats.whole(headers=bearer) == (200, DONE)
    sent = chats.pods[0].asked[0].headers
    assert sent.get("authorization") == (f"Bearer {key}" if key is not None else None)
    assert "secret" not in str(sent)
    assert sent["content-type"] == bearer["Content-Type"]
    # The network's client asks for the models without its token.
    async with chats.http.get("/v1/models") as answer:
        assert answer.status == 200
    async with chats.http.post("/v1/models") as answer:
        assert answer.status == 401


async def test_a_pod_that_takes_no_connection_is_avoided(
    pair: Chats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair.release()
    pair.world.announce("127.0.0.3")  # where nobody listens
    pair.world.announce("127.0.0.4")
    # Chance would leave one of them out now and then.
    monkeypatch.setattr("random.choice", lambda pods: max(pods, key=lambda pod: pod.ip))
    assert [await pair.whole() for _ in range(10)] == [(200, DONE)] * 10
    refused = [record for record in caplog.records if "no connection to pod" in record.getMessage()]
    assert len(refused) == 2  # each once, and then it was avoided
    monkeypatch.setattr(chat, "monotonic", lambda: monotonic() + chat.AVOID_SECONDS)
    assert [await pair.whole() for _ in range(10)] == [(200, DONE)] * 10
    assert len([record for record in caplog.records if "no connection to pod" in record.getMessage()]) == 4


async def test_without_a_pod_the_client_is_told_when_to_come_back(tmp_path: Path, stack: AsyncExitStack) -> None:
    chats = await start(tmp_path, stack, 0)
    for expected in ("no pod is ready", "to none of 1 pods"):
        async with chats.http.post(COMPLETIONS, json=BODY) as answer:
            told = await answer.json()
            assert (answer.status, int(answer.headers["Retry-After"]) > 0) == (503, True)
        assert told["reason"] == "NoBackends"
        assert told["detail"].startswith(expected)
        assert told["error"] == {"message": told["detail"], "type": "NoBackends", "code": 503}
        chats.world.announce("127.0.0.3")
        chats.world.service.chat._pods._listed = float("-inf")


async def test_a_pod_that_ends_early_is_told_and_not_asked_twice(tmp_path: Path, stack: AsyncExitStack) -> None:
    chats = await start(tmp_path, stack, 0)
    heads: list[bytes] = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    for host in HOSTS:
        await stack.enter_async_context(await asyncio.start_server(hang_up, host, chats.world.port))
        chats.world.announce(host)
    status, told = await chats.whole()
    assert (status, b"PodFailed" in told) == (502, True)
    assert len(heads) == 1


async def test_a_cut_answer_does_not_look_like_a_whole_one(tmp_path: Path, stack: AsyncExitStack) -> None:
    chats = await start(tmp_path, stack, 1)
    chats.pods[0].breaks = True
    with pytest.raises(aiohttp.ClientPayloadError):
        await chats.whole()
    assert len(chats.pods[0].asked) == 1


async def test_without_the_api_server_chat_goes_on(pair: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.release()
    assert (await pair.whole())[0] == 200
    pair.world.cluster.fault = StoreUnavailable("HTTP 500: down")
    monkeypatch.setattr(chat, "STALE_SECONDS", 0.0)
    monkeypatch.setattr(chat, "REFRESH_SECONDS", 0.0)
    assert (await pair.whole())[0] == 200


async def test_pods_that_come_and_go_are_seen(pair: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.release()
    await pair.whole()
    monkeypatch.setattr(chat, "STALE_SECONDS", 0.0)
    monkeypatch.setattr(chat, "REFRESH_SECONDS", 0.0)
    gone = pair.world.cluster.pods.pop(0)
    before = {pod.name: len(pod.asked) for pod in pair.pods}
    for _ in range(5):
        await pair.whole()
    assert [len(pod.asked) - before[pod.name] for pod in pair.pods if pod.name == gone.ip] == [0]


async def test_bodies_are_bounded_while_they_come_and_not_while_answers_do(
    tmp_path: Path, stack: AsyncExitStack
) -> None:
    chats = await start(tmp_path, stack, 1, POC_GATEWAY_NETWORK_BODY_BYTES="100000")
    async with chats.http.post(COMPLETIONS, data=b" " * 100_001) as answer:
        assert answer.status == 413

    async def unsized() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 10_000

    async with chats.http.post(COMPLETIONS, data=unsized()) as answer:
        told = await answer.json()
        assert (answer.status, told["reason"]) == (413, "BodyTooLarge")
    # Their bodies are eight times what may come at once.
    answers = [await stack.enter_async_context(chats.http.post(COMPLETIONS, data=b" " * 100_000)) for _ in range(32)]
    assert {answer.status for answer in answers} == {200}
    chats.release()


async def test_an_ml_node_chats_with_its_own_pods_alone(tmp_path: Path, stack: AsyncExitStack) -> None:
    chats = await start(tmp_path, stack, 1, also={"other": {}})
    chats.release()
    for base, status in (("/nodes/one", 200), ("/nodes/other", 503), ("", 404), ("/nodes/x", 404)):
        async with chats.http.post(f"{base}{COMPLETIONS}", json=BODY) as answer:
            assert answer.status == status, base
    async with httpx.AsyncClient(transport=httpx.ASGITransport(chats.world.app), base_url="http://g") as client:
        error_of(await client.get("/v1"), 404, "MlNodeNotFound")


async def test_chat_goes_to_the_pods_of_a_fleet(tmp_path: Path, stack: AsyncExitStack) -> None:
    chats = await start(tmp_path, stack, 1, one={"template": OF_FLEET})
    chats.world.announce(HOSTS[1], fleet="other")
    chats.release()
    assert [await chats.whole() for _ in range(2)] == [(200, DONE)] * 2
