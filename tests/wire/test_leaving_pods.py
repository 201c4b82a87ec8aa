# SPDX-License-Identifier: Apache-2.0
"""Pods that leave a running round: they are polled, stopped, and hand their slots over, over HTTP."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.clients.pods.client import PodClient
from poc_operator.leases import LEASE_SECONDS
from poc_operator.observed import PodView
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.clock import FakeClock
from tests.support.servers.fleet import RoundFleet
from tests.support.servers.pod import Pod
from tests.unit.poc_operator.build import a_pod
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.partition import NonceSlot

HOSTS = ("127.0.0.1", "127.0.0.2")
SPARE = "127.0.0.3"
GROUPS = {"first": 0, "last": 0, "count": 1, "groups": 2}


class Leavers(RoundFleet):
    """Two pods with a slot each, and a spare."""

    async def begin(self) -> list[Pod]:
        """Return the two pods, which compute; the spare is there by then, too."""
        pods = [await self.start_pod(host) for host in HOSTS]
        await self.reconcile_until(lambda status: all(slot.delivered for slot in status.assignments) and status.slots)
        await self.start_pod(SPARE)
        return pods


@pytest.fixture
async def fleet(
    receiver: CallbackReceiver, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Leavers]:
    for name in ("CALLBACK_INTERVAL_SECONDS", "RETRY_FIRST_SECONDS"):
        monkeypatch.setenv(f"VLLM_POC_{name}", "0.01")
    async with AsyncExitStack() as stack, PodClient() as client:
        leavers = Leavers(stack, receiver, client, nodes=GROUPS, stop={"afterNonces": 4_000})
        leavers.clock = clock
        yield leavers


def complete(status: RoundStatus) -> bool:
    return status.state is State.COMPLETE


WAYS = {"deleted": replace(a_pod(f"pod-{HOSTS[0]}", ip=HOSTS[0]), terminating=True)}
WAYS["relabelled"] = replace(WAYS["deleted"], terminating=False, labels={})


@pytest.mark.parametrize("view", WAYS.values(), ids=WAYS)
async def test_no_nonce_is_computed_twice_when_a_pod_leaves(fleet: Leavers, view: PodView) -> None:
    first, second = await fleet.begin()
    fleet.see(view)
    status = await fleet.reconcile_until(complete)
    assert [slot.pod for slot in status.assignments] == [f"pod-{SPARE}", f"pod-{HOSTS[1]}"]
    assert status.totals.retries == 1
    # Nobody is blamed for a pod that was deleted, as by a scale-down, and stopped in time.
    assert status.assignments[0].disruptions == (1 if view.terminating else 0)
    received = Counter(fleet.receiver.nonces)
    assert set(received.values()) == {1}
    assert set(received) == {slot.group + index * 2 for slot in status.assignments for index in range(slot.delivered)}
    left = await first.status()
    assert (left.state, left.delivered_index) == (PowState.STOPPED, left.next_index)
    assert status.assignments[0].start == left.next_index
    # The slice under way when the pod was told to stop is computed to its end, and dropped.
    under_way = set(first.engine.batches[-1]["nonces"])
    computed = Counter(first.engine.computed + second.engine.computed)
    assert not (set(first.engine.computed) - under_way) & set(
        NonceSlot(node_id=0, node_count=1, group_id=0, n_groups=2).nonces(status.assignments[0].start, 2_000)
    )
    assert max(times for nonce, times in computed.items() if nonce not in under_way) == 1


@pytest.mark.parametrize("view", WAYS.values(), ids=WAYS)
async def test_a_new_operator_finds_the_pods_that_leave(fleet: Leavers, view: PodView) -> None:
    """As long as it may compute, its slot stays its own, whoever asks."""
    first, _ = await fleet.begin()
    fleet.see(view)
    await fleet.operator.reconcile()
    await fleet.operator.close()
    assert fleet.store.work is not None
    assert fleet.store.work.status.assignments[0].state is SlotState.LEAVING
    fleet.operator = fleet.new_operator()
    status = await fleet.reconcile_until(lambda status: status.assignments[0].pod == f"pod-{SPARE}")
    assert status.assignments[0].start == (await first.status()).next_index
    assert set(Counter(fleet.receiver.nonces).values()) == {1}


async def test_the_operators_polls_renew_leases(fleet: Leavers, clock: FakeClock) -> None:
    first, _ = await fleet.begin()
    clock.advance(1_000)
    assert (await first.status()).lease_remaining_seconds == LEASE_SECONDS - 1_000
    await fleet.operator.reconcile()
    assert (await first.status()).lease_remaining_seconds == LEASE_SECONDS


async def test_pods_stop_without_an_operator_and_the_next_one_goes_on(fleet: Leavers, clock: FakeClock) -> None:
    first, second = await fleet.begin()
    await fleet.operator.close()
    clock.advance(LEASE_SECONDS)
    for pod in (first, second):
        left = await pod.reach(lambda status: status.state is PowState.STOPPED)
        assert (left.stop_reason, left.delivered_index) == ("LeaseExpired", left.next_index)
    fleet.operator = fleet.new_operator()
    status = await fleet.reconcile_until(complete)
    assert set(Counter(fleet.receiver.nonces).values()) == {1}
    assert [slot.disruptions for slot in status.assignments] == [1, 1]
    lost = [event.message for event in fleet.events if event.reason == "WorkLost"]
    assert len(lost) == 2
    assert all("the lease of 3600 s ran out: nobody renewed it" in message for message in lost)
