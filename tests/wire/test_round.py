# SPDX-License-Identifier: Apache-2.0
"""Whole rounds: the operator's loop against pods over HTTP."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import State
from poc_operator.clients.errors import StaleObject
from poc_operator.clients.pods.client import PodClient
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.fleet import RoundFleet

HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
async def fleet(receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RoundFleet]:
    for name in ("CALLBACK_INTERVAL_SECONDS", "RETRY_FIRST_SECONDS"):
        monkeypatch.setenv(f"VLLM_POC_{name}", "0.01")
    async with AsyncExitStack() as stack, PodClient() as client:
        fleet = RoundFleet(stack, receiver, client)
        for host in HOSTS:
            await fleet.start_pod(host)
        yield fleet


def computes(status: RoundStatus) -> bool:
    return all(slot.state == "Running" and slot.delivered > 0 for slot in status.assignments) and status.slots == 2


def complete(status: RoundStatus) -> bool:
    return status.state is State.COMPLETE


def assert_nothing_lost_nothing_twice(fleet: RoundFleet, status: RoundStatus) -> None:
    received = Counter(fleet.receiver.nonces)
    assert set(received.values()) == {1}
    expected = {slot.group + index * 2 for slot in status.assignments for index in range(slot.delivered)}
    assert set(received) == expected
    assert status.totals.checked == status.totals.delivered == len(received) >= 400


async def test_a_round_is_computed_and_delivered_exactly_once(fleet: RoundFleet) -> None:
    status = await fleet.reconcile_until(complete)
    assert_nothing_lost_nothing_twice(fleet, status)
    assert (status.desired, status.running, status.done, status.failed) == (2, 0, 2, 0)
    assert [event.reason for event in fleet.events] == ["Started", "Completed"]


async def test_an_operator_killed_in_mid_round_is_replaced_without_a_trace(fleet: RoundFleet) -> None:
    before = await fleet.reconcile_until(computes)
    fleet.operator = fleet.new_operator()
    status = await fleet.reconcile_until(complete)
    assert_nothing_lost_nothing_twice(fleet, status)
    assert [slot.session for slot in status.assignments] == [slot.session for slot in before.assignments]
    assert status.totals.retries == 0


@pytest.mark.parametrize("after_write", [False, True])
async def test_an_operator_killed_between_record_and_action(fleet: RoundFleet, after_write: bool) -> None:
    fleet.store.fault, fleet.store.fault_after_write = StaleObject("killed"), after_write
    with pytest.raises(StaleObject):
        await fleet.operator.reconcile()
    fleet.operator = fleet.new_operator()
    status = await fleet.reconcile_until(complete)
    assert_nothing_lost_nothing_twice(fleet, status)
    assert [slot.attempts for slot in status.assignments] == [1, 1]


async def test_a_restarted_pod_goes_on_after_what_was_delivered(fleet: RoundFleet) -> None:
    before = await fleet.reconcile_until(computes)
    await fleet.start_pod(HOSTS[0])
    status = await fleet.reconcile_until(complete)
    assert status.totals.retries == 1
    assert status.assignments[0].start >= before.assignments[0].delivered > 0
    received = set(fleet.receiver.nonces)
    assert {slot.group + index * 2 for slot in status.assignments for index in range(slot.delivered)} <= received
    assert [event.reason for event in fleet.events] == ["Started", "WorkLost", "Completed"]


async def test_a_deleted_round_stops_its_pods(fleet: RoundFleet) -> None:
    await fleet.reconcile_until(computes)
    fleet.delete()
    await fleet.reconcile_to_release()


async def test_a_round_that_is_gone_is_not_driven(fleet: RoundFleet) -> None:
    fleet.store.work = None
    assert await fleet.operator.reconcile() is False
