# SPDX-License-Identifier: Apache-2.0
"""What keeps the event loop busy has some time of each iteration, and leaves the rest to all else."""

import asyncio
import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import PodUnreachable
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller import event_loop
from poc_operator.controller.actions import PodActions
from poc_operator.controller.event_loop import (
    BUDGET_SECONDS,
    MANY,
    MOST_ORDERS,
    Computing,
    FewRequests,
    collect_garbage,
)
from poc_operator.controller.kinds import Sources
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.planning.snapshot import StopPod
from tests.support.builders.forwarding import until
from tests.unit.poc_operator.build import a_pod
from vllm_poc.wire.answers import CommandResponse


async def test_the_event_loop_looks_at_all_else_when_computations_have_had_their_time() -> None:
    now = [0.0]
    computing, done, iterations = Computing(lambda: now[0]), list[int](), [0]

    async def count_iterations() -> None:
        while True:
            await asyncio.sleep(0)
            iterations[0] += 1

    def compute() -> None:
        done.append(iterations[0])
        now[0] += BUDGET_SECONDS / 7.5

    counter = asyncio.create_task(count_iterations())
    await asyncio.gather(*(computing.done(compute, size=1) for _ in range(100)))
    counter.cancel()
    assert len(done) == 100
    assert max(Counter(done).values()) == 8
    assert len(set(done)) == -(-100 // 8)


async def test_what_nobody_waits_for_any_more_is_not_computed() -> None:
    computing, done = Computing(), list[int]()
    given_up, waits = (asyncio.create_task(computing.done(partial(done.append, n), size=1)) for n in range(2))
    await asyncio.sleep(0)
    given_up.cancel()
    await waits
    assert done == [1]


@pytest.mark.parametrize(("size", "in_the_loop"), [(MANY - 1, True), (MANY, False)])
async def test_what_is_made_of_many_shares_is_computed_in_a_thread(size: int, in_the_loop: bool) -> None:
    own = threading.get_ident()
    assert (await Computing().done(threading.get_ident, size) == own) is in_the_loop


async def test_a_computation_that_fails_holds_up_no_other() -> None:
    computing = Computing()
    with pytest.raises(ZeroDivisionError):
        await computing.done(lambda: 1 // 0, size=1)
    assert await computing.done(lambda: 1, size=1) == 1


async def test_few_orders_of_all_rounds_at_a_time_may_be_answered_at_any_moment() -> None:
    now, most, stopped, few = 0, 0, list[str](), FewRequests(MOST_ORDERS)

    class Client(PodClient):
        async def stop(self, base: str, round_id: str | None, **_: object) -> CommandResponse:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1
            stopped.append(base)
            raise PodUnreachable(f"nobody computes {round_id}")

    log = ObjectLogger(logging.getLogger(__name__), PoCRound.KIND, ObjectRef("ns", "r", "uid"))
    async with Client() as client:
        rounds = [
            PodActions(
                sources=Sources(store=cast(ObjectStore, None)),
                clients=client,
                few=few,
                emit=lambda _: None,
                wake=asyncio.Event(),
                log=log,
            )
            for _ in range(20)
        ]
        for orders in rounds:
            orders.begin(8000, [StopPod(pod=a_pod(f"p{number}"), round_id="a") for number in range(MOST_ORDERS)])
        for orders in rounds:
            await orders.finish()
    assert len(stopped) == 20 * MOST_ORDERS
    assert most == MOST_ORDERS


@asynccontextmanager
async def collecting() -> AsyncIterator[None]:
    """Let garbage be collected as the operator does, and then as Python does."""
    task = asyncio.create_task(collect_garbage())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        gc.enable()


async def test_garbage_is_searched_for_by_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[int]()

    def counted(generation: int = 2) -> int:
        searched.append(generation)
        return 0

    monkeypatch.setattr(event_loop, "GARBAGE_SECONDS", 0.0)
    monkeypatch.setattr(event_loop, "ALL_STEPS", 25)
    monkeypatch.setattr(gc, "collect", counted)
    async with collecting():
        await until(lambda: len(searched) >= 25)
        assert not gc.isenabled(), "Python would search through all objects within a turn"
    assert searched[:25] == [*([0] * 3 + [1]) * 6, 2]


async def test_a_list_of_thousands_of_pods_is_set_aside_until_all_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays, and looking through it would hold up the event loop."""
    monkeypatch.setattr(event_loop, "GARBAGE_SECONDS", 0.0)
    monkeypatch.setattr(event_loop, "ALL_STEPS", 1_000)
    done, collect, freeze = list[str](), gc.collect, gc.freeze

    def counted(generation: int = 2) -> int:
        done.append(f"searched {generation}")
        return collect(generation)

    def set_aside() -> None:
        done.append("set aside")
        freeze()

    monkeypatch.setattr(gc, "freeze", set_aside)
    monkeypatch.setattr(gc, "collect", counted)
    gc.disable()  # as it is in the operator, when a list arrives
    listed = [[number] for number in range(event_loop.KEPT_OBJECTS + 1)]
    async with collecting():
        await until(lambda: "searched 2" in done)
    assert len(listed) > event_loop.KEPT_OBJECTS
    assert done.count("set aside") == 1
    assert gc.get_freeze_count() == 0


async def test_no_search_looks_at_more_than_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thousand rounds begin, each moment brings a few of their objects, which stay."""
    monkeypatch.setattr(event_loop, "GARBAGE_SECONDS", 0.0)
    monkeypatch.setattr(event_loop, "KEPT_OBJECTS", 5_000)
    looked, kept, collect = list[int](), list[list[list[int]]](), gc.collect

    def counted(generation: int = 2) -> int:
        looked.append(sum(len(gc.get_objects(generation=one)) for one in range(generation + 1)))
        return collect(generation)

    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", counted)
    async with collecting():
        while len(looked) < 100:
            kept.append([[number] for number in range(2_000)])
            await asyncio.sleep(0)
    gc.unfreeze()
    assert max(looked) < 6_000, looked


async def test_what_a_search_frees_does_not_count_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = list[int]()
    monkeypatch.setattr(event_loop, "GARBAGE_SECONDS", 0.0)
    monkeypatch.setattr(event_loop, "KEPT_OBJECTS", 5_000)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.get_count()[0]))
    gc.collect()
    async with collecting():
        for _ in range(50):
            for _ in range(2_000):
                node: list[object] = []
                node.append(node)
            await asyncio.sleep(0)
    assert not frozen


async def test_what_refers_to_itself_does_not_stay() -> None:
    class Node:
        def __init__(self) -> None:
            self.own = self

    async with collecting():
        left = weakref.ref(Node())
        await until(lambda: left() is None)
