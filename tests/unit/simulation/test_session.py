# SPDX-License-Identifier: Apache-2.0
"""A simulated pod computes rounds of both schemes, and tells them apart in its records."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from tests.simulation.receiver import CountingReceiver
from tests.simulation.session import Session
from tests.simulation.world import POD_SETTINGS
from tests.support.fakes.engine import FACTS
from tests.support.servers.pod import ARTIFACT, ROUND, SLOT
from vllm_poc.wire.messages import API_PREFIX
from vllm_poc.wire.partition import NonceSlot

STEPS = 12
CHAINS = ROUND | {
    "block_hash": "chains",
    "params": {"model": "tiny", "seq_len": 64, "decode": True, "max_tokens": STEPS},
}
VECTORS = ARTIFACT | {"block_hash": "vectors"}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.01)


async def test_a_round_of_each_scheme_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in POD_SETTINGS.items():
        monkeypatch.setenv(name, value)
    receiver, session = CountingReceiver(), Session("pod", 0.01)
    transport = httpx.ASGITransport(session.serve)
    async with receiver.receiving(), httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        await session.start()
        for body in (CHAINS, VECTORS, CHAINS):
            first = len(receiver.arrivals[body["block_hash"]])
            order = body | SLOT | {"url": receiver.url, "start_index": first}
            assert (await client.post(f"{API_PREFIX}/init/generate", json=order)).status_code == 200
            await until(lambda first=first, body=body: len(receiver.arrivals[body["block_hash"]]) > first + 40)  # type: ignore[misc]
            assert (await client.post(f"{API_PREFIX}/stop", json={})).status_code == 200
        await session.kill()
    assert receiver.chain_lengths == {"chains": {STEPS + 1}, "vectors": {0}}
    for block, arrived in receiver.arrivals.items():
        assert sorted(arrived) == NonceSlot(**SLOT).nonces(0, len(arrived))
        assert set(arrived.values()) == {1}
        computed = [nonce for work in session.work if work.block_hash == block and work.done for nonce in work.nonces]
        assert set(arrived) <= set(computed)
        # The slice under way at a stop is computed to its end, and dropped.
        stops, slice_ = 2 if block == "chains" else 1, FACTS["max_batch_nonces"]
        assert len(computed) <= len(arrived) + stops * slice_
    calls = [work for work in session.work if work.block_hash == "chains"]
    assert {work.chain_length for work in calls} == {STEPS + 1}
    assert len(calls) > 2 * sum(work.done for work in calls), "a batch takes several calls"
