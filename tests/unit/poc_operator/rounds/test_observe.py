# SPDX-License-Identifier: Apache-2.0
"""What happened to a slot, told from its pod's report."""

from dataclasses import replace

import pytest

from poc_operator.apis.v1alpha1.round import Assignment
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import PodReport
from poc_operator.rounds.observe import observe
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from tests.unit.poc_operator.build import NOW, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState

GENERATING, IDLE, STOPPED, FAILED = PowState.GENERATING, PowState.IDLE, PowState.STOPPED, PowState.FAILED


def observed(snapshot: RoundSnapshot) -> Assignment:
    return observe(snapshot, RoundStep(status=snapshot.round.status)).status.assignments[0]


STARTING = a_slot(state=SlotState.STARTING)
RUNNING = a_slot(next=10, delivered=8, valid=3)
OURS = {"round_id": "round-uid"}


@pytest.mark.parametrize(
    ("slot", "report", "expected"),
    [
        pytest.param(STARTING, says(GENERATING), {"state": SlotState.RUNNING, "session": "s1"}, id="adopted"),
        pytest.param(
            STARTING,
            says(IDLE).__class__(started="s9", status=says(IDLE).status),
            {"state": SlotState.RUNNING, "session": "s9"},
            id="start accepted",
        ),
        pytest.param(STARTING, says(IDLE), {"state": SlotState.STARTING, "error": None}, id="not told yet"),
        pytest.param(
            STARTING,
            says(GENERATING, round_id="other"),
            {"state": SlotState.WAITING, "error": "pod a computes round other", "attempts": 2, "disruptions": 1},
            id="foreign round",
        ),
        pytest.param(
            RUNNING,
            says(GENERATING, next_index=20, delivered_index=16, delivered_valid=5, rate_per_second=2.5),
            {"next": 20, "delivered": 16, "valid": 5, "attempts": 1},
            id="progress",
        ),
        pytest.param(
            RUNNING,
            PodReport(error="no answer within 5 s"),
            {"state": SlotState.RUNNING, "next": 10, "error": "no answer within 5 s"},
            id="unreachable keeps everything",
        ),
        pytest.param(
            RUNNING,
            says(IDLE, session="s2"),
            {
                "state": SlotState.WAITING,
                "start": 8,
                "next": 8,
                "valid_before": 3,
                "attempts": 2,
                "session": None,
            },
            id="restarted resumes at what was delivered",
        ),
        pytest.param(
            RUNNING,
            says(GENERATING, round_id="other"),
            {"state": SlotState.WAITING, "attempts": 2, "previous": "a"},
            id="another round took the pod",
        ),
        pytest.param(
            RUNNING,
            says(FAILED, error="the engine died", delivered_index=9, delivered_valid=4, next_index=10, **OURS),
            {"state": SlotState.WAITING, "start": 9, "valid_before": 4, "attempts": 2},
            id="failed pod resumes at its own count",
        ),
        pytest.param(
            RUNNING,
            says(STOPPED, **OURS),
            {"state": SlotState.STARTING, "attempts": 2},
            id="stopped by somebody",
        ),
        pytest.param(
            RUNNING,
            says(STOPPED, stop_reason="ServerEnds", stop_message="the server ends", **OURS),
            {"state": SlotState.WAITING, "previous": "a", "error": "pod a stopped: the server ends"},
            id="the server ends",
        ),
        pytest.param(
            RUNNING,
            says(IDLE, next_index=2**31, delivered_index=2**31, delivered_valid=3, **OURS),
            {"state": SlotState.DONE},
            id="all nonces computed",
        ),
    ],
)
def test_slot_with_its_pod(slot: Assignment, report: PodReport, expected: dict[str, object]) -> None:
    slot = observed(look(a_round(a_status(slot), age=50_000), (a_pod("a"), report)))
    assert {name: getattr(slot, name) for name in expected} == expected


def test_slot_of_a_pod_that_is_gone_waits_for_another() -> None:
    slot = observed(look(a_round(a_status(RUNNING)), (a_pod("a", gone=True), says(GENERATING))))
    assert (slot.state, slot.pod, slot.uid, slot.start) == (SlotState.WAITING, None, None, 8)
    assert slot.error == "pod a is gone"


@pytest.mark.parametrize(
    ("retry", "error"),
    [
        ({"policy": "Never"}, "spec.retry.policy is Never"),
        ({"backoffLimitPerSlot": 0}, "spec.retry.backoffLimitPerSlot of 0 is used up"),
        ({"backoffLimit": 0}, "spec.retry.backoffLimit of 0 is used up"),
    ],
)
def test_lost_work_is_given_up_when_the_budget_is_used_up(retry: dict[str, object], error: str) -> None:
    slot = observed(look(a_round(a_status(RUNNING), retry=retry), (a_pod("a"), says(session="s2"))))
    assert slot.state is SlotState.FAILED
    assert slot.error is not None
    assert error in slot.error


@pytest.mark.parametrize("retry", [{"backoffLimitPerSlot": 1}, {"backoffLimit": 1}])
def test_what_the_cluster_disrupts_is_free_of_charge(retry: dict[str, object]) -> None:
    used_up = RUNNING.model_copy(update={"attempts": 2})
    status = a_status(used_up, totals={"retries": 1})
    lost = observed(look(a_round(status, retry=retry), (a_pod("a", gone=True), None)))
    assert lost.state is SlotState.FAILED
    spared = observed(look(a_round(status, retry=retry), (a_pod("a", gone=True, disrupted=True), None)))
    assert (spared.state, spared.attempts, spared.disruptions) == (SlotState.WAITING, 3, 1)
    assert spared.error == "pod a is gone (disrupted by the cluster)"


@pytest.mark.parametrize("retry", [{"backoffLimitPerSlot": 0}, {"backoffLimit": 0}])
def test_a_deleted_pod_that_has_stopped_is_free_of_charge(retry: dict[str, object]) -> None:
    """A scale-down takes pods without telling of a disruption."""
    leaving = RUNNING.model_copy(update={"state": SlotState.LEAVING})
    round_ = a_round(a_status(leaving), retry=retry)
    spared = observed(look(round_, (a_pod("a", terminating=True), says(PowState.STOPPED))))
    assert (spared.state, spared.disruptions) == (SlotState.WAITING, 1)
    # One that ends without a word is a loss.
    lost = observed(look(round_, (a_pod("a", gone=True), None)))
    assert lost.state is SlotState.FAILED


def test_policy_restart_begins_at_the_first_nonce() -> None:
    round_ = a_round(a_status(RUNNING), retry={"policy": "Restart"})
    slot = observed(look(round_, (a_pod("a"), says(session="s2"))))
    assert (slot.start, slot.next, slot.valid, slot.valid_before) == (0, 0, 0, 0)


def test_work_lost_while_stopping_is_not_given_out_again() -> None:
    round_ = a_round(a_status(RUNNING, stop_time=NOW))
    slot = observed(look(round_, (a_pod("a"), says(session="s2"))))
    assert (slot.state, slot.delivered, slot.attempts) == (SlotState.DONE, 8, 1)


def test_lost_work_is_told_by_one_event() -> None:
    snapshot = look(a_round(a_status(RUNNING)), (a_pod("a"), says(session="s2")))
    events = observe(snapshot, RoundStep(status=snapshot.round.status)).events
    assert [(event.reason, event.warning) for event in events] == [("WorkLost", True)]
    assert "starts again at index 8" in events[0].message


def test_a_start_that_failed_stands_in_the_slot_and_in_one_event() -> None:
    """Whatever the pod's server answered; the pod may have begun, so it keeps the slot."""
    report = replace(says(IDLE), start_error="HTTP 500: Internal Server Error")
    error = "pod a was told to start: HTTP 500: Internal Server Error"
    round_ = a_round(a_status(STARTING))
    for told in (1, 0):
        step = observe(look(round_, (a_pod("a"), report)), RoundStep(status=round_.status))
        assert [(slot.state, slot.error) for slot in step.status.assignments] == [(SlotState.STARTING, error)]
        assert len(step.events) == told
        round_ = round_.model_copy(update={"status": step.status})
    again = observe(look(round_, (a_pod("a"), says(IDLE))), RoundStep(status=round_.status))
    assert again.status.assignments[0].error == error
