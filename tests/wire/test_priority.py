# SPDX-License-Identifier: Apache-2.0
"""Who waits when chat and PoC both have work."""

import asyncio
from collections.abc import MutableMapping
from time import monotonic
from typing import Any

import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from vllm_poc.server.vllm_routes import INFERENCE_PATHS

POC_FIRST = {"PRIORITY": "poc-first"}
SPOKEN = "/v1/realtime"
INFERENCE = sorted(INFERENCE_PATHS - {SPOKEN})


@pytest.mark.parametrize("pod_settings", [{"MIN_SHARE": "0.25", "SHARE_WINDOW_SECONDS": "0.2"}])
async def test_busy_chat_leaves_poc_its_least_share(pod: Pod) -> None:
    pod.engine.output_processor.busy = True
    pod.engine.seconds_per_batch = 0.02
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.elapsed_seconds > 1.5, seconds=20)
    busy = len(pod.engine.batches) * pod.engine.seconds_per_batch
    assert 0.05 < busy / (await pod.status()).elapsed_seconds < 0.6


@pytest.mark.parametrize("pod_settings", [POC_FIRST])
async def test_poc_first_does_not_wait_for_chat(pod: Pod) -> None:
    pod.engine.output_processor.busy = True
    await pod.start(DISTANCE | SLOT)
    assert (await pod.reach(lambda s: s.total_checked > 100)).held_back_seconds == 0


@pytest.mark.parametrize("pod_settings", [POC_FIRST])
@pytest.mark.parametrize("path", INFERENCE)
async def test_poc_first_refuses_inference_while_a_round_runs(pod: Pod, path: str) -> None:
    assert (await pod.http.post(path)).status_code == 200
    await pod.start(DISTANCE | SLOT)
    refused = await pod.http.post(path)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", 503)
    assert "round" in error["message"]
    assert (await pod.http.get("/v1/models")).status_code == 200
    assert (await pod.http.post("/tokenize")).status_code == 200
    await pod.post("stop")
    assert (await pod.http.post(path)).status_code == 200


@pytest.mark.parametrize("pod_settings", [POC_FIRST])
async def test_poc_first_admits_inference_while_the_round_waits_at_its_end(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT | {"round_id": "a", "end_index": 32})
    await pod.reach(lambda s: s.next_index == 32)
    assert (await pod.http.post(INFERENCE[0])).status_code == 200
    pod.engine.seconds_per_batch = 0.2
    await pod.post("extend", {"round_id": "a", "end_index": 1000})
    await pod.reach(lambda s: s.next_index > 32)
    assert (await pod.http.post(INFERENCE[0])).status_code == 503


@pytest.mark.parametrize("pod_settings", [POC_FIRST])
@pytest.mark.parametrize("extensions", [{"websocket.http.response": {}}, {}], ids=["says why", "cannot say why"])
async def test_poc_first_refuses_speech_over_a_websocket(pod: Pod, extensions: dict[str, Any]) -> None:
    assert [message["type"] for message in await shake_hands(pod, extensions)] == [
        "websocket.accept",
        "websocket.close",
    ]
    await pod.start(DISTANCE | SLOT)
    refused = await shake_hands(pod, extensions)
    if extensions:
        assert (refused[0]["type"], refused[0]["status"]) == ("websocket.http.response.start", 503)
        assert (b"retry-after", b"5") in refused[0]["headers"]
    else:
        assert [message["type"] for message in refused] == ["websocket.close"]


async def shake_hands(pod: Pod, extensions: dict[str, Any]) -> list[MutableMapping[str, Any]]:
    """Return what a client is told that opens a WebSocket for speech."""
    told: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        told.append(message)

    scope = {"type": "websocket", "path": SPOKEN, "headers": [], "query_string": b"", "extensions": extensions}
    await pod.app(scope, receive, send)
    return told


@pytest.mark.parametrize("pod_settings", [POC_FIRST])
async def test_poc_first_lets_running_inference_finish(pod: Pod) -> None:
    answer = asyncio.create_task(pod.http.post("/v1/completions", params={"seconds": 1.0}))
    await asyncio.sleep(0.5)
    await pod.start(DISTANCE | SLOT)
    assert (await answer).json() == {"done": True}


@pytest.mark.parametrize("pod_settings", [POC_FIRST | {"PENDING_RESULTS": "100"}])
async def test_poc_first_admits_inference_while_the_receiver_holds_poc_up(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.answer = 503
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    assert (await pod.http.post(INFERENCE[0])).status_code == 503
    deadline = monotonic() + 30
    while (await pod.http.post(INFERENCE[0])).status_code != 200:
        assert monotonic() < deadline, "inference is not admitted"
        await asyncio.sleep(0.005)
    before = len(pod.engine.computed)
    await asyncio.sleep(0.1)
    assert len(pod.engine.computed) == before >= 100, "nothing is computed meanwhile"
    # Now it takes longer to compute the next results than to deliver them.
    pod.engine.seconds_per_batch = 0.2
    receiver.answer = 200
    await pod.reach(lambda s: s.delivered_index >= 100)
    assert (await pod.http.post(INFERENCE[0])).status_code == 503


async def test_chat_first_refuses_no_inference(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    assert {(await pod.http.post(path)).status_code for path in INFERENCE} == {200}
