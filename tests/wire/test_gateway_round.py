# SPDX-License-Identifier: Apache-2.0
"""Whole rounds whose pods deliver to a gateway: ours, and those with the reference implementation."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller import observing
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.gateway import CALLBACK_KEY, TOKEN, Gateway, gateway
from tests.support.servers.fleet import RoundFleet, ValidationFleet
from tests.wire.test_reference_pods import WAYS, ReferenceFleet, leave
from tests.wire.test_round import HOSTS, complete, computes


@pytest.fixture
async def collecting() -> AsyncIterator[Gateway]:
    async with gateway() as found:
        yield found


@pytest.fixture(params=[RoundFleet, ReferenceFleet], ids=["ours", "reference"])
async def fleet(
    request: pytest.FixtureRequest, collecting: Gateway, receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RoundFleet]:
    monkeypatch.setattr(observing, "ASK_SECONDS", 0.05)
    for name in ("CALLBACK_INTERVAL_SECONDS", "RETRY_FIRST_SECONDS"):
        monkeypatch.setenv(f"VLLM_POC_{name}", "0.01")
    collector = GatewayClient(collecting.url, TOKEN, CALLBACK_KEY)
    async with AsyncExitStack() as stack, PodClient() as client, collector:
        fleet: RoundFleet = request.param(stack, receiver, client, gateway=collector)
        if isinstance(fleet, ReferenceFleet):
            fleet.servers = {}
        for host in HOSTS:
            await fleet.start_pod(host)
        yield fleet
        await fleet.operator.close()


def indices(collecting: Gateway, offset: int) -> list[int]:
    return [nonce // 2 for nonce in sorted(collecting.stored) if nonce % 2 == offset]


def degraded(status: RoundStatus) -> tuple[str, str]:
    found = [condition for condition in status.own_conditions if condition.type == ConditionType.DEGRADED]
    return (found[0].reason, found[0].message) if found else ("", "")


async def test_results_go_to_the_gateway_and_are_counted_there(fleet: RoundFleet, collecting: Gateway) -> None:
    status = await fleet.reconcile_until(complete)
    assert fleet.receiver.attempts == 0
    assert collecting.duplicates == 0
    assert status.totals.delivered == status.totals.valid == len(collecting.stored)
    for slot in status.assignments:
        assert indices(collecting, slot.group) == list(range(slot.delivered))


async def test_a_restarted_pod_loses_nothing_and_nothing_counts_twice(fleet: RoundFleet, collecting: Gateway) -> None:
    fleet.change(stop=None)
    await fleet.reconcile_until(computes)
    await fleet.start_pod(HOSTS[0])
    stored = indices(collecting, 0)
    await fleet.reconcile_until(lambda status: status.assignments[0].delivered > len(stored))
    fleet.change(finish=True)
    status = await fleet.reconcile_until(complete)
    slot = status.assignments[0]
    resumes = type(fleet) is RoundFleet
    assert slot.attempts == 2
    assert slot.start == (len(stored) if resumes else 0)
    assert (collecting.duplicates == 0) is resumes
    assert status.totals.delivered == status.totals.valid == len(collecting.stored)
    assert [event.reason for event in fleet.events] == ["Started", "WorkLost", "Completed"]


@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
async def test_what_a_pod_delivered_before_it_left_counts(
    fleet: RoundFleet, collecting: Gateway, fields: dict[str, Any]
) -> None:
    fleet.change(stop=None)
    await fleet.reconcile_until(computes)
    leave(fleet, HOSTS[0], **fields)
    await fleet.reconcile_until(lambda status: status.assignments[0].state is SlotState.WAITING)
    if isinstance(fleet, ReferenceFleet):
        assert fleet.servers[HOSTS[0]].request is None
    fleet.change(finish=True)
    status = await fleet.reconcile_until(complete)
    assert status.totals.delivered == status.totals.valid == len(collecting.stored)
    for slot in status.assignments:
        assert indices(collecting, slot.group) == list(range(slot.delivered))


async def test_a_gateway_that_has_lost_results_gets_them_anew(fleet: RoundFleet, collecting: Gateway) -> None:
    """As after a restore. A reference pod computes on, so that its slots have a gap, and less counts."""

    async def until_each(test: Callable[[Assignment], bool]) -> None:
        await fleet.reconcile_until(lambda status: bool(status.assignments) and all(map(test, status.assignments)))

    fleet.change(stop=None)
    # Far more than is delivered between two questions: less would not be known to be lost.
    await until_each(lambda slot: slot.delivered > 4_000)
    collecting.stored -= {nonce for nonce in collecting.stored if nonce >= 40}
    if isinstance(fleet, ReferenceFleet):
        await until_each(lambda slot: slot.delivered <= 20)
    else:
        await until_each(lambda slot: bool(slot.disruptions and slot.session))
        await until_each(lambda slot: slot.delivered > 8_000)
    fleet.change(finish=True)
    status = await fleet.reconcile_until(complete)
    for slot in status.assignments:
        assert slot.delivered <= len(indices(collecting, slot.group)), "no more is counted than there is"
        assert slot.attempts - slot.disruptions == 1, "nobody is charged for it"
    assert degraded(status)[0] != Reason.REPORT_CONTRADICTORY


async def test_a_gateway_that_is_away_is_told_and_the_round_goes_on(fleet: RoundFleet, collecting: Gateway) -> None:
    fleet.change(stop=None)
    collecting.answer = 503
    status = await fleet.reconcile_until(lambda status: status.totals.checked > 0)
    assert degraded(status)[0] == Reason.GATEWAY_UNREACHABLE
    assert "HTTP 503" in degraded(status)[1]
    assert (status.totals.delivered > 0) <= (type(fleet) is RoundFleet), (
        "a reference pod does not know what was delivered"
    )
    collecting.answer = 200
    status = await fleet.reconcile_until(lambda status: degraded(status)[0] != Reason.GATEWAY_UNREACHABLE)
    assert status.state is State.RUNNING


@pytest.mark.parametrize("fleet", [RoundFleet], indirect=True)
async def test_what_the_gateway_has_not_got_is_not_counted_and_the_pods_are_named(
    fleet: RoundFleet, collecting: Gateway
) -> None:
    fleet.change(stop=None)
    await fleet.reconcile_until(lambda status: status.totals.delivered > 0)
    collecting.loses = True
    status = await fleet.reconcile_until(lambda status: degraded(status)[0] == Reason.REPORT_CONTRADICTORY)
    for host in HOSTS:
        assert f"pod pod-{host} is not believed: it says that" in degraded(status)[1]
    assert status.totals.delivered == len(collecting.stored)
    fleet.change(finish=True)
    status = await fleet.reconcile_until(complete)
    assert status.totals.delivered == status.totals.valid == len(collecting.stored) < status.totals.checked
    assert Reason.REPORT_CONTRADICTORY in status.degraded


async def test_conflicts_are_told(fleet: RoundFleet, collecting: Gateway) -> None:
    fleet.change(stop=None)
    collecting.conflicts = 3
    status = await fleet.reconcile_until(lambda status: degraded(status)[0] == Reason.RESULTS_CONFLICT)
    assert "node 0 group 0 (pod pod-127.0.0.1: 3)" in degraded(status)[1]


@pytest.mark.parametrize("fleet", [RoundFleet], indirect=True)
async def test_a_changed_key_costs_nothing(fleet: RoundFleet, collecting: Gateway) -> None:
    """The pods keep their results, and are told the address again, signed with the key that the gateway knows."""
    fleet.change(stop=None)
    await fleet.reconcile_until(lambda status: status.totals.delivered > 0)
    collecting.key = "another"
    held = len(collecting.stored)
    await asyncio.sleep(0.1)
    assert fleet.collector is not None
    fleet.collector.key = "another"
    status = await fleet.reconcile_until(lambda status: len(collecting.stored) > held + 100)
    fleet.change(finish=True)
    status = await fleet.reconcile_until(complete)
    assert (status.totals.rejected, status.totals.retries, collecting.duplicates) == (0, 0, 0)
    for slot in status.assignments:
        assert indices(collecting, slot.group) == list(range(slot.delivered))


async def test_each_pod_delivers_under_its_own_name(fleet: RoundFleet, collecting: Gateway) -> None:
    await fleet.reconcile_until(complete)
    assert collecting.pods == {(f"pod-{host}", f"pod-{host}") for host in HOSTS}


async def test_no_password_in_the_status(fleet: RoundFleet) -> None:
    status = await fleet.reconcile_until(complete)
    assert "pod:" not in status.model_dump_json()
    assert not any("pod:" in event.message for event in fleet.events)


async def test_a_reference_pods_refusal_does_not_show_the_password(
    collecting: Gateway, receiver: CallbackReceiver
) -> None:
    collector = GatewayClient(collecting.url, TOKEN, CALLBACK_KEY)
    async with AsyncExitStack() as stack, PodClient() as client, collector:
        fleet = ReferenceFleet(stack, receiver, client, gateway=collector, rTarget="1.4", artifact=None)
        fleet.servers = {}
        await fleet.start_pod(HOSTS[0])
        status = await fleet.reconcile_until(lambda status: any(slot.error for slot in status.assignments))
        assert "Field required" in (status.assignments[0].error or "")
        assert "callbacks" not in status.model_dump_json()
        await fleet.operator.close()


async def test_a_sample_of_another_round_is_recomputed(collecting: Gateway, receiver: CallbackReceiver) -> None:
    collecting.uid, collecting.stored = "another", set(range(40))
    proofs = {"round": {"name": "before", "nonces": 30, "seed": "x"}}
    collector = GatewayClient(collecting.url, TOKEN, CALLBACK_KEY)
    async with AsyncExitStack() as stack, PodClient() as client, collector:
        fleet = ValidationFleet(stack, receiver, client, gateway=collector, proofs=proofs)
        await fleet.start_pod(HOSTS[0])
        status = await fleet.reconcile_until(lambda status: status.state.finished)
        await fleet.operator.close()
    assert status.verdict is not None
    assert (status.verdict.total, status.verdict.fraud) == (30, True)
    asked = {"namespace": "ns", "name": "before", "what": "sample", "nonces": "30", "seed": "x"}
    assert collecting.questions == [asked]


@pytest.mark.parametrize("configured", [False, True])
async def test_a_sample_that_cannot_be_had(collecting: Gateway, receiver: CallbackReceiver, configured: bool) -> None:
    proofs = {"round": {"name": "before"}}
    collector = GatewayClient(collecting.url, TOKEN, CALLBACK_KEY)
    async with AsyncExitStack() as stack, PodClient() as client, collector:
        fleet = ValidationFleet(stack, receiver, client, gateway=collector if configured else None, proofs=proofs)
        await fleet.start_pod(HOSTS[0])
        status = await fleet.reconcile_until(lambda status: bool(status.conditions))
        await fleet.operator.close()
    says = 'has no results of a round "before"' if configured else "start the operator with --gateway-url"
    assert says in status.message
    reasons = {condition.type: condition.reason for condition in status.own_conditions}
    assert reasons["Accepted"] == Reason.PROOFS_UNAVAILABLE
