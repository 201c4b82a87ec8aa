# SPDX-License-Identifier: Apache-2.0
"""A pod that refuses a start for which other work was stopped: that work is spared for a while."""

import asyncio
import logging
from typing import Self, cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import PodRefused
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.actions import PodActions
from poc_operator.controller.event_loop import MOST_ORDERS, FewRequests
from poc_operator.controller.kinds import Sources
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import StopPod
from tests.unit.poc_operator.controller.test_orders_without_lease import POD, a_start


class RefusingPods:
    """Clients of pods that stop what they are told, and refuse to start."""

    def __init__(self) -> None:
        self.preempted_by: list[str | None] = []

    async def of(self, _: str) -> Self:
        """Be the client of all namespaces."""
        return self

    async def start(self, *_: object) -> None:
        """Refuse."""
        raise PodRefused("EngineNotReady", "not now")

    async def stop(self, *_: object, preempted_by: str | None) -> None:
        """Note for whom."""
        self.preempted_by.append(preempted_by)


@pytest.mark.parametrize("taker", ["ns/first", None])
@pytest.mark.parametrize("ends_between", [False, True])
async def test_it_counts_if_work_was_stopped_for_the_start(taker: str | None, ends_between: bool) -> None:
    pods = RefusingPods()
    actions = PodActions(
        sources=Sources(store=cast(ObjectStore, pods)),
        clients=cast(PodClient, pods),
        few=FewRequests(MOST_ORDERS),
        emit=lambda _: None,
        wake=asyncio.Event(),
        log=ObjectLogger(logging.getLogger(__name__), PoCRound.KIND, ObjectRef("ns", "first", "uid")),
        clock=lambda: 0.0,
    )
    actions.begin(8000, [StopPod(pod=POD, round_id="older", preempted_by=taker)])
    await actions.finish()
    if ends_between:
        actions.forget_refusals()
    actions.begin(8000, [a_start()])
    await actions.finish()
    report = actions.with_answer(POD.uid, PodReport())
    assert pods.preempted_by == [taker]
    assert report.refusal == ("EngineNotReady", "not now")
    assert report.spared is (taker is not None and not ends_between)
