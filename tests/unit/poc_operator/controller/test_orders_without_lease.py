# SPDX-License-Identifier: Apache-2.0
"""A process that stood still between a plan and its orders sends none once its Lease has run out."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Self, cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.actions import PodActions, PodAsks
from poc_operator.controller.event_loop import MOST_ORDERS, FewRequests
from poc_operator.controller.kinds import Sources
from poc_operator.controller.leader_election import RENEW_SECONDS, LeaderElection
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import Action, AskPod, DeletePod, ExtendPod, StartPod, StopPod
from poc_operator.rounds.plan import plan
from tests.support.fakes.lease_api import lease_api
from tests.unit.poc_operator.build import a_pod, a_round, look, says
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import ExtendRequest

POD = a_pod("a")


@dataclass
class Pods:
    """Clients and store that note what is sent; the process stands still while it reads the pods' token."""

    stands_still: float
    seconds: float = 0.0
    sent: list[str] = field(default_factory=list)

    async def of(self, _: str) -> Self:
        """Be the client, a while later."""
        self.seconds += self.stands_still
        return self

    async def start(self, *_: object) -> None:
        """Note it."""
        self.sent.append("start")

    async def extend(self, *_: object) -> None:
        """Note it."""
        self.sent.append("extend")

    async def stop(self, *_: object, **__: object) -> None:
        """Note it."""
        self.sent.append("stop")

    async def generate(self, *_: object) -> None:
        """Note it."""
        self.sent.append("generate")

    async def evict_pod(self, _: PodView) -> None:
        """Note it."""
        self.sent.append("evict")


def a_start() -> StartPod:
    """What a plan orders first."""
    return next(action for action in plan(look(a_round(), (POD, says()))).actions if isinstance(action, StartPod))


ORDERS: dict[str, Action] = {
    "start": a_start(),
    "extend": ExtendPod(pod=POD, request=ExtendRequest(round_id="r", end_index=1)),
    "stop": StopPod(pod=POD, round_id=None),
    "evict": DeletePod(pod=POD),
    "generate": AskPod(pod=POD, key="k", request=cast(GenerateRequest, None)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stands_still", [0.0, RENEW_SECONDS + 6])
async def test_an_order_is_sent_only_while_the_lease_is_held(order: str, stands_still: float) -> None:
    pods = Pods(stands_still)
    async with lease_api() as (_, connection):
        lease = LeaderElection(connection, "ns", "me", lambda: pods.seconds)
        await lease.acquire()
        sources = Sources(store=cast(ObjectStore, pods), may_act=lambda: lease.held)
        actions = PodActions(
            sources=sources,
            clients=cast(PodClient, pods),
            few=FewRequests(MOST_ORDERS),
            emit=lambda _: None,
            wake=asyncio.Event(),
            log=ObjectLogger(logging.getLogger(__name__), PoCRound.KIND, ObjectRef("ns", "r", "uid")),
        )
        asks = PodAsks(clients=cast(PodClient, pods), wake=asyncio.Event(), may_act=sources.may_act)
        action = ORDERS[order]
        if isinstance(action, AskPod):
            asks.keep(8000, [action])
            await asyncio.gather(*asks._tasks.values())
        else:
            if order == "evict":
                pods.seconds += stands_still  # it needs no token
            actions.begin(8000, [action])
            await actions.finish()
    assert pods.sent == ([] if stands_still else [order])
