# SPDX-License-Identifier: Apache-2.0
"""The loop around each round: it turns only while the lease is held, and at once when there is news for its round."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from kubernetes.aio.client import ApiClient

from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import State
from poc_operator.clients.errors import StoreForbidden, StoreUnavailable
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller import manager, reconciler
from poc_operator.controller.kinds import RoundPlanner
from poc_operator.controller.leader_election import RENEW_SECONDS, LeaderElection
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.manager import Manager
from poc_operator.observed import PodView
from tests.support.builders.forwarding import until
from tests.support.checks.cancellation import TURNS, ends_cancelled
from tests.support.fakes.lease_api import UID as LEASE_UID
from tests.support.fakes.lease_api import lease_api
from tests.support.fakes.without_pods import WithoutPods
from tests.unit.poc_operator.build import NOW, UID, a_pod, a_round, a_slot, a_status, newborn
from tests.unit.poc_operator.controller.turns import note_turns


class GoneRound:
    """A store whose round does not exist, which counts how often it is asked."""

    def __init__(self) -> None:
        self.reads = 0
        self.turns: list[float] = []

    async def get(self, resource: type, namespace: str, name: str) -> PoCRound | None:
        """Return nothing."""
        self.reads += 1
        return None


async def test_rounds_stand_still_without_the_lease() -> None:
    async with lease_api() as (_, connection), PodClient() as client:
        store, lease = GoneRound(), LeaderElection(connection, "ns", "me", time.monotonic)
        operator = Manager(cast(ObjectStore, store), lease, client)
        reconciler = operator.reconciler(RoundPlanner, ObjectRef("ns", "r", UID), lambda _: None)
        assert await operator._reconcile(reconciler) is True
        assert store.reads == 0
        await lease.acquire()
        assert await operator._reconcile(reconciler) is False
        assert store.reads == 1


class StandingRound(WithoutPods, GoneRound):
    """A store whose round stays as it is."""

    async def get(self, resource: type, namespace: str, name: str) -> PoCRound | None:
        """Return the round."""
        self.reads += 1
        return newborn(a_round())

    async def write_status(self, work: PoCRound, status: RoundStatus) -> None:
        """Keep the round as it is."""


@asynccontextmanager
async def driving(store: GoneRound) -> AsyncIterator[tuple[Manager, "asyncio.Task[None]"]]:
    """Drive the round by a task; its first look is over."""
    async with lease_api() as (_, connection), PodClient() as client:
        lease = LeaderElection(connection, "ns", "me", time.monotonic)
        await lease.acquire()
        operator = Manager(cast(ObjectStore, store), lease, client)
        made = operator.reconciler(RoundPlanner, ObjectRef("ns", "r", UID), lambda _: None)
        store.turns = note_turns(made)
        loop = asyncio.create_task(operator.run(UID, made))
        while not store.reads:  # noqa: ASYNC110 - the store is no event
            await asyncio.sleep(0.001)
        yield operator, loop
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


News = Callable[[Manager], None]


def told(operator: Manager, uid: str, generation: int, **fields: object) -> None:
    """Let the watch tell of a round."""
    metadata = {"namespace": "ns", "name": "r", "uid": uid, "generation": generation, "resourceVersion": "1"}
    operator.work_changed(RoundPlanner, {"metadata": metadata, **fields}, lambda _: None)


async def turns_are(store: GoneRound, count: int) -> None:
    """Wait until there were so many turns, and see that no other follows."""
    await until(lambda: len(store.turns) >= count)
    await asyncio.sleep(0.1)
    assert len(store.turns) == count


@pytest.mark.parametrize(
    ("news", "looks"),
    [
        (lambda operator: told(operator, UID, 2), 1),
        (lambda operator: told(operator, UID, 1), 0),
        (lambda operator: operator.pod_changed(a_pod("a")), 1),
        (lambda operator: operator.pod_changed(a_pod("a", labels={})), 0),
        (lambda operator: operator.pod_changed(a_pod("a", namespace="other")), 0),
    ],
    ids=["spec", "own status", "own pod", "another pod", "pod of another namespace"],
)
async def test_a_round_is_looked_at_when_there_is_news_for_it(news: News, looks: int) -> None:
    store = StandingRound()
    async with driving(store) as (operator, _):
        news(operator)
        await turns_are(store, 1 + looks)


@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancellation_is_not_lost_to_news_that_come_with_it(turns: int) -> None:
    async with driving(StandingRound()) as (operator, loop):
        await ends_cancelled(loop, lambda: told(operator, UID, 2), turns)


class SuspendedRound(StandingRound):
    """A store whose round is suspended."""

    async def get(self, resource: type, namespace: str, name: str) -> PoCRound | None:
        """Return the round."""
        self.reads += 1
        return newborn(a_round(RoundStatus(state=State.SUSPENDED, observed_generation=1, stop_time=NOW), suspend=True))


async def test_a_suspended_round_waits_for_another_spec_alone() -> None:
    store = SuspendedRound()
    async with driving(store) as (operator, _):
        operator.pod_changed(a_pod("a"))
        told(operator, UID, 1)
        await turns_are(store, 1)
        told(operator, UID, 2)
        await turns_are(store, 2)


async def test_a_deleted_pod_is_news_for_its_round() -> None:
    store = StandingRound()
    async with driving(store) as (operator, _):
        operator.pod_changed(a_pod("a"))
        await turns_are(store, 2)
        operator.pod_deleted(a_pod("a"))
        operator.pod_deleted(a_pod("unknown"))
        await turns_are(store, 3)


class RunningRound(GoneRound):
    """A store of a round that pod a computes; ``there`` are the pods that exist."""

    def __init__(self) -> None:
        super().__init__()
        self.there = [a_pod("a")]
        self.lists = 0
        self.written = asyncio.Event()
        self.attempts = 0

    async def get(self, resource: type, namespace: str, name: str) -> PoCRound | None:
        """Return the round."""
        self.reads += 1
        return newborn(a_round(a_status(a_slot("a")), stop=None))

    async def list_pods(self, namespace: str, selector: object) -> list[PodView]:
        """List the pods that are selected."""
        self.lists += 1
        return [pod for pod in self.there if pod.labels]

    async def pod(self, namespace: str, name: str) -> PodView | None:
        """Return the pod of this name."""
        return next((pod for pod in self.there if pod.name == name), None)

    async def write_status(self, work: PoCRound, status: RoundStatus) -> None:
        """Remember how often the slot was begun."""
        self.attempts = status.assignments[0].attempts
        self.written.set()


@pytest.mark.parametrize(
    "successors", [pytest.param([], id="none"), pytest.param([a_pod("a", uid="another")], id="another of its name")]
)
@pytest.mark.parametrize(
    "pod", [pytest.param(a_pod("a"), id="selected"), pytest.param(a_pod("a", labels={}), id="not selected any more")]
)
async def test_a_pod_that_the_watch_has_yet_to_tell_of_is_not_lost(
    pod: PodView, successors: list[PodView], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process may come to its rounds before it comes to their pods."""
    monkeypatch.setattr(reconciler, "UNTOLD_SECONDS", 0.02)
    store = RunningRound()
    store.there = [pod]
    async with driving(store):
        await until(lambda: store.lists > 2)
        assert not store.written.is_set()
        store.there = successors
        async with asyncio.timeout(20):
            await store.written.wait()
        assert store.attempts == 2


async def test_a_pod_that_the_watch_tells_of_later_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "UNTOLD_SECONDS", 0.02)
    store = RunningRound()
    async with driving(store) as (operator, _):
        await until(lambda: store.lists > 2)
        operator.pod_changed(a_pod("a", ip=None))
        async with asyncio.timeout(20):
            await store.written.wait()
        assert store.attempts == 1
        lists = store.lists
        told(operator, UID, 2)
        await until(lambda: store.reads > 1)
        assert store.lists == lists, "it was waited for once"


class NewRound(StandingRound):
    """A store of a round without slots; ``there`` are the pods that its selector matches."""

    def __init__(self) -> None:
        super().__init__()
        self.there = [a_pod("a"), a_pod("b")]
        self.lists = 0
        self.statuses: list[RoundStatus] = []

    async def list_pods(self, namespace: str, selector: object) -> list[PodView]:
        """List the pods that are selected."""
        self.lists += 1
        return self.there

    async def write_status(self, work: PoCRound, status: RoundStatus) -> None:
        """Remember what is recorded."""
        self.statuses.append(status)


async def test_a_round_begins_when_the_watch_has_told_of_all_its_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are fixed once: a pod that the watch tells of a moment later would have none."""
    monkeypatch.setattr(reconciler, "UNTOLD_SECONDS", 0.02)
    store = NewRound()
    async with driving(store) as (operator, _):
        operator.pod_changed(a_pod("a", ip=None))
        await until(lambda: store.lists > 2)
        assert store.statuses == []
        operator.pod_changed(a_pod("b", ip=None))
        await until(lambda: bool(store.statuses))
        lists = store.lists
        told(operator, UID, 2)
        await until(lambda: store.reads > 1)
        assert store.lists == lists, "they were waited for once"


@pytest.mark.parametrize(
    ("pods", "turn", "rate", "least", "most"),
    [
        pytest.param(0, 0, 4, 8, 100, id="little to do"),
        pytest.param(2, 0, 4, 2, 4, id="many pods"),
        pytest.param(0, 2, 4, 2, 4, id="many objects"),
        pytest.param(2, 0, 0.001, 1, 3, id="too many"),
    ],
)
async def test_the_more_there_is_to_do_the_longer_turns_wait_within_bounds(
    pods: int, turn: int, rate: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(reconciler, "POLLS_PER_TURN", turn)
    monkeypatch.setattr(manager, "POLLS_PER_SECOND", rate)
    monkeypatch.setattr(manager, "MOST_TURN_SECONDS", 0.7)
    store = StandingRound()
    async with driving(store) as (operator, _):
        for number in range(pods):
            operator.pod_changed(a_pod(f"p{number}", ip="127.0.0.3"))
        await asyncio.sleep(0.2)
        begun, began = len(store.turns), time.monotonic()
        await asyncio.sleep(1.5)
        slept = time.monotonic() - began  # longer on a busy machine
        assert least <= len(store.turns) - begun <= most * slept / 1.5


class Naming:
    """A store that tells the UID of kube-system, after these failures."""

    def __init__(self, *answers: str | Exception | None) -> None:
        self.answers = list(answers)

    async def namespace_uid(self, name: str) -> str | None:
        """Tell it, or fail."""
        assert name == "kube-system"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "owners"),
    [
        (["cluster-uid"], ["cluster-uid", "lease-uid"]),
        ([StoreForbidden("HTTP 403: Forbidden")], ["lease-uid"]),
        ([None], ["lease-uid"]),
        ([StoreUnavailable("away"), StoreUnavailable("away"), "cluster-uid"], ["cluster-uid", "lease-uid"]),
    ],
    ids=["cluster", "roles alone", "no kube-system", "away at first"],
)
async def test_orders_are_given_in_the_name_of_the_cluster(
    answers: list[str | Exception | None], owners: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator with other rights than the one before must still know its work as ours."""
    monkeypatch.setattr(manager, "POLL_SECONDS", 0.01)
    async with lease_api() as (_, connection), PodClient() as client:
        lease = LeaderElection(connection, "ns", "me", time.monotonic)
        operator = Manager(cast(ObjectStore, Naming(*answers)), lease, client)
        await lease.acquire()
        await operator.identify()
        assert (operator._sources.owner, operator.reaper.owners) == (owners[0], owners)


class Serving:
    """A store whose API server serves the kinds after these answers."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self.answers = list(answers)

    async def unserved(self, resources: Iterable[type[Resource]]) -> list[str]:
        """Tell what is missing, or fail."""
        assert {kind.KIND.plural for kind in resources} >= {"pocrounds", "pocfleets"}
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_the_operator_waits_for_its_kinds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """kopf never watches a kind that an API server which has just started did not serve yet."""
    monkeypatch.setattr(manager, "POLL_SECONDS", 0.01)
    async with lease_api() as (_, connection), PodClient() as client:
        store = Serving(StoreUnavailable("away"), ["pocrounds.poc.gonka.ai"], [])
        operator = Manager(cast(ObjectStore, store), LeaderElection(connection, "ns", "me", time.monotonic), client)
        await asyncio.wait_for(operator.wait_for_kinds(), 30)
    assert store.answers == []
    assert "does not serve pocrounds.poc.gonka.ai yet" in caplog.text


async def test_the_lease_has_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rounds that start together wait for each other's, and the operator would lose the lease meanwhile."""
    async with lease_api() as (server, connection):

        async def connected() -> tuple[ApiClient, str]:
            return ApiClient(connection.configuration), "ns"

        monkeypatch.setattr(manager, "connect", connected)
        operator = await Manager.create(None, None, None)
        server.others_hang = True
        most = connection.configuration.connection_pool_maxsize
        waiting = [asyncio.create_task(operator._store.namespace_uid("kube-system")) for _ in range(most)]
        await until(lambda: server.hanging == most)
        await asyncio.wait_for(operator.lease.acquire(), RENEW_SECONDS / 2)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await operator.close()


async def test_the_next_process_knows_the_lease_by_the_same_name() -> None:
    async with lease_api() as (_, connection):
        first = LeaderElection(connection, "ns", "me", time.monotonic)
        await first.acquire()
        await first.release()
        second = LeaderElection(connection, "ns", "you", time.monotonic)
        await second.acquire()
        assert first.uid == second.uid == LEASE_UID


async def test_a_lease_that_nobody_renews_and_a_late_loop_are_for_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    async with lease_api() as (_, connection), PodClient() as client:
        lease = LeaderElection(connection, "ns", "me", lambda: now[0])
        operator = Manager(cast(ObjectStore, GoneRound()), lease, client)
        await lease.acquire()
        assert operator.health_findings() == []
        now[0] += 11
        assert operator.health_findings() == ["the Lease is not renewed"]
        await lease.acquire()
        monkeypatch.setattr(manager, "MOST_LAG_SECONDS", 0.1)
        measuring = asyncio.create_task(operator.measure_lag())
        await asyncio.sleep(0)
        time.sleep(0.8)  # noqa: ASYNC251 - what is measured
        await until(lambda: bool(operator.health_findings()))
        assert operator.health_findings()[0].startswith("the event loop is 0.")
        assert b'poc_operator_loop_lag_seconds_bucket{le="0.1"} 0.0' in operator.metrics.text()
        await until(lambda: not operator.health_findings())
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


async def test_another_round_of_the_same_name_is_not_reconciled() -> None:
    """It has a loop of its own, and this one's round is gone."""
    store = RunningRound()
    async with lease_api() as (_, connection), PodClient() as client:
        lease = LeaderElection(connection, "ns", "me", time.monotonic)
        await lease.acquire()
        operator = Manager(cast(ObjectStore, store), lease, client)
        before = operator.reconciler(RoundPlanner, ObjectRef("ns", "r", "uid of one before"), lambda _: None)
        assert await operator._reconcile(before) is False
        assert (store.reads, store.written.is_set()) == (1, False)


class OddLists(GoneRound):
    """A store in which an object stands that nobody foresaw."""

    async def list_bodies(self, resource: type, namespaces: Collection[str]) -> list[PoCRound]:
        """Fail on it."""
        self.reads += 1
        raise LookupError("an unknown word")


async def test_the_watches_are_compared_again_whatever_a_list_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that ends unseen would leave the process blind."""
    monkeypatch.setattr(manager, "CHECK_SECONDS", 0.01)
    store = OddLists()
    async with lease_api() as (_, connection), PodClient() as client:
        operator = Manager(cast(ObjectStore, store), LeaderElection(connection, "ns", "me", time.monotonic), client)
        check = asyncio.create_task(operator.check_watches([]))
        await until(lambda: store.reads > 1 or check.done())
        assert not check.done()
        check.cancel()
