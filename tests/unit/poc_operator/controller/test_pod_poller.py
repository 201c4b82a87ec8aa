# SPDX-License-Identifier: Apache-2.0
"""Polls of pods over HTTP, of which one takes requests and answers none."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from urllib.parse import parse_qsl

import pytest
from kubernetes.aio.client import ApiClient

from poc_operator.clients.errors import PodError, PodTimeout, PodUnreachable
from poc_operator.clients.pods import client as pod_client
from poc_operator.clients.pods.client import PodClient
from poc_operator.clients.pods.reference_pods import Status
from poc_operator.clients.pods.tokens import PodClients
from poc_operator.controller import event_loop, manager, observing
from poc_operator.controller.kinds import RoundPlanner
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.manager import Manager
from poc_operator.controller.observing import PodPoller
from poc_operator.leases import Renewal, recorded_end
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import AskPod, StopPod, named_nonces
from tests.support.builders.forwarding import until
from tests.support.fakes.lease_api import lease_api
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import Pod, running_pod
from tests.unit.poc_operator.build import UID, a_pod, a_round
from vllm_poc.wire.messages import LeaseRenewal

HOST, HUNG_HOST = "127.0.0.1", "127.0.0.2"
#: Of a poll, here. A busy machine may hold up a pod that answers for a second and more.
TIMEOUT = 2.0


class World:
    """A pod that answers, and one that does while ``hung`` is not set."""

    def __init__(self, client: PodClient) -> None:
        self.now = 0.0
        self.poller = PodPoller(client, lambda: self.now)
        self.pods = [a_pod("good", ip=HOST), a_pod("hung", ip=HUNG_HOST)]
        self.hung = asyncio.Event()
        self.round = a_round(port=free_port())
        self.failures: list[PodError] = []
        self.renewal: Renewal | None = None
        self.renewed: list[str | None] = []  # what the polls of the pod that may hang renewed

    async def poll(self) -> tuple[set[str], float]:
        """Poll once; return the uids of those that answered, and how long that took."""
        begin = monotonic()
        reports = await self.poller.poll(self.pods, self.round, self.failures.append, self.renewal)
        assert reports.keys() == {pod.uid for pod in self.pods}
        assert all((report.status is None) == (report.error is not None) for report in reports.values())
        return {uid for uid, report in reports.items() if report.status is not None}, monotonic() - begin

    @asynccontextmanager
    async def served(self) -> AsyncIterator["World"]:
        """Serve both pods."""
        async with running_pod() as pod:
            app, port = pod.app, self.round.spec.port

            async def hanging(scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
                if scope["type"] == "http":
                    self.renewed.append(dict(parse_qsl(scope["query_string"].decode())).get("renew_lease"))
                if self.hung.is_set():
                    await asyncio.sleep(5 * TIMEOUT)
                await app(scope, receive, send)

            async with serve(app, HOST, port), serve(hanging, HUNG_HOST, port):
                yield self
                await self.poller.close()


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with PodClient() as client, World(client).served() as world:
        monkeypatch.setattr(pod_client, "STATUS_SECONDS", 20 * TIMEOUT)
        assert len((await world.poll())[0]) == len(world.pods)  # a server's first answer can take longer than the rest
        world.renewed.clear()
        monkeypatch.setattr(pod_client, "STATUS_SECONDS", TIMEOUT)
        yield world


async def test_a_hung_pod_is_waited_for_once(world: World) -> None:
    assert (await world.poll())[0] == {"good", "hung"}
    world.hung.set()
    found, seconds = await world.poll()
    assert (found, seconds >= TIMEOUT) == ({"good"}, True)
    for _ in range(3):
        found, seconds = await world.poll()
        assert (found, seconds < TIMEOUT) == ({"good"}, True)
    assert {type(error) for error in world.failures} == {PodTimeout}


async def test_it_is_polled_again_once_it_answers(world: World) -> None:
    world.hung.set()
    await world.poll()
    world.hung.clear()
    await asyncio.sleep(TIMEOUT + 0.1)  # the request that was taken before
    deadline = monotonic() + 20
    while len((await world.poll())[0]) < len(world.pods):
        assert monotonic() < deadline
        await asyncio.sleep(0.05)
    assert {type(error) for error in world.failures} == {PodTimeout}


async def test_one_that_changed_is_polled_at_once(world: World) -> None:
    """As when its container has started anew, and is ready."""
    world.hung.set()
    await world.poll()
    world.hung.clear()
    world.pods[1] = replace(world.pods[1], waiting_for="nothing")
    assert len((await world.poll())[0]) == len(world.pods)


async def test_a_refused_connection_is_no_silence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs no time, and whoever comes up is to be seen at once."""
    monkeypatch.setattr(pod_client, "STATUS_SECONDS", 10 * TIMEOUT)  # nobody hangs here
    world.pods[1] = a_pod("starting", ip="127.0.0.3")
    assert len((await world.poll())[0]) == 1
    pod: Pod
    async with running_pod() as pod, serve(pod.app, "127.0.0.3", world.round.spec.port):
        assert len((await world.poll())[0]) == len(world.pods)


async def test_a_pod_that_nobody_asks_for_is_forgotten(world: World) -> None:
    world.hung.set()
    await world.poll()
    silent = world.pods.pop()
    world.now += observing.SILENT_SECONDS + 1
    await world.poll()
    world.hung.clear()
    world.pods.append(silent)
    assert len((await world.poll())[0]) == len(world.pods)


def a_renewal(uid: str, *, recorded_before: timedelta = timedelta()) -> Renewal:
    end = recorded_end(None, datetime.now(UTC) - recorded_before, 600)
    return Renewal(round_id="r1", uids={uid}, seconds=600, end=end)


@pytest.mark.parametrize(
    ("renewal", "renewed"),
    [
        # Made when the test begins, since it is good for minutes only.
        pytest.param(partial(a_renewal, "hung"), "r1", id="a pod that is to compute on"),
        pytest.param(partial(a_renewal, "good"), None, id="another one"),
        pytest.param(lambda: None, None, id="nobody"),
        pytest.param(partial(a_renewal, "hung", recorded_before=timedelta(hours=1)), None, id="recorded too long ago"),
    ],
)
async def test_a_poll_renews_what_it_may(
    world: World, renewal: Callable[[], Renewal | None], renewed: str | None
) -> None:
    world.renewal = renewal()
    await world.poll()
    assert world.renewed == [renewed]


async def test_a_poll_beside_the_turns_renews_nothing(world: World) -> None:
    """Nobody knows when it is sent: by then it may be recorded that the lease has run out."""
    world.renewal = a_renewal("hung")
    world.hung.set()
    await world.poll()
    world.hung.clear()
    async with asyncio.timeout(20):
        while len(world.renewed) < 2:  # noqa: ASYNC110 - the probe arrives, and nobody sets an event
            await asyncio.sleep(0.01)
    assert world.renewed == ["r1", None]


class Slow:
    """A pod that answers polls, and is slow to answer orders and asks."""

    def __init__(self, poll: Callable[..., Awaitable[None]]) -> None:
        self._poll = poll
        self.held = False

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        if scope["type"] == "http" and scope["path"].endswith(("/generate", "/stop")):
            self.held = True
            await asyncio.sleep(5 * TIMEOUT)
        await self._poll(scope, receive, send)


@pytest.mark.parametrize(
    "action",
    [
        lambda pod: AskPod(pod=pod, key="check 1", request=named_nonces(a_round().spec, [1])),
        lambda pod: StopPod(pod=pod, round_id=UID),
    ],
    ids=["asks", "orders"],
)
async def test_no_ask_and_no_order_takes_the_connections_of_the_polls(
    action: Callable[[PodView], AskPod | StopPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison of many pods, or their stop, must not make healthy pods look silent."""
    monkeypatch.setattr(pod_client, "STATUS_SECONDS", TIMEOUT)
    monkeypatch.setattr(manager, "PodClients", partial(PodClients, connections=1))
    async with lease_api() as (_, connection), running_pod() as pod:
        monkeypatch.setattr(manager, "connect", partial(connected, connection))
        operator = await Manager.create(None, None, None)
        await operator.lease.acquire()
        round_, slow = a_round(port=free_port()), Slow(pod.app)
        loop = operator.reconciler(RoundPlanner, ObjectRef("ns", "r", UID), lambda _: None)
        async with serve(slow, HOST, round_.spec.port):
            failures: list[PodError] = []
            try:
                ordered = action(a_pod("a", ip=HOST))
                if isinstance(ordered, AskPod):
                    loop._asks.keep(round_.spec.port, [ordered])
                else:
                    loop._actions.begin(round_.spec.port, [ordered])
                await until(lambda: slow.held)
                reports = await operator._poller.poll([a_pod("b", ip=HOST)], round_, failures.append)
            finally:
                await loop.close()
                await operator.close()
        assert (reports["b"].error, failures) == (None, [])


async def connected(api: ApiClient) -> tuple[ApiClient, str]:
    """Connect to an API server as an operator does in its pod."""
    return api, "ns"


async def test_few_polls_at_a_time_may_be_answered_at_any_moment() -> None:
    """Answers that come together hold up the event loop for as long as all of them take."""
    now, most = 0, 0

    class Client(PodClient):
        async def status(self, base: str, renewal: LeaseRenewal | None = None) -> Status:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1
            raise PodUnreachable(f"nobody listens at {base}, {renewal}")

    rounds = [a_round(port=free_port()) for _ in range(2)]
    async with Client() as client:
        poller = PodPoller(client, monotonic)
        found = await asyncio.gather(*(poller.poll(many(1000), round_, lambda _: None) for round_ in rounds))
    assert [len(reports) for reports in found] == [1000, 1000]
    assert most == event_loop.MOST_POLLS


async def test_pods_that_do_not_answer_hold_up_no_others() -> None:
    begun, go_on = 0, asyncio.Event()

    class Client(PodClient):
        async def status(self, base: str, renewal: LeaseRenewal | None = None) -> Status:
            nonlocal begun
            begun += 1
            await go_on.wait()
            raise PodUnreachable(f"nobody listens at {base}, {renewal}")

    pods = 3 * event_loop.MOST_POLLS
    async with Client() as client:
        poller = PodPoller(client, monotonic)
        polling = asyncio.create_task(poller.poll(many(pods), a_round(port=free_port()), lambda _: None))
        await until(lambda: begun == pods)  # long before any of them has an answer
        go_on.set()
        assert len(await polling) == pods


def many(count: int) -> list[PodView]:
    return [a_pod(f"p{number}", ip=f"127.1.{number // 250}.{number % 250 + 1}") for number in range(count)]
