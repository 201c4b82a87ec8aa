# SPDX-License-Identifier: Apache-2.0
"""Orders that are refused: a pod that may not be evicted, and pods that refuse to start, are not asked all the time."""

import asyncio
import logging
from typing import cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import EvictionRefused, StoreError, StoreForbidden
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.actions import MOST_REFUSED_SECONDS, REFUSED_SECONDS, PodActions, Refusals
from poc_operator.controller.event_loop import MOST_ORDERS, FewRequests
from poc_operator.controller.kinds import Sources
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import DeletePod, WorkEvent
from tests.unit.poc_operator.build import a_pod


class Evictions:
    """A store that refuses evictions, or does them, and counts them."""

    def __init__(self, error: StoreError | None) -> None:
        self.error = error
        self.asked = 0

    async def evict_pod(self, pod: PodView) -> None:
        """Refuse."""
        self.asked += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EvictionRefused("the budget"), "pod a is not evicted yet (the budget): it is tried again every 30 s"),
        (StoreForbidden("HTTP 403"), "pod a cannot be evicted (HTTP 403): install the chart with rbac.deletePods=true"),
    ],
)
async def test_a_pod_that_may_not_be_evicted_is_told_of_once_and_tried_again_later(
    error: StoreError, told: str
) -> None:
    seconds, events, store = 0.0, list[WorkEvent](), Evictions(error)
    log = ObjectLogger(logging.getLogger(__name__), PoCRound.KIND, ObjectRef("ns", "r", "uid"))
    orders = PodActions(
        sources=Sources(store=cast(ObjectStore, store)),
        clients=cast(PodClient, None),
        few=FewRequests(MOST_ORDERS),
        emit=events.append,
        wake=asyncio.Event(),
        log=log,
        clock=lambda: seconds,
    )
    for now in (0.0, 2.0, 29.0, 30.0, 31.0):
        seconds = now
        orders.begin(8000, [DeletePod(pod=a_pod("a"))])
        await orders.finish()
    assert store.asked == 2
    assert [event.message for event in events] == [told]


def test_a_pod_that_refuses_is_asked_again_less_and_less_often() -> None:
    seconds = 0.0
    refusals = Refusals(lambda: seconds)
    pauses = []
    for _ in range(6):
        refusals.add("a", "ModelUnsupported", "no")
        began = seconds
        while refusals.of("a") is not None:
            seconds += 1.0
        pauses.append(seconds - began)
    assert pauses == [REFUSED_SECONDS, 10.0, 20.0, 40.0, MOST_REFUSED_SECONDS, MOST_REFUSED_SECONDS]
    refusals.forget("a")
    refusals.add("a", "ModelUnsupported", "no")
    seconds += REFUSED_SECONDS
    assert refusals.of("a") is None


def test_only_pods_that_are_there_are_remembered() -> None:
    refusals = Refusals(lambda: 0.0)
    refusals.add("a", "ModelUnsupported", "no")
    refusals.add("b", "ModelUnsupported", "no")
    refusals.keep({"b"})
    assert (refusals.of("a"), refusals.of("b")) == (None, ("ModelUnsupported", "no"))
