# SPDX-License-Identifier: Apache-2.0
"""The operator's client against the pod's routes: both sides of the contract over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from aiohttp import web
from fastapi import FastAPI

from poc_operator.clients.errors import NotAPodOfOurs, PodBusy, PodError, PodRefused, PodTimeout, PodUnreachable
from poc_operator.clients.pods import client as podapi
from poc_operator.clients.pods.client import PodClient, base_url
from poc_operator.clients.pods.reference_pods import ReferenceCommand, ReferenceStatus
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import DISTANCE, SLOT, Pod
from vllm_poc.wire.answers import CommandResponse, PowState, StatusResponse
from vllm_poc.wire.messages import InitGenerateRequest


@pytest.fixture
async def client() -> AsyncIterator[PodClient]:
    async with PodClient() as client:
        yield client


@pytest.fixture
async def base(pod: Pod) -> AsyncIterator[str]:
    port = free_port()
    async with serve(pod.app, "127.0.0.1", port):
        yield base_url("127.0.0.1", port)


@asynccontextmanager
async def _aiohttp_server(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield base_url("127.0.0.1", port)
    finally:
        await runner.cleanup()


Ours = TypeVar("Ours", StatusResponse, CommandResponse)


def ours(answer: Ours | ReferenceStatus | ReferenceCommand) -> Ours:
    """The answer, which must be one of our pods'."""
    assert not isinstance(answer, ReferenceStatus | ReferenceCommand)
    return answer


def order(**fields: object) -> InitGenerateRequest:
    return InitGenerateRequest.model_validate(DISTANCE | SLOT | {"round_id": "r1"} | fields)


async def test_a_round_from_start_to_stop(client: PodClient, base: str, receiver: CallbackReceiver) -> None:
    assert ours(await client.status(base)).state is PowState.IDLE
    started = ours(await client.start(base, order(url=receiver.url)))
    running = ours(await client.status(base))
    assert (running.state, running.round_id) == (PowState.GENERATING, "r1")
    assert running.session_id == started.pow_status.session_id
    stopped = ours(await client.stop(base, "r1")).pow_status
    assert stopped.delivered_index == stopped.next_index
    assert ours(await client.status(base)).state is PowState.STOPPED


async def test_a_repeated_start_is_harmless(client: PodClient, base: str) -> None:
    first = ours(await client.start(base, order()))
    again = ours(await client.start(base, order(start_index=5)))
    assert again.pow_status.session_id == first.pow_status.session_id
    assert ours(await client.status(base)).start_index == 0


async def test_another_round_is_neither_replaced_nor_stopped(client: PodClient, base: str) -> None:
    await client.start(base, order())
    with pytest.raises(PodBusy, match="round r1 runs"):
        await client.start(base, order(round_id="r2"))
    with pytest.raises(PodBusy, match="round r1 runs"):
        await client.stop(base, "r2")
    assert ours(await client.status(base)).state is PowState.GENERATING


async def test_a_stop_of_a_round_that_is_over_is_harmless(client: PodClient, base: str) -> None:
    assert ours(await client.stop(base, "r1")).pow_status.status is PowState.STOPPED


async def test_a_pod_tells_for_which_round_it_was_stopped(client: PodClient, base: str) -> None:
    await client.start(base, order())
    await client.stop(base, "r1", preempted_by="ns/first")
    told = ours(await client.status(base))
    assert (told.stop_reason, "ns/first" in (told.stop_message or "")) == ("Preempted", True)


async def test_the_pods_reason_arrives(client: PodClient, base: str) -> None:
    with pytest.raises(PodRefused, match="seq_len") as refusal:
        await client.start(base, order(seq_len=100_000))
    assert refusal.value.reason == "SequenceTooLong"


async def test_a_server_without_poc(client: PodClient) -> None:
    port = free_port()
    async with serve(FastAPI(), "127.0.0.1", port):
        with pytest.raises(NotAPodOfOurs, match="--enable-poc"):
            await client.status(base_url("127.0.0.1", port))


async def test_nobody_listens(client: PodClient) -> None:
    with pytest.raises(PodUnreachable):
        await client.status(base_url("127.0.0.1", free_port()))


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("not json", 200, NotAPodOfOurs),
        ("{}", 200, NotAPodOfOurs),
        ('{"status": "MIXED"}', 200, NotAPodOfOurs),
        ('{"status": "IDLE", "session_id": "s"}', 200, NotAPodOfOurs),  # one of ours must say all
        ('{"detail": [{"loc": ["params"], "msg": "Field required"}]}', 422, PodRefused),
        ('{"detail": "Already generating"}', 409, PodBusy),
        ("<html>bad gateway</html>", 502, NotAPodOfOurs),
        ("x" * (podapi.MAX_BODY_BYTES + 1), 200, NotAPodOfOurs),
        ('{"detail": "no", "reason": "Unauthorized"}', 401, PodRefused),
    ],
)
async def test_strange_answers(client: PodClient, body: str, status: int, error: type[PodError]) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=body, status=status)

    async with _aiohttp_server(answer) as address:
        with pytest.raises(error):
            await client.status(address)


async def test_a_pod_that_hangs(client: PodClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podapi, "STATUS_SECONDS", 0.05)

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    async with _aiohttp_server(hang) as address:
        with pytest.raises(PodTimeout):
            await client.status(address)


def test_addresses_of_ip_version_6_are_bracketed() -> None:
    assert base_url("fd00::1", 8000) == "http://[fd00::1]:8000/api/v1/pow"
