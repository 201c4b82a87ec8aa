# SPDX-License-Identifier: Apache-2.0
"""The board on which rounds queue: who is known, for how long, and who is woken when a pod falls free."""

import asyncio
import time
from typing import Any, Self, cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.kinds import RoundPlanner
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.manager import Manager
from poc_operator.controller.other_rounds import KNOWN_SECONDS, UNREAD_SECONDS, OtherRounds
from poc_operator.planning.queue import as_other
from poc_operator.planning.snapshot import OtherRound
from tests.support.builders.forwarding import until
from tests.support.fakes.lease_api import lease_api
from tests.support.fakes.without_pods import WithoutPods
from tests.unit.poc_operator.build import a_pod, newborn
from tests.unit.poc_operator.rounds.test_queue import a_named_round
from tests.unit.poc_operator.rounds.world import SimPod
from vllm_poc.wire.answers import CommandResponse, PowStatus
from vllm_poc.wire.messages import InitGenerateRequest

HOLDS, WANTS = {"held": frozenset({"p"})}, {"wanted": frozenset({"p", "q"}), "needs": 1}


class Board:
    """A board with a clock, and the rounds that are woken."""

    def __init__(self, *rounds: str) -> None:
        self.seconds = 0.0
        self.rounds = OtherRounds(lambda: self.seconds)
        self.wakes = {name: asyncio.Event() for name in rounds}
        for name in rounds:
            self.expect(name)

    def expect(self, name: str, namespace: str = "ns") -> None:
        self.rounds.expect(name, namespace, self.wakes.setdefault(name, asyncio.Event()))

    def put(self, name: str, **fields: Any) -> None:  # noqa: ANN401
        self.rounds.put(name, other(name, **fields))

    def woken(self) -> set[str]:
        found = {name for name, wake in self.wakes.items() if wake.is_set()}
        for wake in self.wakes.values():
            wake.clear()
        return found

    def beside(self, name: str) -> list[str] | None:
        others = self.rounds.beside(name, "ns")
        return None if others is None else [found.id for found in others if found.current]

    def remembered(self, name: str) -> list[str]:
        """Return those that are not current, and their pods."""
        return [found.id for found in self.rounds.beside(name, "ns") or () if not found.current and found.held]


def other(name: str, **fields: Any) -> OtherRound:  # noqa: ANN401
    round_ = a_named_round(name)
    told = as_other(round_, RoundStatus(), tuple, blocked=False)
    return OtherRound(**{**vars(told), **fields})


def test_a_pod_that_falls_free_wakes_those_that_want_it() -> None:
    board = Board("a", "b", "c")
    board.put("a", **HOLDS)
    board.put("b", **WANTS)
    board.put("c", wanted=frozenset({"q"}), needs=1)
    board.woken()
    board.put("a")
    assert board.woken() == {"b"}


@pytest.mark.parametrize("end", ["fail", "forget"])
def test_a_round_that_is_gone_or_fails_wakes_those_that_waited_for_it(end: str) -> None:
    board = Board("a", "b")
    board.put("a", **HOLDS)
    board.put("b", **WANTS)
    board.woken()
    getattr(board.rounds, end)("a")
    assert (board.woken(), board.beside("b")) == ({"b"}, [])
    assert board.remembered("b") == (["a"] if end == "fail" else [])


def test_a_round_that_wants_nothing_any_more_lets_the_next_one_go() -> None:
    board = Board("a", "b")
    board.put("a", **WANTS)
    board.put("b", **WANTS)
    board.woken()
    board.put("a", held=frozenset({"q"}))
    assert board.woken() == {"b"}


def test_others_of_the_namespace_are_known() -> None:
    board = Board("a", "b")
    board.expect("elsewhere", "other")
    for name in ("a", "b", "elsewhere"):
        board.put(name)
    assert (board.beside("a"), board.beside("b")) == (["b"], ["a"])


def test_a_round_that_has_yet_to_be_read_is_waited_for_only_so_long() -> None:
    board = Board("a", "b")
    board.put("a")
    assert board.beside("a") is None
    board.seconds = UNREAD_SECONDS
    assert board.beside("a") == []


def test_the_first_plan_of_a_round_wakes_those_that_waited_for_it() -> None:
    board = Board("a", "b")
    board.put("a", **WANTS)
    board.woken()
    board.put("b")
    assert board.woken() == {"a"}


def test_a_round_that_is_not_planned_any_more_keeps_no_pods() -> None:
    board = Board("a", "b")
    board.put("a", **HOLDS)
    board.put("b")
    board.seconds = KNOWN_SECONDS
    assert (board.beside("b"), board.remembered("b")) == ([], ["a"])


class Store(WithoutPods):
    """Rounds in memory."""

    def __init__(self, *rounds: PoCRound) -> None:
        self.rounds = {round_.metadata.name: newborn(round_) for round_ in rounds}

    async def get(self, resource: type, namespace: str, name: str, uid: str | None = None) -> PoCRound | None:
        """Return the round."""
        return self.rounds[name]

    async def write_status(self, work: PoCRound, status: RoundStatus) -> None:
        """Store the status."""
        self.rounds[work.metadata.name] = work.model_copy(update={"status": status})


class OnePod:
    """A pod over which two rounds would quarrel."""

    def __init__(self) -> None:
        self.pod = SimPod("p")
        self.started: list[tuple[str | None, float]] = []
        self.stopped = 0.0

    async def of(self, _: str) -> Self:
        """Be the client for all namespaces."""
        return self

    async def status(self, base: str, renewal: object = None) -> object:
        """Answer a poll."""
        return self.pod.report(time.monotonic()).status

    async def start(self, base: str, request: InitGenerateRequest) -> object:
        """Take a start."""
        assert self.pod.start(request, time.monotonic()) is not None, "it computes another round"
        self.started.append((request.round_id, time.monotonic()))
        return self._done()

    async def stop(self, base: str, round_id: str | None, **_: object) -> object:
        """Stop."""
        self.pod.state, self.stopped = type(self.pod.state).STOPPED, time.monotonic()
        return self._done()

    def _done(self) -> CommandResponse:
        told = PowStatus(status=self.pod.state, session_id=self.pod.session_id)
        return CommandResponse(status="OK", pow_status=told)


async def test_the_next_round_starts_within_two_seconds_of_the_last_ones_end() -> None:
    """At once, in fact: it is woken when the pod is given back."""
    store, pod = (
        Store(a_named_round("first", age=100), a_named_round("second"), a_named_round("third", priority=1)),
        OnePod(),
    )
    async with lease_api() as (_, connection):
        lease = LeaderElection(connection, "ns", "me", time.monotonic)
        await lease.acquire()
        operator = Manager(cast(ObjectStore, store), lease, cast(PodClient, pod))
        operator.pod_changed(a_pod("p"))

        def drive(name: str) -> asyncio.Task[None]:
            reconciler = operator.reconciler(RoundPlanner, ObjectRef("ns", name, name), lambda _: None)
            return asyncio.create_task(operator.run(name, reconciler))

        loops = [drive("first")]
        await until(lambda: bool(pod.started))
        loops += [drive("second"), drive("third")]
        for number, name in enumerate(["first", "third"]):
            await until(lambda: len(pod.started) == number + 1)  # noqa: B023 - awaited at once
            await asyncio.sleep(0.5)
            finished = store.rounds[name]
            spec = finished.spec.model_copy(update={"finish": True})
            metadata = finished.metadata.model_copy(update={"generation": 2})
            store.rounds[name] = finished.model_copy(update={"spec": spec, "metadata": metadata})
            operator.work_changed(
                RoundPlanner,
                store.rounds[name].model_dump(mode="json", by_alias=True, exclude_none=True),
                lambda _: None,
            )
            await until(lambda: len(pod.started) == number + 2)  # noqa: B023
            assert pod.started[-1][1] - pod.stopped < 0.5
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    assert [name for name, _ in pod.started] == ["first", "third", "second"]
