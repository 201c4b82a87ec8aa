# SPDX-License-Identifier: Apache-2.0
"""Whole rounds: the operator's loop against pods over HTTP. Only the API server and the engine are fakes,
so that they can be made to fail at an exact moment."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import cast

import pytest

from poc_operator.model.round import Round
from poc_operator.model.status import RoundState, RoundStatus
from poc_operator.plan.snapshot import RoundEvent
from poc_operator.podapi.client import PodClient
from poc_operator.runtime.driver import RoundDriver
from poc_operator.runtime.pods import PodCache
from poc_operator.store.errors import StaleRound
from poc_operator.store.rounds import RoundStore
from tests.support.callback_receiver import CallbackReceiver
from tests.support.http_server import free_port, serve
from tests.support.pod import running_pod
from tests.unit.poc_operator.build import a_pod, a_round


class MemoryStore:
    """One round in memory; ``fault`` is raised by the next write, before or after it took effect."""

    def __init__(self, round_: Round) -> None:
        self.round: Round | None = round_
        self.fault: Exception | None = None
        self.fault_after_write = False

    async def get(self, namespace: str, name: str) -> Round | None:
        """Return the round."""
        return self.round

    async def write_status(self, round_: Round, status: RoundStatus) -> None:
        """Store the status."""
        fault, self.fault = self.fault, None
        if fault is None or self.fault_after_write:
            self.round = round_.model_copy(update={"status": status})
        if fault is not None:
            raise fault

    async def delete(self, round_: Round) -> None:
        """Forget the round."""
        self.round = None


class Fleet:
    """Two pods, a receiver, an operator; pods can be restarted, the operator replaced."""

    def __init__(self, stack: AsyncExitStack, receiver: CallbackReceiver, client: PodClient) -> None:
        self._stack = stack
        self._client = client
        self._servers: dict[str, AsyncExitStack] = {}
        self._pods = PodCache()
        self.port = free_port()
        self.receiver = receiver
        self.events: list[RoundEvent] = []
        self.store = MemoryStore(self._round())
        self.operator = self.new_operator()

    def _round(self) -> Round:
        return a_round(
            rTarget=None,
            artifact={"kDim": 4},
            model={"name": "tiny", "seqLen": 64},
            stop={"afterNonces": 400},
            batchSize=8,
            port=self.port,
            callbackURL=self.receiver.url,
            startDeadlineSeconds=10**9,  # the builder's round was created long ago
        )

    def new_operator(self) -> RoundDriver:
        """Return an operator that knows nothing but the stored round."""
        store = cast(RoundStore, self.store)
        return RoundDriver("ns", "r", store=store, client=self._client, pods=self._pods, emit=self.events.append)

    async def start_pod(self, host: str) -> None:
        """Start a pod, or restart it: a new process, a new session."""
        if host in self._servers:
            await self._servers[host].aclose()
        servers = self._servers[host] = await self._stack.enter_async_context(AsyncExitStack())
        pod = await servers.enter_async_context(running_pod())
        await servers.enter_async_context(serve(pod.app, host, self.port))
        self._pods.put(a_pod(f"pod-{host}", ip=host))

    async def tick_until(self, reached: Callable[[RoundStatus], bool], ticks: int = 400) -> RoundStatus:
        """Tick until the stored status is as wanted."""
        for _ in range(ticks):
            assert self.store.round is not None
            if reached(self.store.round.status):
                return self.store.round.status
            await self.operator.tick()
            # Actions run beside the loop.
            await asyncio.sleep(0.01)
        raise AssertionError(f"not reached: {self.store.round}")


HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
async def fleet(receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    for name in ("CALLBACK_INTERVAL_SECONDS", "RETRY_FIRST_SECONDS"):
        monkeypatch.setenv(f"VLLM_POC_{name}", "0.01")
    async with AsyncExitStack() as stack, PodClient() as client:
        fleet = Fleet(stack, receiver, client)
        for host in HOSTS:
            await fleet.start_pod(host)
        yield fleet


def computes(status: RoundStatus) -> bool:
    return all(slot.state == "Running" and slot.delivered > 0 for slot in status.assignments) and status.slots == 2


def complete(status: RoundStatus) -> bool:
    return status.state is RoundState.COMPLETE


def assert_nothing_lost_nothing_twice(fleet: Fleet, status: RoundStatus) -> None:
    received = Counter(fleet.receiver.nonces)
    assert set(received.values()) == {1}
    expected = {slot.group + index * 2 for slot in status.assignments for index in range(slot.delivered)}
    assert set(received) == expected
    assert status.totals.checked == status.totals.delivered == len(received) >= 400


async def test_a_round_is_computed_and_delivered_exactly_once(fleet: Fleet) -> None:
    status = await fleet.tick_until(complete)
    assert_nothing_lost_nothing_twice(fleet, status)
    assert status.pods == "2/2"
    assert [event.reason for event in fleet.events] == ["Started", "Completed"]


async def test_an_operator_killed_in_mid_round_is_replaced_without_a_trace(fleet: Fleet) -> None:
    before = await fleet.tick_until(computes)
    fleet.operator = fleet.new_operator()
    status = await fleet.tick_until(complete)
    assert_nothing_lost_nothing_twice(fleet, status)
    assert [slot.session for slot in status.assignments] == [slot.session for slot in before.assignments]
    assert status.totals.reissues == 0


@pytest.mark.parametrize("after_write", [False, True])
async def test_an_operator_killed_between_record_and_action(fleet: Fleet, after_write: bool) -> None:
    fleet.store.fault, fleet.store.fault_after_write = StaleRound("killed"), after_write
    with pytest.raises(StaleRound):
        await fleet.operator.tick()
    fleet.operator = fleet.new_operator()
    status = await fleet.tick_until(complete)
    assert_nothing_lost_nothing_twice(fleet, status)
    assert [slot.attempts for slot in status.assignments] == [1, 1]


async def test_a_restarted_pod_goes_on_after_what_was_delivered(fleet: Fleet) -> None:
    before = await fleet.tick_until(computes)
    await fleet.start_pod(HOSTS[0])
    status = await fleet.tick_until(complete)
    assert status.totals.reissues == 1
    assert status.assignments[0].start >= before.assignments[0].delivered > 0
    received = set(fleet.receiver.nonces)
    assert {slot.group + index * 2 for slot in status.assignments for index in range(slot.delivered)} <= received
    assert [event.reason for event in fleet.events] == ["Started", "WorkLost", "Completed"]


async def test_a_deleted_round_stops_its_pods(fleet: Fleet) -> None:
    await fleet.tick_until(computes)
    assert await fleet.operator.stop_all() == 0


async def test_a_round_that_is_gone_is_not_driven(fleet: Fleet) -> None:
    fleet.store.round = None
    assert await fleet.operator.tick() is False
