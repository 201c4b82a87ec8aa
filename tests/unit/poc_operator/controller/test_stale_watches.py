# SPDX-License-Identifier: Apache-2.0
"""A watch that misses a change is found by the second list that shows it; a slow one is not blamed."""

import dataclasses
import json
import time
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, LabelSelector, fleet_selector
from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import State
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.health import StaleWatchCheck
from poc_operator.controller.observing import PodCache
from poc_operator.controller.untold_pods import FEW
from poc_operator.observed import PodView
from tests.unit.poc_operator.build import UID, a_pod, a_round


class Lists:
    """What the API server lists. ``others`` are rounds beside that of the test."""

    others: Sequence[PoCRound] = ()

    def __init__(self, round_: PoCRound, *pods: PodView) -> None:
        self.rounds = [round_]
        self.pods = list(pods)

    async def list_bodies(self, resource: type, namespaces: Collection[str]) -> list[Any]:
        """Return the rounds as the API server has them."""
        return [
            json.loads(found.model_dump_json(by_alias=True, exclude_none=True))
            for found in (*self.rounds, *self.others)
        ]

    async def list_pods(self, namespace: str, selector: LabelSelector) -> list[PodView]:
        """Return the pods."""
        return [pod for pod in self.pods if selector.matches(pod.labels)]

    async def pod(self, namespace: str, name: str) -> PodView | None:
        """Return the pod of this name."""
        return next((pod for pod in self.pods if (pod.namespace, pod.name) == (namespace, name)), None)


class Watched:
    """A check over lists and what the watch told."""

    def __init__(self, *listed: PodView, told: Collection[PodView] = (), driven: Collection[str] = (UID,)) -> None:
        self.lists = Lists(a_round(), *listed)
        self.cache = PodCache(time.monotonic)
        for pod in told:
            self.cache.put(pod)
        self.gone: list[str] = []
        self.fleets: list[tuple[str, LabelSelector]] = []
        self._check = StaleWatchCheck(
            cast(ObjectStore, self.lists), [PoCRound], self.cache, lambda: driven, self._end, lambda: self.fleets
        )

    def _end(self, pod: PodView) -> None:
        self.gone.append(pod.uid)
        self.cache.remove(pod)

    async def missed(self) -> list[str]:
        """Check once more."""
        await self._check.check([])
        return self._check.missed


@pytest.fixture(params=[0, FEW], ids=["few", "many"])
def selectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many selectors all pods of the namespace are listed at once."""
    others = [a_round(selector={"matchLabels": {"number": str(number)}}) for number in range(request.param)]
    monkeypatch.setattr(Lists, "others", others)


@pytest.mark.usefixtures("selectors")
@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ([a_pod("a")], []),
        ([a_pod("a", labels={})], [a_pod("a")]),
        ([a_pod("a", ready=False)], [a_pod("a")]),
    ],
    ids=["added", "relabelled", "modified"],
)
async def test_a_missed_change_is_found_by_the_second_list(listed: list[PodView], told: list[PodView]) -> None:
    watched = Watched(*listed, told=told)
    assert await watched.missed() == []
    assert await watched.missed() == ["pod ns/a is not what the watch told"]


@pytest.mark.usefixtures("selectors")
@pytest.mark.parametrize("listed", [[], [dataclasses.replace(a_pod("a"), uid="another")]], ids=["gone", "same name"])
async def test_a_pod_that_vanished_while_the_watch_had_expired_is_forgotten_by_the_first_list(
    listed: list[PodView],
) -> None:
    """Its deletion is never told, and no new process is needed for that."""
    watched = Watched(*listed, told=[a_pod("a"), *listed])
    for _ in range(2):
        assert await watched.missed() == []
        assert watched.gone == ["a"]
        assert watched.cache.matching(watched.lists.rounds[0]) == listed


@pytest.mark.usefixtures("selectors")
async def test_a_watch_that_catches_up_is_healthy() -> None:
    watched = Watched(a_pod("a"))
    assert await watched.missed() == []
    watched.cache.put(a_pod("a"))
    assert await watched.missed() == []


@pytest.mark.usefixtures("selectors")
async def test_a_pod_that_changes_all_the_time_is_not_missed() -> None:
    watched = Watched(a_pod("a", ip="10.0.0.1"), told=[a_pod("a", ip="10.0.0.0")])
    for address in range(1, 4):
        assert await watched.missed() == []
        watched.cache.put(a_pod("a", ip=f"10.0.0.{address}"))
        watched.lists.pods = [a_pod("a", ip=f"10.0.0.{address + 1}")]


async def test_a_round_that_nobody_reconciles() -> None:
    watched = Watched(driven=())
    assert await watched.missed() == []
    assert await watched.missed() == ["PoCRound ns/r is not reconciled"]
    watched.lists.rounds = [a_round(RoundStatus(state=State.COMPLETE))]
    assert await watched.missed() == []


async def test_a_fleets_pods_are_looked_at_also_while_no_round_selects_them() -> None:
    """Its update would wait for ever for a pod of which the watch has missed the end."""
    pod = dataclasses.replace(a_pod("a"), labels={FLEET_LABEL: "demo"})
    watched = Watched(told=[pod])
    assert await watched.missed() == []
    assert watched.gone == [], "no round selects it"
    watched.fleets.append((pod.namespace, fleet_selector("demo")))
    assert await watched.missed() == []
    assert watched.gone == [pod.uid]
