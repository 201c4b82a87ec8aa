# SPDX-License-Identifier: Apache-2.0
"""A deletion is taken to its end by the loop that drives the object anyway, whatever fails meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Self, cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.clients.errors import ObjectGone, PodTimeout, StaleObject, StoreUnavailable, UnreadableObject
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller import failing_objects, manager, reconciler
from poc_operator.controller.kinds import RoundPlanner
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.manager import Manager, needs_reconciling
from poc_operator.planning.snapshot import WorkEvent
from tests.support.builders.forwarding import until
from tests.support.fakes.lease_api import lease_api
from tests.support.fakes.without_pods import WithoutPods
from tests.unit.poc_operator.build import UID, a_pod, a_round, a_slot, a_status, newborn, says
from tests.unit.poc_operator.controller.turns import note_turns
from vllm_poc.wire.answers import CommandResponse, PowState

DELETED = datetime(2026, 1, 1, tzinfo=UTC)


def a_deleted(round_: PoCRound, **metadata: Any) -> PoCRound:  # noqa: ANN401
    """The round as it is after ``kubectl delete``."""
    version = str(int(round_.metadata.resource_version) + 1)
    fields = {"deletion_timestamp": DELETED, "generation": 2, "resource_version": version, **metadata}
    return round_.model_copy(update={"metadata": round_.metadata.model_copy(update=fields)})


class Store(WithoutPods):
    """A store of one round; ``fault`` is raised by the next calls of a method."""

    def __init__(self, round_: PoCRound | None) -> None:
        self.round = round_
        self.faults: dict[str, Exception] = {}
        self.reads = 0
        self.deleted = asyncio.Event()

    async def get(self, resource: type, namespace: str, name: str) -> PoCRound | None:
        """Return the round."""
        self.reads += 1
        if "get" in self.faults:
            raise self.faults["get"]
        return self.round

    async def write_status(self, round_: PoCRound, status: RoundStatus) -> str:
        """Store the status."""
        if "write_status" in self.faults:
            raise self.faults["write_status"]
        if self.round is None or self.round.metadata.uid != round_.metadata.uid:
            raise StaleObject("Conflict")
        version = str(int(self.round.metadata.resource_version) + 1)
        metadata = self.round.metadata.model_copy(update={"resource_version": version})
        self.round = round_.model_copy(update={"metadata": metadata, "status": status})
        return version

    async def delete(self, round_: PoCRound) -> None:
        """Delete the round as it is known."""
        if self.round is None or self.round.metadata.resource_version != round_.metadata.resource_version:
            raise StaleObject("Conflict")
        self.deleted.set()

    async def write_conditions(self, *_: object, **__: object) -> None:
        """Have no place for them."""
        raise StoreUnavailable("away")


class Pods:
    """Every pod is the same: it computes the round until it is stopped, unless it does not ``answer``."""

    def __init__(self, state: PowState = PowState.GENERATING) -> None:
        self.state = state
        self.answers = True
        self.orders: list[str] = []
        self.polls = 0

    async def of(self, _: str) -> Self:
        """Be the client for all namespaces."""
        return self

    async def status(self, base: str, renewal: object = None) -> object:
        """Answer a poll."""
        self.polls += 1
        if not self.answers:
            raise PodTimeout("no answer")
        return says(self.state, next_index=5, delivered_index=5, delivered_valid=5).status

    async def start(self, base: str, request: object) -> CommandResponse | None:
        """Note the order."""
        self.orders.append("start")
        return None

    async def stop(self, base: str, round_id: str, **_: object) -> None:
        """Stop."""
        assert round_id == UID
        self.orders.append("stop")
        self.state = PowState.STOPPED

    async def close(self) -> None:
        """Nothing is open."""


class SlowPods(Pods):
    """They are idle, and compute once a start that was told is let through."""

    def __init__(self) -> None:
        super().__init__(PowState.IDLE)
        self.through = asyncio.Event()

    async def start(self, base: str, request: object) -> CommandResponse:
        """Note the order, and follow it late."""
        self.orders.append("start")
        await self.through.wait()
        self.state = PowState.GENERATING
        report = says(self.state)
        assert report.status is not None
        return CommandResponse(pow_status=report.status)


@asynccontextmanager
async def operator(store: Store, pods: Pods) -> AsyncIterator[Manager]:
    """An operator with one pod."""
    async with lease_api() as (_, connection):
        lease = LeaderElection(connection, "ns", "me", time.monotonic)
        await lease.acquire()
        made = Manager(cast(ObjectStore, store), lease, cast(PodClient, pods))
        made.pod_changed(a_pod("a"))
        yield made
        for loop in list(made._loops.values()):
            loop.cancel()
        await asyncio.sleep(0)


def body(round_: PoCRound, **metadata: object) -> Mapping[str, Any]:
    """The round as a watch tells of it."""
    told: dict[str, Any] = round_.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {**told, "metadata": {**told["metadata"], **metadata}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(failing_objects, "FIRST_PAUSE_SECONDS", 0.05)


RUNNING = newborn(a_round(a_status(a_slot("a")), stop=None))
PENDING = newborn(a_round())
FINISHED = RoundStatus(state=State.COMPLETE, observed_generation=1)


@pytest.mark.parametrize("known", [True, False], ids=["same process", "new process"])
async def test_the_pods_of_a_deleted_round_stop_before_it_is_released(known: bool) -> None:
    store, pods, events = Store(RUNNING), Pods(), list[WorkEvent]()
    async with operator(store, pods) as made:
        if known:
            made.work_changed(RoundPlanner, body(RUNNING), events.append)
            await until(lambda: pods.polls > 1)
        store.round = a_deleted(store.round or RUNNING)
        made.work_changed(RoundPlanner, body(store.round), events.append)
        assert not await made.released(UID, 0.0)
        assert await made.released(UID, 5.0)
        assert (pods.orders, pods.state) == (["stop"], PowState.STOPPED)
        assert store.round.status.outcome is not None
        assert (store.round.status.state, store.round.status.outcome.reason) == (State.FAILED, "Deleted")
        assert [event.warning for event in events if event.reason == "Deleted"] == [False]


async def test_a_deleted_round_that_waits_is_released_and_never_started() -> None:
    store, pods = Store(a_deleted(PENDING)), Pods(PowState.IDLE)
    async with operator(store, pods) as made:
        made.work_changed(RoundPlanner, body(store.round or PENDING), lambda _: None)
        assert await made.released(UID, 5.0)
        assert pods.orders == []


async def test_a_start_that_is_on_its_way_comes_before_the_stop_of_a_deleted_round() -> None:
    store, pods = Store(PENDING), SlowPods()
    async with operator(store, pods) as made:
        made.work_changed(RoundPlanner, body(PENDING), lambda _: None)
        await until(lambda: pods.orders == ["start"])
        store.round = a_deleted(store.round or PENDING)
        made.work_changed(RoundPlanner, body(store.round), lambda _: None)
        assert not await made.released(UID, 0.3)
        assert pods.orders == ["start"]
        pods.through.set()
        assert await made.released(UID, 5.0)
    assert (pods.orders, pods.state) == (["start", "stop"], PowState.STOPPED)


async def test_nothing_is_ordered_for_a_round_that_is_gone_when_it_is_recorded() -> None:
    store, pods = Store(PENDING), Pods(PowState.IDLE)
    store.faults["write_status"] = ObjectGone("there is none")
    async with operator(store, pods) as made:
        made.work_changed(RoundPlanner, body(PENDING), lambda _: None)
        assert await made.released(UID, 5.0)
        await asyncio.sleep(0.1)
        assert (pods.orders, pods.polls) == ([], 1)


async def test_another_object_of_the_name_is_not_taken_for_it() -> None:
    store, pods = Store(a_deleted(PENDING, uid="another", deletion_timestamp=None)), Pods(PowState.IDLE)
    async with operator(store, pods) as made:
        made.work_changed(RoundPlanner, body(PENDING), lambda _: None)
        assert await made.released(UID, 5.0)
        assert pods.orders == []


async def test_another_object_of_the_name_that_cannot_be_read_is_not_either() -> None:
    store, events = Store(None), list[WorkEvent]()
    store.faults["get"] = UnreadableObject("spec.nodes: Field required", body(PENDING, uid="another"))
    async with operator(store, Pods()) as made:
        made.work_changed(RoundPlanner, body(PENDING), events.append)
        assert await made.released(UID, 5.0)
    assert events == []


async def test_a_deleted_round_that_cannot_be_read_is_released() -> None:
    store = Store(None)
    store.faults["get"] = UnreadableObject("spec.nodes: Field required", body(a_deleted(PENDING)))
    async with operator(store, Pods()) as made:
        made.work_changed(RoundPlanner, body(a_deleted(PENDING)), lambda _: None)
        assert await made.released(UID, 5.0)


@pytest.mark.parametrize("trouble", ["the pod answers and does not stop", "the plan fails", "nothing can be written"])
async def test_nothing_holds_a_deleted_round_for_ever(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "RELEASE_SECONDS", 0.5)
    store, pods, events = Store(a_deleted(RUNNING)), Pods(), list[WorkEvent]()
    if trouble == "the pod answers and does not stop":
        monkeypatch.setattr(pods, "stop", Pods(PowState.IDLE).stop)
    elif trouble == "the plan fails":
        monkeypatch.setattr(RoundPlanner, "plan", lambda *_: 1 / 0)
    else:
        store.faults["write_status"] = StoreUnavailable("away")
    async with operator(store, pods) as made:
        made.work_changed(RoundPlanner, body(store.round or RUNNING), events.append)
        assert not await made.released(UID, 0.3)
        assert await made.released(UID, 5.0)
        reads = store.reads
        made.work_changed(RoundPlanner, body(store.round or RUNNING, resourceVersion="2"), events.append)
        assert await made.released(UID, 0.0), "whatever is written into it until kopf releases it"
        assert store.reads == reads
    left = [event for event in events if event.reason == "PodsLeft"]
    assert [event.warning for event in left] == [True]
    assert left[0].message.startswith("the object is deleted although 1 pod has not confirmed the stop")


async def test_who_is_not_waited_for_any_longer_is_told() -> None:
    """The pod is silent, and the plan's patience with it is over."""
    stopping = a_slot("a", state=SlotState.RUNNING)
    since = datetime.now(UTC) - timedelta(seconds=600)
    store = Store(a_deleted(newborn(a_round(a_status(stopping, stop_time=since), stop=None, suspend=True))))
    pods, events = Pods(), list[WorkEvent]()
    pods.answers = False
    async with operator(store, pods) as made:
        made.work_changed(RoundPlanner, body(store.round or RUNNING), events.append)
        assert await made.released(UID, 5.0)
    assert [event.reason for event in events] == ["Deleted", "PodsLeft"]


@pytest.mark.parametrize(
    ("round_", "metadata", "needed"),
    [
        (PENDING, {}, True),
        (RUNNING, {}, True),
        (a_deleted(RUNNING), {}, True),
        (a_round(FINISHED), {}, False),
        (a_round(FINISHED), {"generation": 2}, True),
        (a_round(FINISHED, ttlSecondsAfterFinished=5), {}, True),
        (a_deleted(a_round(FINISHED)), {}, False),
        (a_deleted(a_round(FINISHED, ttlSecondsAfterFinished=5)), {}, False),
        (a_round(RoundStatus(state=State.SUSPENDED, observed_generation=1), suspend=True), {}, True),
    ],
)
def test_which_objects_have_a_loop(round_: PoCRound, metadata: Mapping[str, object], needed: bool) -> None:
    assert needs_reconciling(body(round_, **metadata)) is needed


def finished(**spec: Any) -> PoCRound:  # noqa: ANN401
    """A round that was complete 100 s ago."""
    then = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=100)
    return newborn(a_round(FINISHED.model_copy(update={"completion_time": then}), **spec))


def at_version(version: str, round_: PoCRound) -> PoCRound:
    """The round as a later write has left it."""
    return round_.model_copy(update={"metadata": round_.metadata.model_copy(update={"resource_version": version})})


async def test_a_finished_round_takes_one_turn_until_its_time_to_live_has_passed() -> None:
    store = Store(finished(ttlSecondsAfterFinished=3600))
    async with operator(store, Pods()) as made:
        made.work_changed(RoundPlanner, body(finished(ttlSecondsAfterFinished=3600)), lambda _: None)
        turns = note_turns(made._reconcilers[UID])
        await asyncio.sleep(0.3)
        assert len(turns) == 1


async def test_a_finished_round_is_deleted_when_its_time_to_live_has_passed() -> None:
    store = Store(finished())
    async with operator(store, Pods()) as made:
        store.round = round_ = finished(ttlSecondsAfterFinished=106)  # in five to six seconds
        made.work_changed(RoundPlanner, body(round_), lambda _: None)
        turns = note_turns(made._reconcilers[UID])
        assert not await made.released(UID, 0.5), "it rests"
        assert not store.deleted.is_set()
        await asyncio.wait_for(store.deleted.wait(), 20)
    assert len(turns) <= 3, "one to see when it is due, and one then; the clocks may differ by a moment"


async def test_a_time_to_live_that_is_set_late_counts() -> None:
    store = Store(finished())
    async with operator(store, Pods()) as made:
        made.work_changed(RoundPlanner, body(finished(), generation=2), lambda _: None)
        assert await made.released(UID, 5.0), "it rests"
        store.round = finished(ttlSecondsAfterFinished=60)
        made.work_changed(RoundPlanner, body(store.round, generation=3), lambda _: None)
        await asyncio.wait_for(store.deleted.wait(), 20)


async def test_a_time_to_live_that_is_shortened_counts_at_once() -> None:
    round_ = finished(ttlSecondsAfterFinished=3600)
    store = Store(round_)
    async with operator(store, Pods()) as made:
        made.work_changed(RoundPlanner, body(round_), lambda _: None)
        assert not await made.released(UID, 0.3), "it rests"
        store.round = at_version("9", finished(ttlSecondsAfterFinished=60))
        shorter = body(store.round, generation=2, resourceVersion="9")
        made.work_changed(RoundPlanner, shorter, lambda _: None)
        await asyncio.wait_for(store.deleted.wait(), 20)


async def test_a_time_to_live_that_is_raised_in_the_last_moment_counts() -> None:
    """The watch has not told of it yet."""
    due = finished(ttlSecondsAfterFinished=60)
    store = Store(due)
    async with operator(store, Pods()) as made:
        store.round = at_version("9", finished(ttlSecondsAfterFinished=3600))
        made.work_changed(RoundPlanner, body(due), lambda _: None)
        turns = note_turns(made._reconcilers[UID])
        assert not await made.released(UID, 2.0)
        assert 1 <= len(turns) <= 4, "it was looked at, read anew, and rests"
        assert not store.deleted.is_set()
