# SPDX-License-Identifier: Apache-2.0
"""Pods of which the watch has yet to tell, looked for by few objects or by many at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import cast

import pytest

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.clients.errors import StoreUnavailable
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.observing import PodCache
from poc_operator.controller.untold_pods import FEW, UntoldPods
from poc_operator.observed import PodView
from tests.support.builders.forwarding import until
from tests.unit.poc_operator.build import a_pod

MANY = 100
EVERY = LabelSelector()


def selector_of(name: str) -> LabelSelector:
    return LabelSelector(match_labels={"round": name})


def pod_of(name: str) -> PodView:
    return a_pod(name, labels={"round": name})


class Store:
    """Lists and single pods, each after a moment."""

    def __init__(self, pods: Collection[PodView]) -> None:
        self.pods = list(pods)
        self.lists: list[LabelSelector] = []
        self.fault: StoreUnavailable | None = None

    async def list_pods(self, namespace: str, selector: LabelSelector) -> list[PodView]:
        """Return the pods that were there when the list began."""
        self.lists.append(selector)
        found = [pod for pod in self.pods if pod.namespace == namespace and selector.matches(pod.labels)]
        await asyncio.sleep(0.05)
        if self.fault is not None:
            raise self.fault
        return found

    async def pod(self, namespace: str, name: str) -> PodView | None:
        """Return the pod of this name."""
        return next((pod for pod in self.pods if (pod.namespace, pod.name) == (namespace, name)), None)


class World:
    """Pods a and b exist, and the watch has told of a."""

    def __init__(self) -> None:
        self.store = Store([pod_of("a"), pod_of("b")])
        self.cache = PodCache(time.monotonic)
        self.cache.put(self.store.pods[0])
        self.untold = UntoldPods(cast(ObjectStore, self.store), self.cache)

    async def answers(self, askers: int, ask: Callable[[UntoldPods], Awaitable[bool]]) -> set[bool]:
        """Let so many ask at once."""
        return set(await asyncio.gather(*(ask(self.untold) for _ in range(askers))))


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("askers", [1, MANY])
@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        pytest.param(lambda u: u.exist("ns", selector_of("a")), False, id="told"),
        pytest.param(lambda u: u.exist("ns", selector_of("b")), True, id="not told"),
        pytest.param(lambda u: u.exist("elsewhere", selector_of("b")), False, id="another namespace"),
        pytest.param(lambda u: u.include("ns", selector_of("b"), {"b": "b"}), True, id="selected"),
        pytest.param(lambda u: u.include("ns", selector_of("a"), {"b": "b"}), True, id="not selected"),
        pytest.param(lambda u: u.include("ns", selector_of("a"), {"c": "b"}), False, id="another of its name"),
        pytest.param(lambda u: u.include("ns", selector_of("a"), {"c": "c"}), False, id="gone"),
    ],
)
async def test_few_and_many_get_the_same_answers(
    world: World, askers: int, ask: Callable[[UntoldPods], Awaitable[bool]], answer: bool
) -> None:
    assert await world.answers(askers, ask) == {answer}


async def test_many_share_lists_of_the_namespace(world: World) -> None:
    await world.answers(MANY, lambda untold: untold.exist("ns", selector_of("a")))
    assert [selector for selector in world.store.lists if selector != EVERY] == FEW * [selector_of("a")]
    assert world.store.lists.count(EVERY) == 2, "the first one, and another for those that asked during it"
    await world.answers(1, lambda untold: untold.exist("ns", selector_of("a")))
    assert len(world.store.lists) == FEW + 3, "one that asks alone has a list of its own"


async def test_a_shared_list_begins_after_the_question(world: World) -> None:
    """One that was under way may not have a pod that came since."""
    ask = lambda untold: untold.exist("ns", selector_of("c"))  # noqa: E731
    early = asyncio.create_task(world.answers(FEW + 1, ask))
    await until(lambda: EVERY in world.store.lists)
    world.store.pods.append(pod_of("c"))
    assert await world.answers(MANY, ask) == {True}
    assert await early == {False}


async def test_a_list_that_fails_is_told_and_made_anew(world: World) -> None:
    world.store.fault = StoreUnavailable("away")
    asking = [asyncio.create_task(world.untold.exist("ns", selector_of("b"))) for _ in range(FEW + 2)]
    await asyncio.wait(asking)
    assert {str(task.exception()) for task in asking} == {"away"}
    world.store.fault = None
    assert await world.answers(MANY, lambda untold: untold.exist("ns", selector_of("b"))) == {True}


async def test_one_that_gives_up_does_not_end_what_others_wait_for(world: World) -> None:
    asking = [asyncio.create_task(world.untold.exist("ns", selector_of("b"))) for _ in range(FEW + 3)]
    await until(lambda: EVERY in world.store.lists)
    asking[FEW].cancel()
    done = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(done[FEW], asyncio.CancelledError)
    assert {found for number, found in enumerate(done) if number != FEW} == {True}
