# SPDX-License-Identifier: Apache-2.0
"""Specs and states at the edge of what a plan can express: each is planned, in bounded time and memory."""

from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, Assignment, RoundStatus
from poc_operator.apis.v1alpha1.status import Result, SlotState, State
from poc_operator.planning.snapshot import DeleteWork, StartPod
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import NOW, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.partition import MAX_NONCE

CAPACITY = MAX_NONCE // 2 + 1  # of each of two slots
WHOLE: dict[str, Any] = {"next": CAPACITY, "delivered": CAPACITY, "valid": 5}


def test_a_spec_with_too_many_slots_fails_its_round_at_once() -> None:
    round_ = a_round(nodes={"first": 0, "last": 19_999, "count": 20_000, "groups": 64})
    step = plan(look(round_, (a_pod("a"), says())))
    assert step.status.assignments == []
    outcome = step.status.outcome
    assert outcome is not None
    assert (outcome.type, outcome.reason) == (Result.FAILED, Reason.TOO_MANY_SLOTS)
    assert "spec.nodes makes 1280000 slots, at most 3000 are allowed" in outcome.message


def test_as_many_slots_as_are_allowed_are_made() -> None:
    round_ = a_round(nodes={"first": 0, "last": 299, "count": 300, "groups": 10})
    assert len(plan(look(round_, (a_pod("a"), says()))).status.assignments) == MAX_SLOTS


def test_more_pods_than_slots_leave_some_without_one() -> None:
    pods = [(a_pod(f"p{number}"), says() if number == 0 else None) for number in range(2_001)]
    step = plan(look(a_round(nodes={"first": 0, "last": 1_999, "count": 2_000}), *pods))
    assert (step.status.groups, len(step.status.assignments)) == (1, 2_000)


@pytest.mark.parametrize(
    ("slot", "status"),
    [
        pytest.param(
            a_slot(state=SlotState.DONE, session="s1", **WHOLE), {"stop_time": NOW, "start_time": NOW}, id="resumed"
        ),
        pytest.param(a_slot(**WHOLE), {}, id="its pod restarted"),
        pytest.param(a_slot(state=SlotState.STARTING, lost=NOW - timedelta(minutes=1), **WHOLE), {}, id="caught up"),
    ],
)
def test_a_slot_without_a_nonce_left_is_done(slot: Assignment, status: dict[str, object]) -> None:
    other = a_slot(None, SlotState.WAITING, node=1)
    round_ = a_round(a_status(slot, other, groups=1, **status), nodes={"first": 0, "last": 1, "count": 2}, stop=None)
    step = plan(look(round_, (a_pod("a"), says(session="s2"))))
    found = step.status.assignments[0]
    assert (found.state, found.delivered, found.valid) == (SlotState.DONE, CAPACITY, 5)
    assert not [action for action in step.actions if isinstance(action, StartPod) and action.request.node_id == 0]


@pytest.mark.parametrize(("age", "deletes"), [(31_535_999, False), (31_536_000, True)])
def test_the_longest_time_to_live_is_planned(age: int, deletes: bool) -> None:
    status = RoundStatus(state=State.COMPLETE, completion_time=NOW)
    step = plan(look(a_round(status, ttlSecondsAfterFinished=31_536_000), after=age))
    assert [type(action) for action in step.actions] == [DeleteWork] * deletes
