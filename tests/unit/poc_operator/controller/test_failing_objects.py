# SPDX-License-Identifier: Apache-2.0
"""A round on which the operator fails tells so itself, is tried again less and less often, and harms no other."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, cast

import pytest

from poc_operator.apis.v1alpha1.conditions import Condition
from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.schema import MESSAGE_BYTES
from poc_operator.clients.errors import StoreUnavailable, UnreadableObject
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller import failing_objects, manager
from poc_operator.controller.failing_objects import internal_error
from poc_operator.controller.kinds import RoundPlanner
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.manager import Manager
from poc_operator.controller.reconciler import Reconciler
from poc_operator.planning.snapshot import WorkEvent
from tests.support.builders.forwarding import until
from tests.support.checks.cancellation import TURNS, ends_cancelled
from tests.support.fakes.lease_api import lease_api
from tests.support.fakes.without_pods import WithoutPods
from tests.unit.poc_operator import build
from tests.unit.poc_operator.build import NOW, a_pod, newborn, says
from tests.unit.poc_operator.controller.turns import note_turns

#: What the schema refuses, and what a plan must survive all the same, should it ever get one.
POISON: Mapping[str, Mapping[str, Any]] = {
    "port beyond 65535": {"callback_url": "http://h:99999/x"},
    "host that is none": {"callback_url": "http://[zz]/"},
    "target beyond all": {"r_target": "3"},
    "empty hash": {"block_hash": ""},
    "no batch": {"batch_size": 0},
}


def a_round(**spec: Any) -> PoCRound:  # noqa: ANN401
    """A round that was created now, with these fields of its spec as they are, unchecked."""
    made = newborn(build.a_round())
    return made.model_copy(update={"spec": made.spec.model_copy(update=spec)})


def body(uid: str, *, generation: int) -> Mapping[str, Any]:
    """What the watch tells of a round."""
    return {"metadata": {"namespace": "ns", "name": uid, "uid": uid, "generation": generation, "resourceVersion": "1"}}


def with_uid(round_: PoCRound, uid: str) -> PoCRound:
    """The round as another object."""
    return round_.model_copy(update={"metadata": round_.metadata.model_copy(update={"uid": uid})})


#: Labels of the good round's pod: rounds that share pods queue for them.
GOOD = {"for": "good"}
BODY: Mapping[str, Any] = {"metadata": {"namespace": "ns", "name": "bad", "generation": 1}}


class Rounds(WithoutPods):
    """A store of a bad round and a good one, each with its own pod. ``fault`` is raised when the bad one is read."""

    def __init__(self, bad: PoCRound, fault: Exception | None = None) -> None:
        good = a_round(selector=LabelSelector(match_labels=GOOD))
        self.rounds = {name: with_uid(made, name) for name, made in (("bad", bad), ("good", good))}
        self.fault = fault
        self.turns: dict[str, list[float]] = {"bad": [], "good": []}
        self.conditions: dict[str, tuple[str, str, str]] = {}
        self.reported = asyncio.Event()

    async def get(self, resource: type, namespace: str, name: str) -> PoCRound | None:
        """Return one of them."""
        if name == "bad" and self.fault is not None:
            raise self.fault
        return self.rounds[name]

    def counting(self, operator: Manager, name: str, events: list[WorkEvent]) -> Reconciler[PoCRound]:
        """Return a reconciler for one of them that notes its turns."""
        made = operator.reconciler(RoundPlanner, ObjectRef("ns", name, name), events.append)
        self.turns[name] = note_turns(made)
        return made

    async def write_status(self, round_: PoCRound, status: RoundStatus) -> None:
        """Store the status of the good one, which is planned first."""
        name = next(name for name, known in self.rounds.items() if known.spec == round_.spec)
        self.rounds[name] = round_.model_copy(update={"status": status})

    async def write_conditions(
        self,
        resource: type,
        namespace: str,
        name: str,
        conditions: Sequence[Condition],
        *,
        message: str,
        degraded: str,
    ) -> None:
        """Store conditions."""
        self.conditions |= {found.type: (name, found.status, found.reason) for found in conditions}
        self.reported.set()


class Answering:
    """A pod that is idle."""

    async def of(self, _: str) -> Self:
        """Be the client for all namespaces."""
        return self

    async def status(self, base: str, renewal: object = None) -> object:
        """Answer a poll."""
        return says().status

    async def start(self, base: str, request: object) -> object:
        """Take a start and never answer."""
        return await asyncio.Event().wait()


@asynccontextmanager
async def driven(rounds: Rounds, events: list[WorkEvent]) -> AsyncIterator[Manager]:
    """An operator that reconciles both."""
    async with lease_api() as (_, connection):
        lease = LeaderElection(connection, "ns", "me", time.monotonic)
        await lease.acquire()
        operator = Manager(cast(ObjectStore, rounds), lease, cast(PodClient, Answering()))
        operator.pod_changed(a_pod("a"))
        operator.pod_changed(a_pod("b", labels=GOOD))
        loops = [
            asyncio.create_task(operator.run(name, rounds.counting(operator, name, events))) for name in rounds.rounds
        ]
        yield operator
        assert not any(loop.done() for loop in loops)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(failing_objects, "FIRST_PAUSE_SECONDS", 0.1)


async def failed(rounds: Rounds) -> list[WorkEvent]:
    """Drive both until the bad one has told, and a while on; return the bad one's Events."""
    events = list[WorkEvent]()
    async with driven(rounds, events) as operator:
        await asyncio.wait_for(rounds.reported.wait(), 20)
        assert rounds.conditions == {
            "Progressing": ("bad", "False", "InternalError"),
            "Degraded": ("bad", "True", "InternalError"),
        }
        await asyncio.sleep(1.0)
        assert operator.health_findings() == []
    pauses = [after - before for before, after in zip(rounds.turns["bad"], rounds.turns["bad"][1:], strict=False)]
    assert 2 <= len(pauses) <= 4
    assert pauses[-1] > pauses[0]  # a busy machine may lengthen any of them
    assert len(rounds.turns["good"]) >= 10
    return [event for event in events if event.reason == "InternalError"]


@pytest.mark.parametrize("spec", POISON.values(), ids=POISON.keys())
async def test_a_spec_that_cannot_be_planned(spec: Mapping[str, Any]) -> None:
    events = await failed(Rounds(a_round(**spec)))
    assert len(events) == 1
    assert events[0].warning


async def test_any_exception_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = a_round(block_height=666)
    real = Reconciler._observe

    async def look(self: Any, round_: PoCRound, missing: str | None) -> Any:  # noqa: ANN401
        if round_.spec.block_height == bad.spec.block_height:
            raise RuntimeError("a defect")
        return await real(self, round_, missing)

    monkeypatch.setattr(Reconciler, "_observe", look)
    events = await failed(Rounds(bad))
    assert events[0].message.startswith("RuntimeError: a defect; it stands still")


async def test_a_round_that_cannot_be_read() -> None:
    fault = UnreadableObject("spec.proofs.inline.0.nonce: Input should be greater than or equal to 0", BODY)
    events = await failed(Rounds(a_round(), fault))
    assert "spec.proofs.inline.0.nonce" in events[0].message


async def test_another_spec_is_tried_at_once() -> None:
    rounds = Rounds(a_round(callback_url="http://[zz]/"))
    events = list[WorkEvent]()
    async with driven(rounds, events) as operator:
        await asyncio.wait_for(rounds.reported.wait(), 20)
        await asyncio.sleep(0.5)
        turns = len(rounds.turns["bad"])
        operator.work_changed(RoundPlanner, body("bad", generation=1), events.append)
        operator.pod_changed(a_pod("a", ip="10.0.0.2"))
        await asyncio.sleep(0)
        assert len(rounds.turns["bad"]) == turns
        operator.work_changed(RoundPlanner, body("bad", generation=2), events.append)
        await until(lambda: len(rounds.turns["bad"]) > turns)
        assert len(rounds.turns["bad"]) == turns + 1


async def test_a_reconciliation_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "RECONCILE_SECONDS", 0.1)
    rounds = Rounds(a_round())
    hang = asyncio.Event()

    async def get(resource: type, namespace: str, name: str) -> PoCRound | None:
        if name == "bad":
            await hang.wait()
        return rounds.rounds[name]

    monkeypatch.setattr(rounds, "get", get)
    async with driven(rounds, []):
        await asyncio.wait_for(rounds.reported.wait(), 20)


async def test_the_api_servers_failure_is_no_round_s() -> None:
    rounds = Rounds(a_round(), StoreUnavailable("away"))
    async with driven(rounds, []):
        await asyncio.sleep(0.5)
        assert rounds.conditions == {}
        assert len(rounds.turns["bad"]) >= 5


def test_a_failure_of_the_operator_fits_as_well() -> None:
    conditions, event = internal_error(RuntimeError("x" * 5000), NOW, 3)
    assert [(found.type, found.status, found.observed_generation) for found in conditions] == [
        ("Progressing", "False", 3),
        ("Degraded", "True", 3),
    ]
    assert all(len(found.message.encode()) <= MESSAGE_BYTES for found in conditions)
    assert event.message.endswith("look at the operator's log, or delete the object")


@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancellation_is_not_lost_to_the_end_of_a_pause(turns: int) -> None:
    async with lease_api() as (_, connection), PodClient() as client:
        lease = LeaderElection(connection, "ns", "me", time.monotonic)
        operator = Manager(cast(ObjectStore, Rounds(a_round())), lease, client)
        failures = operator.reconciler(RoundPlanner, ObjectRef("ns", "bad", "uid"), lambda _: None).failures
        pausing = asyncio.create_task(failures.pause())
        await asyncio.sleep(0)
        await ends_cancelled(pausing, failures.spec_changed.set, turns)
