# SPDX-License-Identifier: Apache-2.0
"""Pods that compute other work: waited for, replaced, or a reason to fail."""

from dataclasses import replace
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import StartPod, StopPod
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import a_config, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import ModelLimits, PowState
from vllm_poc.wire.messages import Scheme


def holding(height: int | None, round_id: str | None = "other") -> PodReport:
    config = a_config(block_hash="cd", block_height=height or 0)
    return says(PowState.GENERATING, round_id=round_id, config=config if height is not None else None)


def planned(report: PodReport, **spec: Any) -> RoundStep:  # noqa: ANN401
    return plan(look(a_round(**spec), (a_pod("a"), report)))


def condition(step: RoundStep, kind: str) -> tuple[str, str]:
    found = next(condition for condition in step.status.own_conditions if condition.type == kind)
    return found.reason, found.message


def test_by_default_it_is_waited_for_and_named() -> None:
    step = planned(holding(6))
    assert step.actions == []
    assert [slot.state for slot in step.status.assignments] == [SlotState.WAITING]
    reason, message = condition(step, "Progressing")
    assert reason == "PodsBusy"
    assert "a (round other, height 6)" in message


def test_fail_ends_the_round_at_once() -> None:
    status = planned(holding(6), concurrencyPolicy="Fail").status
    assert status.state is State.FAILED
    assert status.outcome is not None
    assert (status.outcome.reason, "a (round other, height 6)" in status.outcome.message) == ("PodsBusy", True)


def test_fail_means_the_start_only() -> None:
    round_ = a_round(a_status(a_slot("b")), concurrencyPolicy="Fail")
    step = plan(look(round_, (a_pod("a"), holding(6)), (a_pod("b"), says(PowState.GENERATING))))
    assert step.status.outcome is None


@pytest.mark.parametrize(
    ("height", "round_id"),
    [pytest.param(6, "other", id="lower height"), pytest.param(None, None, id="nobody knows what")],
)
def test_replace_stops_older_work_and_then_starts(height: int | None, round_id: str | None) -> None:
    step = planned(holding(height, round_id), concurrencyPolicy="Replace")
    assert [action.round_id for action in step.actions if isinstance(action, StopPod)] == [round_id]
    assert [event.reason for event in step.events] == ["Replaced"]
    again = plan(look(a_round(step.status, concurrencyPolicy="Replace"), (a_pod("a"), holding(height, round_id))))
    assert again.events == [], "it is told of once"
    then = plan(look(a_round(step.status, concurrencyPolicy="Replace"), (a_pod("a"), says())))
    assert [type(action) for action in then.actions] == [StartPod]


@pytest.mark.parametrize("height", [7, 8])
def test_replace_spares_work_that_is_not_older(height: int) -> None:
    """Two rounds that replace each other would take turns for ever."""
    step = planned(holding(height), concurrencyPolicy="Replace")
    assert step.actions == []
    assert condition(step, "Progressing")[0] == "PodsBusy"


def test_idle_pods_come_first() -> None:
    round_ = a_round(a_status(a_slot(None, SlotState.WAITING)), concurrencyPolicy="Replace")
    step = plan(look(round_, (a_pod("a"), holding(6)), (a_pod("b"), says())))
    assert [slot.pod for slot in step.status.assignments] == ["b"]
    assert [type(action) for action in step.actions] == [StartPod]


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_pod_with_a_rebuilt_codebook_takes_no_part_in_decode_rounds(rebuilt: bool) -> None:
    told = replace(says(model=ModelLimits(rebuilt_codebook=rebuilt)), schemes=frozenset(Scheme))
    step = planned(told, rTarget=None, decode={"maxTokens": 256})
    assert [type(action) for action in step.actions] == ([] if rebuilt else [StartPod])
    if rebuilt:
        reason, message = condition(step, "Accepted")
        assert reason == "SchemeNotOffered"
        assert "needs the network's codebook" in message
        assert "set VLLM_POC_DECODE_CODEBOOK" in message


def test_a_rebuilt_codebook_matters_to_chains_alone() -> None:
    assert [type(action) for action in planned(says(model=ModelLimits(rebuilt_codebook=True))).actions] == [StartPod]
