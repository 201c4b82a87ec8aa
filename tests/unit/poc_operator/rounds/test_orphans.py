# SPDX-License-Identifier: Apache-2.0
"""Pods that compute a slot of the round which is not theirs, and pods that do not stop."""

from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import StartPod, StopPod
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import NOW, a_config, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState

STARTING: dict[str, Any] = {"state": SlotState.STARTING, "start": 8, "next": 8, "delivered": 8}


def computes(group: int, **fields: Any) -> PodReport:  # noqa: ANN401 - fields of StatusResponse
    config = a_config(group_id=group, n_groups=2)
    return says(PowState.GENERATING, config=config, **fields)


def planned(status: RoundStatus, *reports: tuple[str, PodReport], after: float = 0, suspend: bool = False) -> RoundStep:
    round_ = a_round(status.model_copy(update={"groups": 2, "slots": 2}), suspend=suspend)
    return plan(look(round_, *((a_pod(name), report) for name, report in reports), after=after))


def told(step: RoundStep) -> list[tuple[type, str]]:
    return [(type(action), action.pod.uid) for action in step.actions if isinstance(action, StartPod | StopPod)]


def test_a_pod_that_computes_another_slot_is_not_taken_for_this_ones() -> None:
    status = a_status(a_slot(None, SlotState.WAITING, group=0), a_slot("a", group=1, **STARTING))
    step = planned(status, ("a", computes(0, next_index=50, delivered_index=50)))
    assert step.status.assignments[1].state is SlotState.STARTING
    assert step.status.assignments[1].delivered == 8
    assert told(step) == [(StopPod, "a")]


def test_a_slot_is_not_started_while_a_stray_computes_it() -> None:
    status = a_status(a_slot("b", group=0, **STARTING), a_slot("c", SlotState.RUNNING, group=1, session="s3"))
    running = ("c", computes(1, session="s3"))
    assert told(planned(status, ("a", computes(0)), ("b", says(session="s2")), running)) == [(StopPod, "a")]
    assert told(planned(status, ("a", says()), ("b", says(session="s2")), running)) == [(StartPod, "b")]


@pytest.mark.parametrize(("report", "state"), [(computes(0), "Suspending"), (PodReport(error="silent"), "Suspended")])
def test_only_a_silent_pod_is_given_up_when_it_does_not_stop(report: PodReport, state: str) -> None:
    status = a_status(a_slot(group=0), a_slot(None, SlotState.DONE, group=1), stop_time=NOW)
    step = planned(status, ("a", report), after=100, suspend=True)
    assert step.status.state == state
    assert told(step) == ([(StopPod, "a")] if report.status is not None else [])


def test_a_pod_that_is_heard_again_after_it_was_given_up_is_stopped() -> None:
    done = a_status(a_slot(state=SlotState.DONE, group=0), a_slot(None, SlotState.DONE, group=1), stop_time=NOW)
    assert told(planned(done, ("a", computes(0)), suspend=True)) == [(StopPod, "a")]
