# SPDX-License-Identifier: Apache-2.0
"""A segment of a challenge ends and the next one begins, by the network's calls and with the times of production.

How soon results arrive and orders are out, whatever the pods do, and that the segments' results stay apart.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import pytest

from poc_operator.clients.pods.client import STATUS_SECONDS
from poc_operator.controller.reconciler import POLL_SECONDS
from tests.support.fakes.callback_receiver import CallbackReceiver, payload_nonces
from tests.support.servers.ml_node import WholeMlNode, whole_ml_node
from vllm_poc.wire.answers import PowState

#: From an init to the first results at the receiver: the early-share guard of the network counts from there.
FIRST_RESULT_SECONDS = 10.0
#: From a stop to the orders of the next segment at all pods that answer.
ROTATION_SECONDS = 5.0
#: The same when a pod hangs from that moment on: one poll of it takes its whole time. Without it being given up at all,
#: its round would take `poc_operator.rounds.stop.STOP_PATIENCE`, 90 s.
FOUND_SECONDS = ROTATION_SECONDS + STATUS_SECONDS + 2 * POLL_SECONDS
PODS = 3
HUNG = "127.0.0.2"


@pytest.fixture(autouse=True)
def _vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", ModuleType("vllm.version"))
    monkeypatch.setattr(sys.modules["vllm.version"], "__version__", "0.32.0", raising=False)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[WholeMlNode]:
    async with whole_ml_node(tmp_path, pods=PODS) as node:
        yield node


def segment(receiver: CallbackReceiver, height: int) -> dict[str, Any]:
    """The order of the segment that begins at this height."""
    return {
        "block_hash": f"{height:064x}",
        "block_height": height,
        "public_key": "key",
        "node_id": 0,
        "node_count": 1,
        "params": {"model": "tiny", "seq_len": 64, "k_dim": 4},
        "url": receiver.url,
    }


async def begin(node: WholeMlNode, receiver: CallbackReceiver, height: int) -> None:
    started = await node.post("init/generate", segment(receiver, height))
    assert started.status_code == 200, started.text


async def rotate(node: WholeMlNode, receiver: CallbackReceiver, height: int) -> float:
    """Stop, and begin the next segment as the network's client does; return after how long all other pods have it."""
    begun = monotonic()
    stopped = await node.post("stop", {})
    assert stopped.status_code == 200, stopped.text
    await begin(node, receiver, height)
    answering = [host for host in node.pods if host not in node.hung]
    for host in answering:
        await node.pods[host].reach(lambda status: computes(status, height), seconds=60)
    return monotonic() - begun


def computes(status: Any, height: int) -> bool:  # noqa: ANN401 - a StatusResponse
    return status.state is PowState.GENERATING and status.config.block_height == height


def arrived(receiver: CallbackReceiver, height: int) -> set[int]:
    return {n for payload in receiver.payloads if payload["block_height"] == height for n in payload_nonces(payload)}


async def until(reached: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not reached():  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.02)


async def test_the_first_results_of_every_pod_arrive_at_once(node: WholeMlNode, receiver: CallbackReceiver) -> None:
    begun = monotonic()
    await begin(node, receiver, 100)
    await until(lambda: {nonce % PODS for nonce in arrived(receiver, 100)} == set(range(PODS)), 60)
    assert monotonic() - begun < FIRST_RESULT_SECONDS


async def test_each_segment_follows_the_one_before_at_once(node: WholeMlNode, receiver: CallbackReceiver) -> None:
    await begin(node, receiver, 100)
    await until(lambda: len(arrived(receiver, 100)) > 100, 60)
    for height in (400, 700):
        assert await rotate(node, receiver, height) < ROTATION_SECONDS
        await until(lambda height=height: len(arrived(receiver, height)) > 100, 60)  # type: ignore[misc]


@pytest.mark.parametrize("when", ["known", "new"])
async def test_a_hung_pod_holds_no_other_up(node: WholeMlNode, receiver: CallbackReceiver, when: str) -> None:
    """It has a slot of the segment that ends; the operator waits for it, and nobody else does."""
    await begin(node, receiver, 100)
    await until(lambda: len(arrived(receiver, 100)) > 100, 60)
    node.hung.add(HUNG)
    if when == "known":
        await asyncio.sleep(POLL_SECONDS + STATUS_SECONDS + 1)
    assert await rotate(node, receiver, 400) < (ROTATION_SECONDS if when == "known" else FOUND_SECONDS)
    await until(lambda: len(arrived(receiver, 400)) > 100, 60)


async def test_late_results_carry_their_own_height(node: WholeMlNode, receiver: CallbackReceiver) -> None:
    receiver.answer = 503
    await begin(node, receiver, 100)
    await until(lambda: receiver.attempts > 2, 60)
    await rotate(node, receiver, 400)
    receiver.answer = 200
    await until(lambda: len(arrived(receiver, 400)) > 100, 60)
    stored = await node.stored(100)
    await until(lambda: arrived(receiver, 100) == stored, 60)
    told = {(payload["block_height"], payload["block_hash"]) for payload in receiver.payloads}
    assert told == {(height, f"{height:064x}") for height in (100, 400)}
