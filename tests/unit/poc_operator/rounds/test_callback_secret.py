# SPDX-License-Identifier: Apache-2.0
"""Rounds whose receiver asks for a user: no start without one, and another start when it changes."""

from dataclasses import replace
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.basic_auth import BasicAuth
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import StartPod, StopPod
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import a_pod, a_round, a_slot, a_status, look, says
from tests.unit.poc_operator.rounds.test_orphans import computes
from vllm_poc.wire.answers import PowState

OLD, NEW = BasicAuth("pod", "old"), BasicAuth("pod", "new")
MISSING = 'Secret "collector" (spec.callbackSecretRef) does not exist in namespace "ns": create it'
GENERATING = says(PowState.GENERATING, next_index=5)
RUNNING = a_status(a_slot(start=0, next=5))


def planned(
    report: PodReport,
    auth: BasicAuth | str,
    status: RoundStatus | None = None,
    **spec: Any,  # noqa: ANN401
) -> RoundStep:
    spec |= {"callbackURL": "http://collector.example.org/poc", "callbackSecretRef": {"name": "collector"}}
    return plan(look(a_round(status, **spec), (a_pod("a"), report), callback_auth=auth))


def starts(step: RoundStep) -> list[StartPod]:
    return [action for action in step.actions if isinstance(action, StartPod)]


def reasons(step: RoundStep) -> dict[str, tuple[str, str]]:
    return {found.type: (found.status, found.reason) for found in step.status.own_conditions}


def test_a_start_has_the_user_beside_the_address() -> None:
    (start,) = starts(planned(says(), OLD))
    assert (start.auth, str(start.request.url)) == (OLD, "http://collector.example.org/poc")


def test_without_the_secret_nothing_starts_and_the_round_says_why() -> None:
    step = planned(says(), MISSING)
    assert step.actions == []
    assert [slot.state for slot in step.status.assignments] == [SlotState.WAITING]
    unavailable = ("False", Reason.CALLBACK_SECRET_UNAVAILABLE)
    assert reasons(step)["Accepted"] == reasons(step)["Progressing"] == unavailable
    assert (step.status.message, step.status.degraded) == (MISSING, "")
    (start,) = starts(planned(says(), OLD, step.status))
    assert start.auth == OLD


def test_without_the_secret_no_other_work_is_stopped() -> None:
    other = computes(0, round_id="other")
    with_secret = planned(other, OLD, concurrencyPolicy="Replace", blockHeight=8)
    assert [type(action) for action in with_secret.actions] == [StopPod]
    bound = with_secret.status
    for status in (None, bound):
        assert planned(other, MISSING, status, concurrencyPolicy="Replace", blockHeight=8).actions == []


def test_a_round_whose_secret_goes_away_computes_on() -> None:
    step = planned(GENERATING, MISSING, RUNNING)
    assert step.actions == []
    assert [slot.state for slot in step.status.assignments] == [SlotState.RUNNING]
    assert reasons(step)["Accepted"] == ("True", "Accepted")
    assert reasons(step)["Degraded"] == ("True", Reason.CALLBACK_SECRET_UNAVAILABLE)
    assert step.status.degraded == "CallbackSecretUnavailable"


def test_a_lost_slot_waits_for_the_secret() -> None:
    lost = a_status(a_slot(None, SlotState.WAITING, start=5, next=5, delivered=5))
    assert planned(says(), MISSING, lost).actions == []
    assert planned(says(), MISSING, lost).status.degraded == "CallbackSecretUnavailable"
    (start,) = starts(planned(says(), OLD, lost))
    assert (start.auth, start.request.start_index) == (OLD, 5)


def test_a_pod_is_told_another_password_once() -> None:
    told = replace(GENERATING, told_auth=OLD)
    assert starts(planned(told, OLD, RUNNING)) == []
    (start,) = starts(planned(told, NEW, RUNNING))
    assert (start.auth, start.request.start_index) == (NEW, 0)
    assert starts(planned(replace(told, told_auth=NEW), NEW, RUNNING)) == []


def test_a_new_operator_tells_all_pods_again() -> None:
    (start,) = starts(planned(GENERATING, OLD, RUNNING))
    assert start.auth == OLD


@pytest.mark.parametrize(
    "report",
    [
        replace(GENERATING, resumes=False),
        says(PowState.GENERATING, session="s2", next_index=5),
        PodReport(error="no answer within 5 s"),
    ],
    ids=["reference pod", "restarted", "silent"],
)
def test_a_pod_that_would_not_understand_is_not_told_another_password(report: PodReport) -> None:
    assert starts(planned(report, NEW, RUNNING)) == []


def test_a_plan_that_is_printed_has_no_password() -> None:
    step = planned(says(), BasicAuth("someone", "s3cret"))
    assert "s3cret" not in repr(step)
    assert "someone" not in repr(step)
