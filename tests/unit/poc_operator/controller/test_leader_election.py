# SPDX-License-Identifier: Apache-2.0
"""One operator holds the lease; who loses it knows before another may have it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import monotonic

import pytest

from poc_operator.controller import leader_election as leases
from poc_operator.controller.leader_election import DURATION_SECONDS, RENEW_SECONDS, LeaderElection
from tests.support.fakes.lease_api import LeaseApi, lease_api


async def until(reached: Callable[[], bool], seconds: float = 20) -> None:
    deadline = monotonic() + seconds
    while not reached():
        assert monotonic() < deadline
        await asyncio.sleep(0.005)


@dataclass
class World:
    """An API, a clock, and operators that want the lease."""

    api: LeaseApi
    connection: object
    seconds: float = 1000.0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def operator(self, identity: str) -> LeaderElection:
        return LeaderElection(self.connection, "ns", identity, lambda: self.seconds)  # type: ignore[arg-type]

    def begin(self, coroutine: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)  # type: ignore[arg-type]
        self.tasks.append(task)
        return task

    async def tries(self, requests: int = 8) -> None:
        """Let those who are at it try some more times."""
        wanted = self.api.requests + requests
        await until(lambda: self.api.requests >= wanted)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(leases, "RETRY_SECONDS", 0.01)
    async with lease_api() as (api, connection):
        world = World(api, connection)
        yield world
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)


async def test_the_first_gets_it_and_the_second_waits(world: World) -> None:
    first, second = world.operator("first"), world.operator("second")
    await first.acquire()
    waiting = world.begin(second.acquire())
    await world.tries()
    assert (first.held, second.held, second.holder) == (True, False, "first")
    assert not waiting.done()


async def test_a_released_lease_is_taken_at_once(world: World) -> None:
    first, second = world.operator("first"), world.operator("second")
    await first.acquire()
    waiting = world.begin(second.acquire())
    await first.release()
    await asyncio.wait_for(waiting, 20)
    assert (first.held, second.held, world.api.holder) == (False, True, "second")


async def test_a_lease_of_a_dead_holder_is_taken_after_its_duration(world: World) -> None:
    first, second = world.operator("first"), world.operator("second")
    await first.acquire()
    waiting = world.begin(second.acquire())
    await world.tries()
    world.seconds += DURATION_SECONDS - 0.1
    await world.tries()
    assert not waiting.done()
    assert not first.held  # it has stopped before
    world.seconds += 0.2
    await asyncio.wait_for(waiting, 20)
    assert world.api.lease is not None
    assert world.api.lease["spec"]["leaseTransitions"] == 1


async def test_a_dead_holder_is_followed_at_once_by_a_process_of_its_name(world: World) -> None:
    await world.operator("pod").acquire()
    next_in_the_pod = world.operator("pod")
    await asyncio.wait_for(next_in_the_pod.acquire(), 20)
    assert (next_in_the_pod.held, world.seconds) == (True, 1000.0)


async def test_a_holder_that_renews_keeps_it(world: World) -> None:
    first, second = world.operator("first"), world.operator("second")
    await first.acquire()
    keeping, waiting = world.begin(first.keep()), world.begin(second.acquire())
    for _ in range(5):
        await world.tries()
        world.seconds += RENEW_SECONDS / 2
    await world.tries()
    assert first.held
    assert not keeping.done()
    assert not waiting.done()


@pytest.mark.parametrize("fault", [500, 403, 0], ids=["server error", "forbidden", "no answer"])
async def test_a_holder_that_cannot_renew_stops_before_another_may_begin(world: World, fault: int) -> None:
    first = world.operator("first")
    await first.acquire()
    world.api.fault = fault
    keeping = world.begin(first.keep())
    await world.tries(requests=1)
    assert first.held
    world.seconds += RENEW_SECONDS
    assert not first.held
    if fault:
        await asyncio.wait_for(keeping, 20)


async def test_a_holder_that_slept_through_its_lease_stops(world: World) -> None:
    first, second = world.operator("first"), world.operator("second")
    await first.acquire()
    waiting = world.begin(second.acquire())
    await world.tries()
    world.seconds += DURATION_SECONDS
    await asyncio.wait_for(waiting, 20)
    await asyncio.wait_for(second.acquire(), 20)  # a request that was under way as the clock moved counts from before
    assert (first.held, second.held) == (False, True)
    await asyncio.wait_for(first.keep(), 20)
    assert world.api.holder == "second"


async def test_a_stolen_lease_is_lost_at_once(world: World) -> None:
    first = world.operator("first")
    await first.acquire()
    assert world.api.lease is not None
    world.api.lease["spec"] |= {"holderIdentity": "thief", "renewTime": "2026-01-01T00:00:00.000000Z"}
    await asyncio.wait_for(first.keep(), 20)
    assert (first.held, first.holder) == (False, "thief")


async def test_of_two_that_create_it_at_once_one_has_it(world: World) -> None:
    operators = [world.operator(name) for name in ("a", "b", "c")]
    for operator in operators:
        world.begin(operator.acquire())
    await until(lambda: any(operator.held for operator in operators))
    await world.tries()
    assert [operator.held for operator in operators].count(True) == 1


async def test_an_api_server_that_fails_delays_the_start(world: World) -> None:
    world.api.fault = 500
    waiting = world.begin(world.operator("first").acquire())
    await world.tries()
    assert not waiting.done()
    world.api.fault = None
    await asyncio.wait_for(waiting, 20)
