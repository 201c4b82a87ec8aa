# SPDX-License-Identifier: Apache-2.0
"""Who is charged for a slot that stopped: not the round whose pod another round has taken, whatever became of that."""

from dataclasses import replace
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import Assignment, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.controller.actions import Refusals
from poc_operator.planning.queue import place_of
from poc_operator.planning.snapshot import OtherRound, StopPod
from poc_operator.planning.waiting import is_queued
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState

OURS = {"round_id": "round-uid"}
OTHER = {"round_id": "another", "owner": "this-cluster", "delivered_index": 0}
STOPPED, GENERATING = PowState.STOPPED, PowState.GENERATING
REPLACES: dict[str, Any] = {"concurrencyPolicy": "Replace", "blockHeight": 9}


def only_slot(status: RoundStatus) -> Assignment:
    (slot,) = status.assignments
    return slot


def planned(state: PowState, *, knows_others: bool = True, **fields: Any) -> Assignment:  # noqa: ANN401
    """Plan for a slot that ran in session s1, with no retry left."""
    round_ = a_round(a_status(a_slot(session="s1")), retry={"backoffLimitPerSlot": 0})
    snapshot = replace(look(round_, (a_pod("a"), says(state, **fields))), owner="this-cluster")
    if not knows_others:
        snapshot = replace(snapshot, find_other_rounds=lambda: None)
    return only_slot(plan(snapshot).status)


@pytest.mark.parametrize(
    ("state", "fields", "knows_others", "charged"),
    [
        (STOPPED, {**OURS, "stop_reason": "Preempted", "stop_message": "for ns/b"}, True, False),
        (STOPPED, {**OURS, "stop_reason": "Requested"}, True, True),
        (STOPPED, {**OURS, "stop_reason": "SomethingNew"}, True, True),
        (STOPPED, OURS, True, True),
        # Another round may have taken it which nobody has read yet.
        (STOPPED, {**OURS, "stop_reason": "Requested"}, False, False),
        (STOPPED, OURS, False, False),
        # It was stopped for another round, and that has been stopped since.
        (GENERATING, OTHER, True, False),
        (STOPPED, OTHER, True, False),
        (STOPPED, {**OTHER, "owner": "that-cluster"}, True, True),
        (GENERATING, {**OTHER, "owner": None}, True, True),
    ],
)
def test_what_another_round_took_is_free(
    state: PowState, fields: dict[str, Any], knows_others: bool, charged: bool
) -> None:
    slot = planned(state, knows_others=knows_others, **fields)
    assert (slot.state is SlotState.FAILED) is charged, slot.error
    if not charged:
        assert (slot.attempts, slot.disruptions) == (2, 1)


def test_a_pod_is_told_for_whom_it_stops() -> None:
    busy = says(GENERATING, round_id="older")
    (stop,) = plan(look(a_round(**REPLACES), (a_pod("a"), busy))).actions
    assert isinstance(stop, StopPod)
    assert (stop.round_id, stop.preempted_by) == ("older", "ns/r")


def test_a_round_that_pods_refused_stops_no_other_to_ask_again() -> None:
    busy = says(GENERATING, round_id="older")
    spared = replace(busy, spared=True)
    step = plan(look(a_round(**REPLACES), (a_pod("a"), spared)))
    assert step.actions == []
    (progressing,) = (found for found in step.status.own_conditions if found.type == "Progressing")
    assert "and has refused this work lately" in progressing.message
    idle = replace(says(PowState.IDLE), spared=True)
    assert len(plan(look(a_round(**REPLACES), (a_pod("a"), idle))).actions) == 1, "nobody is stopped for that"


def test_a_refusal_after_another_round_was_stopped_spares_the_others_longer_with_each() -> None:
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for taken_again in (60, 120, 240, 480, 960):
        refusals.add("a", "EngineNotReady", "not now", took=True)
        since = now[0]
        now[0] = since + taken_again - 1
        assert refusals.spares("a")
        now[0] = since + taken_again
        assert not refusals.spares("a")
    for _ in range(2_000):
        refusals.add("a", "EngineNotReady", "not now", took=True)
    now[0] += 3_599
    assert refusals.spares("a")
    now[0] += 1
    assert not refusals.spares("a")
    now[0] += 3_600
    refusals.add("a", "EngineNotReady", "not now", took=True)
    now[0] += 60
    assert not refusals.spares("a"), "what is long ago does not count"
    refusals.add("a", "EngineNotReady", "not now", took=True)
    refusals.forget("a")
    assert (refusals.of("a"), refusals.spares("a")) == (None, False)


def test_a_refusal_that_cost_nobody_anything_spares_nobody() -> None:
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for asked_again in (5, 10, 20, 40, 60, 60):
        refusals.add("a", "EngineNotReady", "not now")
        since = now[0]
        now[0] = since + asked_again - 1
        assert (refusals.of("a"), refusals.spares("a")) == (("EngineNotReady", "not now"), False)
        now[0] = since + asked_again
        assert refusals.of("a") is None


def test_the_start_deadline_does_not_run_while_others_are_spared() -> None:
    spared = replace(says(GENERATING, round_id="older"), spared=True)
    refused = replace(spared, refusal=("EngineNotReady", "not now"))
    for report, waits in ((spared, True), (refused, True), (replace(spared, spared=False), False)):
        snapshot = look(a_round(**REPLACES), (a_pod("a"), report))
        assert is_queued(snapshot) is waits


def test_nor_while_a_round_that_goes_first_has_the_other_pod() -> None:
    spared, held = (says(GENERATING, round_id=uid) for uid in ("older", "first"))
    first = OtherRound(
        id="first",
        name="ns/first",
        place=place_of(a_round(priority=5)),
        priority=5,
        replaces=False,
        block=("ff", 99, "key"),
        held=frozenset({"b"}),
    )
    snapshot = look(a_round(**REPLACES), (a_pod("a"), replace(spared, spared=True)), (a_pod("b"), held))
    assert is_queued(replace(snapshot, find_other_rounds=lambda: [first]))
