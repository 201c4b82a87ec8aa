# SPDX-License-Identifier: Apache-2.0
"""Counters that cannot be true are not counted, and the user is told once."""

from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.credentials import RATE_LIMIT, plausible_nonces
from poc_operator.observed import PodReport
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import a_pod, a_round, a_slot, a_status, doubts, look, says
from vllm_poc.wire.answers import PowState

KNOWN = {"start": 4, "next": 20, "delivered": 16, "valid": 7, "valid_before": 2, "rejected": 1}
SLOT = a_slot().model_copy(update=KNOWN)
TRUE: dict[str, Any] = {
    "start_index": 4,
    "next_index": 20,
    "delivered_index": 16,
    "delivered_valid": 5,
    "delivered_rejected": 1,
}


#: How far a slot of a round that is so old can be.
AGE = 10
REACH = plausible_nonces(RATE_LIMIT, AGE)


def planned(slot: Assignment, state: PowState = PowState.GENERATING, **fields: Any) -> RoundStep:  # noqa: ANN401 - fields of StatusResponse
    report: PodReport = says(state, round_id="round-uid", **TRUE | fields)
    return plan(look(a_round(a_status(slot), age=AGE), (a_pod("a"), report)))


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"next_index": 19}, "next_index falls from 20 to 19"),
        ({"delivered_index": 15}, "delivered_index falls from 16 to 15"),
        ({"delivered_valid": 4}, "delivered_valid falls from 5 to 4"),
        ({"delivered_rejected": 0}, "delivered_rejected falls from 1 to 0"),
        ({"delivered_index": 21}, "out of order"),
        ({"next_index": REACH}, None),
        ({"next_index": REACH + 1}, f"next_index {REACH + 1} is more than the {REACH} nonces that pods can have"),
        ({"next_index": 2**31 - 1}, "pods can have computed by now"),
        ({"next_index": REACH, "delivered_valid": 12}, "12 valid and 1 rejected nonces of 12 delivered ones"),
    ],
)
def test_what_cannot_be_true_is_not_counted(lie: dict[str, Any], why: str | None) -> None:
    step = planned(SLOT, **lie)
    slot = step.status.assignments[0]
    if why is None:
        assert (slot.next, slot.error) == (REACH, None)
        return
    assert {name: getattr(slot, name) for name in KNOWN} == KNOWN
    assert slot.state is SlotState.RUNNING
    assert slot.error is not None
    assert slot.error.startswith("pod a is not believed: ")
    assert why in slot.error
    assert [event.warning for event in doubts(step)] == [True]
    (told,) = [one.model_dump() for one in step.status.conditions if one.type == "Degraded"]
    assert (Reason.REPORT_CONTRADICTORY in step.status.degraded, slot.error in told["message"]) == (True, True)
    assert (step.status.totals.checked, step.status.totals.rate) == (20, "0.0")
    assert doubts(planned(slot, **lie)) == []


def test_a_slot_has_no_more_nonces_than_fit() -> None:
    slot = SLOT.model_copy(update={"group": 1})
    round_ = a_round(a_status(slot, groups=2))
    report = says(PowState.GENERATING, **TRUE | {"next_index": 2**30 + 1})
    assert "out of order" in (plan(look(round_, (a_pod("a"), report))).status.assignments[0].error or "")


def test_a_pod_that_tells_the_truth_again_is_believed() -> None:
    doubted = planned(SLOT, next_index=19).status.assignments[0]
    slot = planned(doubted, next_index=30).status.assignments[0]
    assert (slot.next, slot.error) == (30, None)


def test_a_stopped_pod_is_told_again_from_what_was_believed() -> None:
    slot = planned(SLOT, PowState.STOPPED, next_index=2**31, delivered_index=10).status.assignments[0]
    assert (slot.state, slot.start, slot.valid) == (SlotState.STARTING, 16, 7)


def test_a_lie_adopts_nothing() -> None:
    starting = SLOT.model_copy(update={"state": SlotState.STARTING, "session": None, "start": 4, "next": 4})
    lying = says(PowState.GENERATING, **TRUE | {"next_index": 5})
    slot = plan(look(a_round(a_status(starting)), (a_pod("a"), lying))).status.assignments[0]
    assert slot.state is SlotState.STARTING


def test_a_rate_that_no_pod_has_is_not_counted() -> None:
    told = planned(SLOT, rate_per_second=3.0).status.totals.rate
    assert (told, planned(SLOT, rate_per_second=1e12).status.totals.rate) == ("3.0", "0.0")
