# SPDX-License-Identifier: Apache-2.0
"""Rounds of one block that differ in the scheme alone: the status of a reference pod does not tell them apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.clients.pods.reference_pods import ReferenceConfig, ReferenceStatus, as_ours
from poc_operator.observed import PodReport
from poc_operator.planning.eligibility import usable_pods
from poc_operator.planning.queue import as_other
from poc_operator.planning.snapshot import OtherRound, StartPod, StopPod
from poc_operator.rounds.ownership import attributed
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundSnapshot
from tests.unit.poc_operator.build import NOW, a_pod, a_slot, a_status
from tests.unit.poc_operator.rounds.test_queue import a_named_round
from vllm_poc.wire.answers import PowState, RoundStats
from vllm_poc.wire.messages import InitGenerateRequest, Scheme

PORT = 8000
BOTH = frozenset(Scheme)
PREFILL: dict[str, Any] = {"rTarget": None, "artifact": {}, "callbackURL": "http://receiver/poc"}
DECODE: dict[str, Any] = {"rTarget": None, "decode": {"maxTokens": 4}, "callbackURL": "http://receiver/poc"}
OURS, OTHERS = "ours", None
UNCONFIRMED = a_slot("p", SlotState.STARTING)
CONFIRMED = a_slot("p", SlotState.RUNNING, session="p")
ELSEWHERE = a_slot("q", SlotState.RUNNING, session="q")
WINS: dict[str, Any] = {"priority": 1, "concurrencyPolicy": "Replace"}


@dataclass
class World:
    """Rounds, and the one reference pod that they share. Answers to starts are lost: the next poll has to tell."""

    rounds: dict[str, PoCRound]
    request: InitGenerateRequest | None = None
    schemes: frozenset[Scheme] = BOTH
    told: dict[str, OtherRound] = field(default_factory=dict)
    orders: list[tuple[str, str]] = field(default_factory=list)  # round, kind of order
    unread: bool = False
    lost_stops: int = 0

    def report(self, round_: PoCRound) -> PodReport:
        """What the operator makes of the pod's answer for this round."""
        answer = ReferenceStatus(status=PowState.IDLE)
        if (request := self.request) is not None:
            shown = request.model_dump(include=ReferenceConfig.model_fields.keys() - {"seq_len"})
            config = ReferenceConfig(**shown, seq_len=request.params.seq_len if request.params else 0, k_dim=12)
            answer = ReferenceStatus(status=PowState.GENERATING, config=config, stats=RoundStats(total_processed=8))
        status = as_ours(answer, a_pod("p"), PORT, round_)
        return PodReport(status=status, resumes=False, schemes=self.schemes)

    def look(self, name: str) -> RoundSnapshot:
        others = [told for other, told in self.told.items() if other != name]
        return RoundSnapshot(
            work=self.rounds[name],
            pods=[a_pod("p")],
            reports={"p": self.report(self.rounds[name])},
            now=NOW + timedelta(seconds=len(self.orders)),
            find_other_rounds=lambda: None if self.unread else others,
        )

    def turn(self, name: str) -> RoundStatus:
        """Let one round look, plan and act. The pod refuses a start while it computes, and stops whatever it does."""
        snapshot = self.look(name)
        step = plan(snapshot)
        round_ = self.rounds[name] = self.rounds[name].model_copy(update={"status": step.status})
        self.told[name] = as_other(round_, step.status, lambda: usable_pods(snapshot), blocked=False)
        for action in step.actions:
            if isinstance(action, StartPod) and self.request is None:
                self.request = action.request
                self.orders.append((name, "start"))
            if isinstance(action, StopPod) and self.request is not None:
                if self.lost_stops:
                    self.lost_stops -= 1
                    continue
                self.request = None
                self.orders.append((name, "stop"))
        return step.status

    def settle(self) -> None:
        """Let all rounds take turns until nothing changes any more."""
        for _ in range(6):
            for name in self.rounds:
                self.turn(name)

    def running(self) -> list[str]:
        """Return the rounds that take the pod's work for theirs."""
        return [
            name
            for name, round_ in self.rounds.items()
            if any(slot.state is SlotState.RUNNING for slot in round_.status.assignments)
        ]

    @property
    def decodes(self) -> bool:
        """Whether the pod computes the decode scheme."""
        return self.request is not None and self.request.params is not None and self.request.params.decodes


def a_world(prefill: dict[str, Any], decode: dict[str, Any]) -> World:
    first = a_named_round("prefill", age=100, **PREFILL, **prefill)
    return World({"prefill": first, "decode": a_named_round("decode", **DECODE, **decode)})


def test_a_round_neither_takes_nor_stops_the_work_of_another_scheme() -> None:
    world = a_world({}, {})
    world.settle()
    assert (world.orders, world.running()) == ([("prefill", "start")], ["prefill"])
    message = next(one for one in world.rounds["decode"].status.own_conditions if one.type == "Progressing").message
    assert "p (round ns/prefill, height 7)" in message


def test_the_work_of_a_round_on_which_the_operator_fails_for_a_while_goes_on() -> None:
    world = a_world({}, {})
    world.settle()
    world.told["prefill"] = replace(world.told["prefill"], current=False)
    for _ in range(3):
        world.turn("decode")
    assert world.orders == [("prefill", "start")]
    world.turn("prefill")
    assert world.running() == ["prefill"]


def test_a_round_that_goes_first_has_the_work_stopped_and_begins_its_own() -> None:
    world = a_world({}, WINS)
    world.turn("prefill")
    world.turn("prefill")
    world.settle()
    assert world.orders == [("prefill", "start"), ("decode", "stop"), ("decode", "start")]
    assert (world.decodes, world.running()) == (True, ["decode"])


@pytest.mark.parametrize("prefill_is_gone", [False, True])
@pytest.mark.parametrize("lost_stops", [1, 2, 5])
def test_work_that_a_round_replaces_never_becomes_its_own(lost_stops: int, prefill_is_gone: bool) -> None:
    """Stops are not answered in time, and the round that had the pod has given it up meanwhile, or is gone."""
    world = a_world({}, WINS)
    world.turn("prefill")
    world.turn("prefill")
    world.lost_stops = lost_stops
    world.turn("decode")
    if prefill_is_gone:
        del world.rounds["prefill"], world.told["prefill"]
    for _ in range(lost_stops + 4):
        for name in list(world.rounds):
            world.turn(name)
            assert world.decodes or "decode" not in world.running()
    assert world.orders == [("prefill", "start"), ("decode", "stop"), ("decode", "start")]
    assert (world.decodes, world.running()) == (True, ["decode"])


def test_what_a_lost_round_left_behind_is_stopped_and_not_taken_over() -> None:
    world = a_world({}, {})
    world.turn("prefill")
    assert world.request is not None
    del world.rounds["prefill"], world.told["prefill"]
    world.settle()
    assert world.orders[1:] == [("decode", "stop"), ("decode", "start")]
    assert (world.decodes, world.running()) == (True, ["decode"])


def test_what_a_pod_computes_that_does_not_offer_the_scheme_is_left_alone() -> None:
    world = a_world({}, {})
    world.turn("prefill")
    del world.rounds["prefill"], world.told["prefill"]
    # Its slot is on another pod, which is gone for the moment.
    world.rounds["decode"] = world.rounds["decode"].model_copy(update={"status": a_status(ELSEWHERE)})
    world.schemes = frozenset({Scheme.PREFILL})
    world.settle()
    assert world.orders == [("prefill", "start")]


def test_nothing_is_done_before_the_other_rounds_are_known() -> None:
    world = a_world({}, {})
    world.turn("prefill")
    world.unread = True
    for _ in range(3):
        world.turn("decode")
    assert world.orders == [("prefill", "start")]
    assert world.turn("prefill").assignments[0].state is SlotState.STARTING
    world.unread = False
    assert world.turn("prefill").assignments[0].state is SlotState.RUNNING


@pytest.mark.parametrize(
    ("slots", "holder", "owner"),
    [
        pytest.param([CONFIRMED], None, OURS, id="confirmed"),
        pytest.param([CONFIRMED], 0, OURS, id="confirmed, and one that goes after waits for it"),
        pytest.param([CONFIRMED], 1, OTHERS, id="confirmed, and one that goes before has it now"),
        pytest.param([UNCONFIRMED], None, OURS, id="unconfirmed"),
        pytest.param([UNCONFIRMED], 0, OTHERS, id="unconfirmed, and another one has it"),
        pytest.param([UNCONFIRMED], 1, OTHERS, id="unconfirmed, and one that goes before has it"),
        pytest.param([ELSEWHERE], None, OURS, id="a stray"),
        pytest.param([ELSEWHERE], 0, OTHERS, id="not recorded, and another one has it"),
    ],
)
def test_who_owns_what_a_reference_pod_computes(slots: Sequence[Any], holder: int | None, owner: str | None) -> None:
    world = a_world({}, {})
    world.turn("prefill")
    world.told.clear()
    world.rounds["prefill"] = world.rounds["prefill"].model_copy(update={"status": a_status(*slots)})
    if holder is not None:
        other = a_named_round("decode", age=1, **DECODE, priority=holder)
        world.told["decode"] = as_other(other, a_status(UNCONFIRMED), list, blocked=False)
    status = attributed(world.look("prefill")).reports["p"].status
    assert status is not None
    assert status.round_id == ("prefill" if owner == OURS else None)
