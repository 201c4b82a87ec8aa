# SPDX-License-Identifier: Apache-2.0
"""A server that is told to end delivers what it has computed, and takes no new work."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.http_server import free_port
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT
from tests.support.servers.pod_process import RELEASES, PodProcess, serving
from vllm_poc.wire.answers import PowState

#: A bar is 50 of 50.
TRIES = int(os.environ.get("DRAIN_TRIES", "2"))
DRAIN_SECONDS = 3.0
SETTINGS = {"DRAIN_SECONDS": str(DRAIN_SECONDS), "RETRY_FIRST_SECONDS": "0.2"}
#: What the process itself takes to end, on a busy machine.
END_SECONDS = 15.0
QUEUED = {"nonces": [10**9, 10**9 + 1, 10**9 + 2]}

pytestmark = pytest.mark.parametrize("release", RELEASES)


@pytest.mark.timeout(60 + 30 * TRIES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_full_flight(release: str, number: signal.Signals, receiver: CallbackReceiver, tmp_path: Path) -> None:
    """A full queue of results behind a receiver that has failed for a while, and callbacks of other requests."""
    for _ in range(TRIES):
        receiver.payloads.clear()
        async with serving(release, tmp_path, SETTINGS) as pod:
            receiver.answer = 503
            assert (await pod.post("init/generate", ARTIFACT | SLOT | {"url": receiver.url})).status_code == 200
            await pod.reach(lambda s: s.next_index > 200 and s.delivery_error is not None)
            assert (await pod.status()).delivered_index == 0
            receiver.answer = 200
            pod.tell(number)
            seconds = await pod.ended()
        assert sorted(receiver.nonces) == sorted(pod.computed)
        assert seconds < DRAIN_SECONDS + END_SECONDS


async def test_callbacks_of_requests_are_delivered(release: str, receiver: CallbackReceiver, tmp_path: Path) -> None:
    receiver.answer = 503
    async with serving(release, tmp_path, SETTINGS | {"RETRY_LIMIT_SECONDS": "60", "RETRY_FIRST_SECONDS": "1"}) as pod:
        await pod.post("init/validate", DISTANCE | SLOT | {"callback_url": receiver.url})
        batch = {"public_key": "x", "block_hash": "h", "block_height": 1, "nonces": [1, 2], "dist": [1.4, 1.4]}
        assert (await pod.post("validate", batch)).status_code == 200
        assert (await pod.post("generate", ARTIFACT | QUEUED | {"url": receiver.url})).status_code == 200
        await pod.reach(lambda s: s.callbacks_pending == 2 and receiver.attempts >= 6)
        receiver.answer = 200
        receiver.verdicts.clear()
        pod.tell()
        await pod.ended()
    assert receiver.nonces == QUEUED["nonces"]
    assert len(receiver.verdicts) == 1


async def test_a_round_that_failed_before_another_began_is_delivered(
    release: str, receiver: CallbackReceiver, tmp_path: Path
) -> None:
    receiver.answer = 503
    settings = SETTINGS | {"DRAIN_SECONDS": "60", "RETRY_FIRST_SECONDS": "1"}
    async with serving(release, tmp_path, settings) as pod:
        await pod.post("init/generate", ARTIFACT | SLOT | {"url": receiver.url})
        await pod.reach(lambda s: s.next_index > 100)
        await pod.http.post("/break")
        failed = await pod.reach(lambda s: s.state is PowState.FAILED)
        assert (await pod.post("init", DISTANCE | SLOT)).status_code == 200
        receiver.answer = 200
        pod.tell()
        await pod.ended()
    assert len(receiver.nonces) == failed.next_index


async def test_no_new_work_is_taken(release: str, receiver: CallbackReceiver, tmp_path: Path) -> None:
    receiver.answer = 503
    async with serving(release, tmp_path, SETTINGS | {"DRAIN_SECONDS": "60", "FLUSH_SECONDS": "0.2"}) as pod:
        await pod.post("init/generate", ARTIFACT | SLOT | {"url": receiver.url, "round_id": "a"})
        await pod.reach(lambda s: s.next_index > 0 and receiver.attempts > 0)
        pod.tell()
        computed = await _settled(pod)
        for route, body in (
            ("init/generate", ARTIFACT | SLOT | {"round_id": "b"}),
            ("init", DISTANCE | SLOT),
            ("generate", ARTIFACT | QUEUED),
            ("extend", {"round_id": "a", "end_index": 5000}),
            ("phase/generate", None),
        ):
            answer = await pod.post(route, body)
            assert (answer.status_code, answer.json()["reason"]) == (503, "ServerEnds"), route
            assert "ends" in answer.json()["detail"]
            assert int(answer.headers["Retry-After"]) > 0
        status = await pod.status()
        assert (status.state, status.round_id, status.next_index) == (PowState.GENERATING, "a", computed)
        assert (await pod.http.get("/v1/models")).status_code == 200  # vLLM has not seen the signal
        assert (await pod.post("stop")).json()["pow_status"]["next_index"] == computed
        assert await pod.ended() < END_SECONDS


async def test_a_server_that_ends_is_not_healthy_and_serves_chat(
    release: str, receiver: CallbackReceiver, tmp_path: Path
) -> None:
    """So that a load balancer sends its next chats elsewhere."""
    receiver.answer = 503
    async with serving(release, tmp_path, SETTINGS | {"DRAIN_SECONDS": "60"}) as pod:
        checks = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
        await pod.post("init/generate", ARTIFACT | SLOT | {"url": receiver.url})
        await pod.reach(lambda s: s.delivery_error is not None)
        assert [(await pod.http.request(*check)).status_code for check in checks] == [200] * 3
        pod.tell()
        await _settled(pod)
        for check in checks:
            answer = await pod.http.request(*check)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (503, 503, "service_unavailable")
            assert error["message"].startswith("the server ends")
        assert (await pod.http.post("/chat", params={"seconds": 0.1})).status_code == 200
        receiver.answer = 200
        assert await pod.ended() < END_SECONDS


async def _settled(pod: PodProcess) -> int:
    """Return the index at which the round computes no more."""
    last = (await pod.status()).next_index
    while True:
        await asyncio.sleep(0.2)
        now = (await pod.status()).next_index
        if now == last:
            return now
        last = now


async def test_a_receiver_that_is_down_is_given_up_in_time(release: str, tmp_path: Path) -> None:
    async with serving(release, tmp_path, SETTINGS) as pod:
        nobody = f"http://127.0.0.1:{free_port()}/callback"
        await pod.post("init/generate", ARTIFACT | SLOT | {"url": nobody})
        await pod.post("generate", ARTIFACT | QUEUED | {"url": nobody})
        await pod.reach(lambda s: s.delivery_error is not None)
        pod.tell()
        assert DRAIN_SECONDS - 0.5 < await pod.ended() < DRAIN_SECONDS + END_SECONDS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(release: str, number: signal.Signals, tmp_path: Path) -> None:
    async with serving(release, tmp_path, SETTINGS | {"DRAIN_SECONDS": "60"}) as pod:
        await pod.post("init/generate", ARTIFACT | SLOT | {"url": f"http://127.0.0.1:{free_port()}/callback"})
        await pod.reach(lambda s: s.delivery_error is not None)
        pod.tell()
        await asyncio.sleep(0.3)
        assert (await pod.status()).state is PowState.GENERATING
        pod.tell(number)
        assert await pod.ended() < END_SECONDS


async def _nothing(_: PodProcess) -> None:
    """Ask for nothing."""


async def _a_status(pod: PodProcess) -> None:
    await pod.status()


async def _a_finished_round(pod: PodProcess) -> None:
    await pod.post("init/generate", ARTIFACT | SLOT)
    await pod.reach(lambda s: s.next_index > 0)
    await pod.post("stop")


async def _a_waiting_round(pod: PodProcess) -> None:
    await pod.post("init/generate", ARTIFACT | SLOT | {"end_index": 16, "round_id": "a"})
    await pod.reach(lambda s: s.next_index == 16)


async def _a_paused_round(pod: PodProcess) -> None:
    await pod.post("init/generate", ARTIFACT | SLOT)
    await pod.reach(lambda s: s.next_index > 0)
    assert (await pod.http.post("/pause")).status_code == 200
    await pod.post("generate", ARTIFACT | QUEUED)


@pytest.mark.parametrize("before", [_nothing, _a_status, _a_finished_round, _a_waiting_round, _a_paused_round])
async def test_nothing_to_deliver_ends_it_at_once(
    release: str, before: Callable[[PodProcess], Awaitable[None]], tmp_path: Path
) -> None:
    async with serving(release, tmp_path, SETTINGS | {"DRAIN_SECONDS": "60"}) as pod:
        await before(pod)
        pod.tell()
        assert await pod.ended() < END_SECONDS


async def test_requests_that_are_computed_are_answered(release: str, tmp_path: Path) -> None:
    """Those that need further slices are refused, and so are those that wait for the round."""
    async with serving(release, tmp_path, SETTINGS | {"DRAIN_SECONDS": "60"}) as pod:
        await pod.post("init/validate", DISTANCE | SLOT)
        many = list(range(5_000))
        batch = {"public_key": "x", "block_hash": "h", "block_height": 1, "nonces": many, "dist": [1.4] * len(many)}
        requests = [
            asyncio.create_task(pod.post("validate", batch)),
            asyncio.create_task(pod.post("generate", ARTIFACT | {"nonces": many, "wait": True})),
        ]
        queued = (await pod.post("generate", ARTIFACT | {"nonces": many})).json()["request_id"]
        await asyncio.sleep(0.5)
        assert not any(request.done() for request in requests)
        pod.tell()
        answers: list[httpx.Response] = await asyncio.gather(*requests)
        assert [(answer.status_code, answer.json()["reason"]) for answer in answers] == [(503, "ServerEnds")] * 2
        assert queued
        assert await pod.ended() < END_SECONDS


async def test_busy_chat_does_not_hold_the_end_up(release: str, receiver: CallbackReceiver, tmp_path: Path) -> None:
    async with serving(release, tmp_path, SETTINGS | {"DRAIN_SECONDS": "60"}) as pod:
        await pod.post("init/generate", ARTIFACT | SLOT | {"url": receiver.url})
        await pod.reach(lambda s: s.next_index > 100)
        chat = asyncio.create_task(pod.http.post("/chat", params={"seconds": 5}))
        await pod.reach(lambda s: s.held_back_seconds > 0.1)
        pod.tell()
        await _round_over(pod)
        assert not chat.done()
        await chat
        await pod.ended()
    assert sorted(receiver.nonces) == sorted(pod.computed)


async def _round_over(pod: PodProcess) -> None:
    """Wait until the round has stopped, or vLLM's server takes no more connections."""
    with contextlib.suppress(httpx.TransportError):
        await pod.reach(lambda s: s.state is PowState.STOPPED, seconds=3)
