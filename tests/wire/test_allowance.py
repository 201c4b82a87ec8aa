# SPDX-License-Identifier: Apache-2.0
"""Rounds that stop after so many nonces compute so many, over real pods of different speed."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.status import State
from poc_operator.clients.pods.client import PodClient
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.fleet import RoundFleet
from vllm_poc.wire.partition import NonceSlot

FAST, SLOW = "127.0.0.1", "127.0.0.2"


@pytest.fixture
async def client() -> AsyncIterator[PodClient]:
    async with PodClient() as own:
        yield own


@pytest.mark.parametrize("count", [1, 399, 3000])
async def test_not_a_nonce_too_many_is_computed(receiver: CallbackReceiver, client: PodClient, count: int) -> None:
    async with AsyncExitStack() as stack:
        fleet = RoundFleet(
            stack, receiver, client, stop={"afterNonces": count}, nodes={"first": 0, "last": 1, "count": 2}
        )
        stack.push_async_callback(fleet.operator.close)
        pods = [await fleet.start_pod(host) for host in (FAST, SLOW)]
        pods[1].engine.seconds_per_batch = 0.01
        status = await fleet.reconcile_until(lambda found: found.state.finished)
        assert status.state is State.COMPLETE
        assert status.totals.checked == status.totals.delivered == count
        computed = [nonce for pod in pods for nonce in pod.engine.computed]
        assert len(computed) == count
        assert sorted(receiver.nonces) == sorted(computed)
        slots = [NonceSlot(node_id=node, node_count=2, group_id=0, n_groups=1) for node in range(2)]
        dealt = [
            nonce for slot, found in zip(slots, status.assignments, strict=True) for nonce in slot.nonces(0, found.next)
        ]
        assert sorted(dealt) == sorted(computed)


async def test_valid_nonces_overshoot_by_a_batch_a_pod_at_most(receiver: CallbackReceiver, client: PodClient) -> None:
    async with AsyncExitStack() as stack:
        spec: dict[str, Any] = {"artifact": None, "rTarget": "1.405", "stop": {"afterValid": 500}}
        fleet = RoundFleet(stack, receiver, client, **spec, nodes={"first": 0, "last": 1, "count": 2})
        stack.push_async_callback(fleet.operator.close)
        for host in (FAST, SLOW):
            await fleet.start_pod(host)
        status = await fleet.reconcile_until(lambda found: found.state.finished)
        assert 500 <= status.totals.valid <= 500 + 2 * 8
