# SPDX-License-Identifier: Apache-2.0
"""Conditions of every kind: programs with the rules of kstatus read them right, and nothing that is wrong is hidden."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.schema import MESSAGE_BYTES
from poc_operator.apis.v1alpha1.status import SlotState, State, WorkStatus
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.calibrations import plan as calibrations
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import Work
from poc_operator.rounds import plan as rounds
from poc_operator.rounds.snapshot import RoundSnapshot
from poc_operator.validations import plan as validations
from tests.unit.poc_operator.build import (
    NOW,
    a_calibration,
    a_pod,
    a_round,
    a_slot,
    a_status,
    a_validation,
    has,
    look,
    says,
)

KINDS: Mapping[str, Work] = {
    "round": a_round(stop=None),
    "validation": a_validation(),
    "calibration": a_calibration(),
}


def planned(work: Work, report: PodReport | None, after: float = 0) -> WorkStatus:
    """The status after a plan with one pod, which is not there without a report."""
    fields: dict[str, Any] = {
        "pods": [a_pod("a")] if report is not None else [],
        "reports": {"a": report} if report is not None else {},
        "now": NOW + timedelta(seconds=after),
        "find_other_rounds": tuple,
    }
    match work:
        case PoCRound():
            return rounds.plan(RoundSnapshot(work=work, **fields)).status
        case PoCValidation():
            proofs = validations.ValidationSnapshot(work=work, proofs='there is no ConfigMap "claims"', **fields)
            return validations.plan(proofs).status
        case PoCCalibration():
            return calibrations.plan(calibrations.CalibrationSnapshot(work=work, **fields)).status


def with_status(work: Work, status: WorkStatus, **spec: Any) -> Work:  # noqa: ANN401
    changed: Any = work.model_copy(update={"status": status, "spec": work.spec.model_copy(update=spec)})
    found: Work = changed
    return found


def kstatus(work: Work, status: WorkStatus) -> str:
    """What kstatus makes of a custom resource without a rule of its own."""
    conditions = {str(condition.type): condition.status for condition in status.own_conditions}
    if status.observed_generation != work.metadata.generation or conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"


@pytest.mark.parametrize("kind", KINDS)
def test_kstatus_reads_every_state_right(kind: str) -> None:
    work = KINDS[kind]
    waiting = planned(work, None)
    assert (waiting.state, kstatus(work, waiting)) == (State.PENDING, "InProgress")
    suspended = planned(with_status(work, waiting, suspend=True), says())
    assert (suspended.state, kstatus(work, suspended)) == (State.SUSPENDED, "InProgress")
    late = planned(with_status(work, waiting, start_deadline_seconds=1), None, after=10)
    assert (late.state, kstatus(work, late)) == (State.FAILED, "Failed")
    assert {found.type for found in late.conditions} == set(ConditionType)


def test_a_complete_round_is_current() -> None:
    work = a_round(finish=True)
    status = planned(work, says())
    assert (status.state, kstatus(work, status)) == (State.COMPLETE, "Current")


def test_all_that_is_wrong_is_told() -> None:
    slots = [
        a_slot("a", SlotState.FAILED, error="pod a failed"),
        a_slot("b", group=1, next=5, delivered=5),
        a_slot(None, SlotState.WAITING, group=2),
    ]
    report = says(round_id=None)
    snapshot = look(
        a_round(a_status(*slots), stop=None),
        (a_pod("b"), report),
        gateway=has((1, 1), (1, 1), (1, 1), conflicts=2, error="gateway http://g: no answer within 5 s"),
    )
    status = rounds.plan(snapshot).status
    degraded = next(found for found in status.own_conditions if found.type == ConditionType.DEGRADED)
    assert status.degraded.split(",")[:3] == ["SlotsFailed", "ResultsConflict", "GatewayUnreachable"]
    assert degraded.reason == Reason.SLOTS_FAILED
    for part in ("1 slot was given up", "results came twice", "no answer within 5 s"):
        assert part in degraded.message


def test_a_condition_is_as_long_as_what_is_stored() -> None:
    """Else the status would seem changed whenever it is read, and be written for ever."""
    slots = [a_slot("a", SlotState.FAILED, error="x" * 5000)]
    status = rounds.plan(look(a_round(a_status(*slots), stop=None), (a_pod("a"), says()))).status
    assert all(len(found.message.encode()) <= MESSAGE_BYTES for found in status.own_conditions)
    assert len(status.message.encode()) <= MESSAGE_BYTES


def test_the_beginning_of_each_finding_is_told_however_long_the_others_are() -> None:
    slots = [
        a_slot("a", SlotState.FAILED, error="x" * 5000),
        a_slot("b", SlotState.STALLED, group=1, error="y" * 5000),
        a_slot(None, SlotState.WAITING, group=2),
    ]
    status = rounds.plan(look(a_round(a_status(*slots), stop=None), (a_pod("b"), None))).status
    degraded = next(found for found in status.own_conditions if found.type == ConditionType.DEGRADED)
    assert len(degraded.message.encode()) <= MESSAGE_BYTES
    for part in ("1 slot was given up", "1 slot gets nothing done", "1 of 3 slots wait for a free pod"):
        assert part in degraded.message
