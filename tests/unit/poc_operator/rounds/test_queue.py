# SPDX-License-Identifier: Apache-2.0
"""Rounds that share pods: they queue by priority and age, replace each other in one direction only, and name each
other.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.round import PoCRound, RoundSpec, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.observed import PodReport
from poc_operator.planning.eligibility import may_replace, usable_pods
from poc_operator.planning.queue import as_other, place_of
from poc_operator.planning.snapshot import OtherRound, StartPod, StopPod
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundSnapshot
from tests.unit.poc_operator.build import HISTORIES, NOW, a_pod, a_round, look, says
from tests.unit.poc_operator.planning.test_eligibility import holding
from tests.unit.poc_operator.rounds.world import SimPod
from vllm_poc.wire.answers import PowState

#: Turns after which every world here is settled.
TURNS = 8


def a_named_round(name: str, *, age: int = 10, **spec: Any) -> PoCRound:  # noqa: ANN401
    """A round without end that wants one pod, and has the uid of its name."""
    fields = {
        "stop": None,
        "nodes": {"first": 0, "last": 0, "count": 1, "groups": 1},
        **spec,
    }
    made = a_round(age=age, **fields)
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"name": name, "uid": name})})


@dataclass
class SharedWorld:
    """Rounds and the pods that they share; each operator loop sees what the others' last plans left."""

    rounds: dict[str, PoCRound]
    pods: dict[str, SimPod]
    told: dict[str, OtherRound] = field(default_factory=dict)
    starts: list[tuple[str, str]] = field(default_factory=list)  # round, pod
    stops: list[tuple[str, str]] = field(default_factory=list)
    seconds: int = 0

    def turn(self, name: str, *, acts: bool = True) -> RoundStatus:
        """Let one round look, plan and act."""
        snapshot = self.look(name)
        step = plan(snapshot)
        round_ = self.rounds[name] = self.rounds[name].model_copy(update={"status": step.status})
        self.told[name] = as_other(round_, step.status, lambda: usable_pods(snapshot), blocked=False)
        for action in step.actions if acts else ():
            pod = self.pods[action.pod.uid]  # type: ignore[union-attr]
            if isinstance(action, StartPod) and pod.start(action.request, self.seconds) is not None:
                self.starts.append((name, pod.name))
            if isinstance(action, StopPod) and pod.request and pod.request.round_id == action.round_id:
                pod.state = PowState.STOPPED
                self.stops.append((name, pod.name))
        return step.status

    def look(self, name: str) -> RoundSnapshot:
        pods = sorted(self.pods)
        return RoundSnapshot(
            work=self.rounds[name],
            pods=[a_pod(pod) for pod in pods],
            reports={pod: self.pods[pod].report(self.seconds) for pod in pods},
            now=NOW + timedelta(seconds=self.seconds),
            find_other_rounds=lambda: [told for other, told in self.told.items() if other != name],
        )

    def settle(self, order: list[str] | None = None) -> None:
        """Let all rounds take turns."""
        for _ in range(TURNS):
            self.seconds += 2
            for name in order or list(self.rounds):
                self.turn(name)

    def change(self, name: str, **fields: Any) -> None:  # noqa: ANN401
        spec: RoundSpec = self.rounds[name].spec.model_copy(update=fields)
        self.rounds[name] = self.rounds[name].model_copy(update={"spec": spec})

    def works(self, name: str) -> int:
        slots = self.rounds[name].status.assignments
        return sum(slot.state is SlotState.RUNNING for slot in slots)

    def computes(self) -> dict[str, str | None]:
        return {name: pod.request.round_id if pod.slot and pod.request else None for name, pod in self.pods.items()}


def a_world(*rounds: PoCRound, pods: int = 1) -> SharedWorld:
    names = [f"p{number}" for number in range(pods)]
    return SharedWorld(
        rounds={round_.metadata.name: round_ for round_ in rounds}, pods={name: SimPod(name) for name in names}
    )


def message(round_: PoCRound) -> tuple[str, str]:
    found = next(found for found in round_.status.own_conditions if found.type == "Progressing")
    return found.reason, found.message


def ends(world: SharedWorld, name: str) -> None:
    """The round is finished; those that wait are woken, and nobody else looks before its pod is free."""
    world.change(name, finish=True)
    for _ in range(3):
        world.turn(name)
    assert world.rounds[name].status.state is State.COMPLETE


def test_rounds_get_the_pod_by_priority_and_then_by_age() -> None:
    world = a_world(
        a_named_round("running", age=800),
        a_named_round("young", age=1),
        a_named_round("old", age=100),
        a_named_round("urgent", age=0, priority=5),
        a_named_round("later", age=500, priority=-1),
    )
    world.turn("running")
    world.settle()
    order = []
    for _ in range(len(world.rounds)):
        name = next(name for name in world.rounds if world.works(name))
        order.append(name)
        ends(world, name)
        world.settle()
    assert order == ["running", "urgent", "old", "young", "later"]
    assert world.stops == [(name, "p0") for name in order]


@pytest.mark.parametrize("first", ["old", "young"])
def test_who_looks_first_gets_nothing_by_it(first: str) -> None:
    world = a_world(a_named_round("old", age=100), a_named_round("young", age=1), a_named_round("running", age=800))
    world.turn("running")
    world.settle()
    ends(world, "running")
    others = ["young", "old"] if first == "young" else ["old", "young"]
    world.settle(others)
    assert (world.works("old"), world.works("young"), world.starts[1:]) == (1, 0, [("old", "p0")])


def test_the_next_round_starts_at_its_next_look() -> None:
    """One look binds and starts; the controller wakes the round when the pod is given back."""
    world = a_world(a_named_round("first", age=100), a_named_round("second"))
    world.settle()
    ends(world, "first")
    world.turn("second")
    assert world.computes() == {"p0": "second"}


def test_a_waiting_round_names_the_round_it_waits_for() -> None:
    world = a_world(a_named_round("first", age=100), a_named_round("second"))
    world.settle()
    reason, text = message(world.rounds["second"])
    assert (reason, "p0 (round ns/first, height 7)" in text) == ("PodsBusy", True)


def test_a_round_behind_others_says_so() -> None:
    world = a_world(a_named_round("first", age=100, priority=3), a_named_round("second"))
    world.turn("first", acts=False)  # recorded, and on its way
    world.turn("second")
    assert message(world.rounds["second"]) == (
        "PodsBusy",
        "round ns/first gets the pods first (its priority is 3)",
    )


def test_fail_names_the_round() -> None:
    world = a_world(a_named_round("first", age=100), a_named_round("second", concurrencyPolicy="Fail"))
    world.settle(["first"])
    world.turn("second")
    outcome = world.rounds["second"].status.outcome
    assert outcome is not None
    assert "p0 (round ns/first, height 7)" in outcome.message


def test_a_round_takes_no_more_pods_than_it_needs_from_those_behind_it() -> None:
    world = a_world(a_named_round("first", age=100), a_named_round("second"), pods=3)
    world.settle()
    assert sorted(filter(None, world.computes().values())) == ["first", "second"]


def test_a_new_operator_starts_nothing_before_it_knows_all_rounds() -> None:
    world = a_world(a_named_round("a"))
    snapshot = world.look("a")
    unknown = RoundSnapshot(
        work=snapshot.work, pods=snapshot.pods, reports=snapshot.reports, now=NOW, find_other_rounds=lambda: None
    )
    assert plan(unknown).actions == []


PREEMPTS: dict[str, Any] = {"concurrencyPolicy": "Replace"}


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        pytest.param({**PREEMPTS, "priority": 1}, True, id="higher priority"),
        pytest.param({**PREEMPTS, "priority": 1, "blockHeight": 1}, True, id="higher priority, lower block"),
        pytest.param({**PREEMPTS, "blockHeight": 8}, True, id="same priority, higher block"),
        pytest.param({**PREEMPTS, "blockHeight": 7}, False, id="same priority, same block"),
        pytest.param({**PREEMPTS, "priority": -1, "blockHeight": 8}, False, id="lower priority, higher block"),
        pytest.param({"priority": 9, "blockHeight": 8}, False, id="waits, whatever its priority"),
    ],
)
def test_what_replaces_a_running_round(spec: dict[str, Any], taken: bool) -> None:
    world = a_world(a_named_round("running", age=100), a_named_round("other", **spec))
    world.settle(["running"])
    world.settle()
    assert world.computes() == {"p0": "other" if taken else "running"}
    assert world.starts == [("running", "p0"), *([("other", "p0")] if taken else [])]
    assert world.stops == ([("other", "p0")] if taken else [])


def test_a_round_that_was_replaced_goes_on_afterwards_and_has_lost_no_retry() -> None:
    retry: dict[str, int] = {"backoffLimitPerSlot": 0, "backoffLimit": 0}
    world = a_world(a_named_round("low", age=100, retry=retry), a_named_round("high", priority=1, **PREEMPTS))
    world.settle(["low"])
    world.settle()
    low = world.rounds["low"].status
    assert (low.state, [slot.state for slot in low.assignments]) == (State.RUNNING, [SlotState.WAITING])
    degraded = next(found for found in low.own_conditions if found.type == "Degraded")
    assert "p0 (computes round ns/high, height 7)" in degraded.message
    ends(world, "high")
    world.settle(["low"])
    assert (world.works("low"), world.starts) == (1, [("low", "p0"), ("high", "p0"), ("low", "p0")])


def test_the_time_for_which_another_round_has_its_pods_makes_no_round_idle() -> None:
    low = a_named_round("low", age=100, startDeadlineSeconds=900)
    world = a_world(low, a_named_round("high", priority=1, **PREEMPTS))
    world.settle(["low"])
    for _ in range(3):
        world.settle()
        world.seconds += 1000
        assert (world.works("low"), world.works("high")) == (0, 1)
    assert (world.rounds["low"].status.outcome, world.rounds["low"].status.idle_time) == (None, None)
    ends(world, "high")
    world.pods.clear()
    world.settle(["low"])
    assert world.rounds["low"].status.outcome is None
    world.seconds += 901
    world.turn("low")
    assert world.rounds["low"].status.outcome is not None


def test_a_round_waits_for_its_turn_longer_than_its_start_deadline() -> None:
    world = a_world(a_named_round("first", age=100), a_named_round("second"))
    for _ in range(3):
        world.settle()
        world.seconds += 1000
    second = world.rounds["second"].status
    assert (second.outcome, second.idle_time, world.works("first")) == (None, None, 1)
    ends(world, "first")
    world.settle(["second"])
    assert world.works("second") == 1


def test_the_start_deadline_runs_from_when_the_turn_has_come() -> None:
    world = a_world(a_named_round("first", age=100), a_named_round("second"))
    world.settle()
    world.seconds += 1000
    ends(world, "first")
    world.pods.clear()
    world.turn("second")
    world.seconds += 899
    assert world.turn("second").outcome is None
    world.seconds += 1
    outcome = world.turn("second").outcome
    assert outcome is not None
    assert outcome.reason == "StartDeadlineExceeded"


def test_a_new_operator_fails_no_round_before_it_knows_whether_it_is_queued() -> None:
    world = a_world(a_named_round("late", age=1000), pods=0)
    seen = world.look("late")
    unknown = RoundSnapshot(work=seen.work, pods=[], reports={}, now=NOW, find_other_rounds=lambda: None)
    assert plan(unknown).status.outcome is None
    assert plan(seen).status.outcome is not None


@pytest.mark.parametrize(
    ("priority", "height", "round_id", "replaced"),
    [
        pytest.param(0, 6, "other", True, id="older block"),
        pytest.param(0, 8, "other", False, id="newer block"),
        pytest.param(1, 8, "other", True, id="foreign work has priority 0"),
        pytest.param(-1, 6, "other", False, id="below foreign work"),
        pytest.param(0, None, None, True, id="nobody knows what"),
        pytest.param(-1, None, None, False, id="nobody knows what, below it"),
    ],
)
def test_foreign_work_has_priority_0(priority: int, height: int | None, round_id: str | None, replaced: bool) -> None:
    round_ = a_round(concurrencyPolicy="Replace", priority=priority)
    snapshot = look(round_, (a_pod("a"), holding(height, round_id)))
    assert may_replace(snapshot, snapshot.reports["a"]) is replaced


def test_a_reference_pod_is_named_by_what_it_computes() -> None:
    """Such a pod knows no rounds: hash, height and key tell which it is."""
    first = a_named_round("first", age=100)
    world = a_world(first, a_named_round("second"))
    world.turn("first", acts=False)
    report = holding(7, None)
    assert report.status is not None
    assert report.status.config is not None
    config = report.status.config.model_copy(update={"block_hash": first.spec.block_hash})
    told = PodReport(status=report.status.model_copy(update={"config": config}), resumes=False)
    seen = world.look("second")
    step = plan(
        RoundSnapshot(
            work=seen.work, pods=seen.pods, reports={"p0": told}, now=NOW, find_other_rounds=seen.find_other_rounds
        )
    )
    assert "p0 (round ns/first, height 7)" in step.status.message


_rounds = st.lists(
    st.fixed_dictionaries(
        {
            "age": st.integers(0, 3),
            "priority": st.integers(-1, 1),
            "blockHeight": st.integers(6, 8),
            "concurrencyPolicy": st.sampled_from(["Wait", "Replace"]),
        }
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=HISTORIES, deadline=None)
@given(specs=_rounds, pods=st.integers(1, 3), data=st.data())
def test_no_rounds_ever_take_turns(specs: list[dict[str, Any]], pods: int, data: st.DataObject) -> None:
    """Whatever the rounds and the order in which they look: after a while nothing changes hands any more, no pod is
    idle while a round waits, and no round waits that could replace another.
    """
    world = a_world(*(a_named_round(f"r{number}", **spec) for number, spec in enumerate(specs)), pods=pods)
    names = st.sampled_from(sorted(world.rounds))
    for _ in range(data.draw(st.integers(0, 12))):
        world.seconds += 2
        world.turn(data.draw(names), acts=data.draw(st.booleans()))
    world.settle(data.draw(st.permutations(sorted(world.rounds))))
    assert max(Counter(name for name, _ in world.starts).values()) <= len(world.rounds)
    before = list(world.starts)
    world.settle(data.draw(st.permutations(sorted(world.rounds))))
    assert world.starts == before, "rounds take turns"
    working = [name for name in world.rounds if world.works(name)]
    assert len(working) == min(len(world.rounds), pods)
    replacing = [name for name, round_ in world.rounds.items() if round_.spec.concurrency_policy == "Replace"]
    assert not [
        (waiting, name)
        for waiting in set(replacing) - set(working)
        for name in working
        if _strength(world.rounds[waiting]) > _strength(world.rounds[name])
    ]


def _strength(round_: PoCRound) -> tuple[int, int]:
    return round_.spec.priority, round_.spec.block_height


@given(specs=_rounds)
def test_what_a_round_may_replace_stands_behind_it(specs: list[dict[str, Any]]) -> None:
    rounds = [a_named_round(f"r{number}", **spec) for number, spec in enumerate(specs)]
    for one in rounds:
        others = [as_other(other, other.status, tuple, blocked=False) for other in rounds if other is not one]
        for other in others:
            report = says(PowState.GENERATING, round_id=other.id)
            snapshot = RoundSnapshot(work=one, pods=[], reports={}, now=NOW, find_other_rounds=others.copy)
            assert not may_replace(snapshot, report) or place_of(one) < other.place
