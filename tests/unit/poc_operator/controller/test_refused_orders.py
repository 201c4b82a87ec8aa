# SPDX-License-Identifier: Apache-2.0
"""Orders that are refused: a pod that may not be evicted, and pods that refuse to start, are not asked all the time.
Whatever a pod's server answers to a start but yes is told. A pod that has yet to answer gets no other order.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from aiohttp import web

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import EvictionRefused, StoreError, StoreForbidden
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.actions import MOST_REFUSED_SECONDS, REFUSED_SECONDS, PodActions, Refusals
from poc_operator.controller.event_loop import MOST_ORDERS, FewRequests
from poc_operator.controller.kinds import Sources
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.snapshot import DeletePod, StartPod, StopPod, WorkEvent
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import a_pod, a_round, look, says

Answer = Callable[[web.Request], Awaitable[web.Response]]


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


def orders_of(
    clients: PodClient, *, store: Evictions, emit: Callable[[WorkEvent], None], clock: Callable[[], float]
) -> PodActions:
    """The orders of one round."""
    return PodActions(
        sources=Sources(store=cast(ObjectStore, store)),
        clients=clients,
        few=FewRequests(MOST_ORDERS),
        emit=emit,
        wake=asyncio.Event(),
        log=ObjectLogger(logging.getLogger(__name__), PoCRound.KIND, ObjectRef("ns", "r", "uid")),
        clock=clock,
    )


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
    orders = orders_of(cast(PodClient, None), store=store, emit=events.append, clock=lambda: seconds)
    for now in (0.0, 2.0, 29.0, 30.0, 31.0):
        seconds = now
        orders.begin(8000, [DeletePod(pod=a_pod("a"))])
        await orders.finish()
    assert store.asked == 2
    assert [event.message for event in events] == [told]


def always(status: int, text: str) -> Answer:
    """Answer whatever is asked with this. Without a status the connection is cut off."""

    async def answer(request: web.Request) -> web.Response:
        if not status and request.transport is not None:
            request.transport.abort()
        return web.Response(status=status or 200, text=text)

    return answer


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[int]:
    """Serve whatever is asked for with this; yield the port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        pytest.param(500, "Internal Server Error", "Internal Server Error", id="an error without an envelope"),
        pytest.param(400, '{"error": {"message": "no", "code": 400}}', "no", id="an error in the envelope of vLLM"),
        pytest.param(404, '{"detail": "Not Found"}', "the server has no PoC routes", id="a server without PoC"),
        pytest.param(502, "<html>", "<html>", id="a proxy"),
        pytest.param(200, "{}", "", id="an answer that nobody understands"),
        pytest.param(0, "", "", id="a connection that is cut off"),
    ],
)
async def test_a_start_that_fails_stands_in_the_slot_whatever_is_answered(status: int, text: str, told: str) -> None:
    round_, pod = a_round(), a_pod("a", ip="127.0.0.1")
    step = plan(look(round_, (pod, says())))
    (start,) = [action for action in step.actions if isinstance(action, StartPod)]
    async with answering(always(status, text)) as port, PodClient() as client:
        orders = orders_of(client, store=Evictions(None), emit=lambda _: None, clock=lambda: 0.0)
        orders.begin(port, [start])
        await orders.finish()
        report: PodReport = orders.with_answer(pod.uid, says())
    after = plan(look(round_.model_copy(update={"status": step.status}), (pod, report)))
    error = after.status.assignments[0].error or ""
    assert error.startswith(("pod a was told to start: ", "pod a refused to start: "))
    assert told in error
    assert [event.reason for event in after.events] == ["WorkLost"]


async def test_a_pod_gets_no_order_while_another_is_on_its_way() -> None:
    """A stop that overtakes a start stops nothing, and the pod computes on."""
    told, arrived, through = list[str](), asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        told.append(request.path.rsplit("/", 1)[-1])
        arrived.set()
        await through.wait()
        return web.json_response({"status": "OK"})

    round_, pod = a_round(), a_pod("a", ip="127.0.0.1")
    (start,) = [action for action in plan(look(round_, (pod, says()))).actions if isinstance(action, StartPod)]
    stop = StopPod(pod=pod, round_id=round_.id)
    async with answering(answer) as port, PodClient() as client:
        orders = orders_of(client, store=Evictions(None), emit=lambda _: None, clock=lambda: 0.0)
        orders.begin(port, [start])
        await arrived.wait()
        orders.begin(port, [stop])
        assert orders.with_answer(pod.uid, says()).in_flight
        through.set()
        await orders.finish()
        assert told == ["generate"]
        orders.begin(port, [stop])
        await orders.finish()
    assert told == ["generate", "stop"]


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
