# SPDX-License-Identifier: Apache-2.0
"""Rounds of thousands of pods hold up no other: they are planned beside the event loop, and still one after another."""

import asyncio
import time
from typing import cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller import kinds
from poc_operator.controller.kinds import RoundPlanner
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.manager import Manager
from poc_operator.planning.snapshot import Snapshot
from poc_operator.rounds.snapshot import RoundStep
from tests.support.builders.forwarding import until
from tests.support.fakes.lease_api import lease_api
from tests.unit.poc_operator.build import a_pod
from tests.unit.poc_operator.controller.test_other_rounds import Store
from tests.unit.poc_operator.rounds.test_queue import a_named_round

PODS = 400
PLAN_SECONDS = 1.0


class Plans:
    """Plans that take long; the names of their rounds, as they begin and as they end."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def plan(self, seen: Snapshot[PoCRound]) -> RoundStep:
        """Take long for a plan of nothing."""
        self.order.append(seen.work.metadata.name)
        time.sleep(PLAN_SECONDS)
        self.order.append(seen.work.metadata.name)
        return RoundStep(status=seen.work.status)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    made = Plans()
    monkeypatch.setattr(kinds.RoundPlanner, "plan", made.plan)
    return made


async def longest_lag(seconds: float) -> float:
    """Return how late the event loop comes to what is due."""
    longest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - due)
    return longest


async def test_plans_of_many_pods_hold_up_nothing_and_follow_one_another(plans: Plans) -> None:
    store = Store(a_named_round("first", suspend=True), a_named_round("second", suspend=True))
    async with lease_api() as (_, connection):
        lease = LeaderElection(connection, "ns", "me", time.monotonic)
        await lease.acquire()
        operator = Manager(cast(ObjectStore, store), lease, cast(PodClient, None))
        for number in range(PODS):
            operator.pod_changed(a_pod(f"p{number}", ip=None))
        made = [operator.reconciler(RoundPlanner, ObjectRef("ns", name, name), lambda _: None) for name in store.rounds]
        loops = [asyncio.create_task(operator.run(name, one)) for name, one in zip(store.rounds, made, strict=True)]
        lag = await longest_lag(2.5 * PLAN_SECONDS)
        await until(lambda: len(plans.order) >= 4)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    assert lag < PLAN_SECONDS / 2
    begun, ended = plans.order[:4:2], plans.order[1:4:2]
    assert begun == ended, "two rounds of a namespace were planned at once"
