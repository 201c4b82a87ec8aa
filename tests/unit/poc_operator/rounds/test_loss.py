# SPDX-License-Identifier: Apache-2.0
"""A pod that gets nothing done is stopped and told again; one that cannot be helped is deleted."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

import pytest

from poc_operator.apis.v1alpha1.round import Assignment, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import DeletePod, StopPod
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from poc_operator.rounds.summary import FINDINGS
from tests.unit.poc_operator.build import NOW, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState

GENERATING, STOPPED = PowState.GENERATING, PowState.STOPPED
OURS = {"round_id": "round-uid"}
DEFAULTS: Mapping[str, str] = {}
DELETES = {"action": "DeletePod"}
STALLED = a_slot(state=SlotState.STALLED, session="s1", next=10, delivered=8, stalls=1, error="pod a stands still")


def stuck(seconds: float) -> PodReport:
    return replace(says(GENERATING, next_index=10, delivered_index=8), stalled_seconds=seconds)


def planned(
    slot: Assignment, report: PodReport, *, stall: Mapping[str, str] = DEFAULTS, stop_time: datetime | None = None
) -> RoundStep:
    round_ = a_round(a_status(slot, stop_time=stop_time), stall=stall)
    return plan(look(round_, (a_pod("a"), report)))


def only_slot(status: RoundStatus) -> Assignment:
    return status.assignments[0]


@pytest.mark.parametrize(("seconds", "state"), [(119, SlotState.RUNNING), (120, SlotState.STALLED)])
def test_a_pod_stalls_after_the_time_of_the_spec(seconds: float, state: SlotState) -> None:
    assert only_slot(planned(a_slot(), stuck(seconds)).status).state is state


@pytest.mark.parametrize(
    ("max_tokens", "batch_seconds", "seconds", "state"),
    [
        (256, 25, 127, SlotState.RUNNING),
        (256, 25, 128, SlotState.STALLED),
        (256, 100, 199, SlotState.RUNNING),
        (256, 100, 200, SlotState.STALLED),
        (16, 0, 10, SlotState.STALLED),
        (16, 6, 11, SlotState.RUNNING),
    ],
)
def test_a_batch_of_chains_is_no_stall(max_tokens: int, batch_seconds: float, seconds: float, state: SlotState) -> None:
    """Within a batch the pod's index stands still, however well it computes."""
    round_ = a_round(a_status(a_slot()), stall={"afterSeconds": 10}, rTarget=None, decode={"maxTokens": max_tokens})
    report = replace(stuck(seconds), batch_seconds=batch_seconds)
    assert only_slot(plan(look(round_, (a_pod("a"), report))).status).state is state


def test_a_stalled_pod_is_stopped_and_named() -> None:
    step = planned(a_slot(), stuck(130))
    slot = only_slot(step.status)
    assert (slot.state, slot.stalls, slot.error) == (SlotState.STALLED, 1, "pod a has made no progress for 130 s")
    assert [(type(action), action.round_id) for action in step.actions if isinstance(action, StopPod)] == [
        (StopPod, "round-uid")
    ]
    assert [(event.reason, event.warning) for event in step.events] == [("Stalled", True)]
    degraded = next(condition for condition in step.status.own_conditions if condition.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "SlotsStalled")
    assert "pod a has made no progress" in degraded.message


def test_it_is_told_of_once() -> None:
    assert planned(STALLED, stuck(200)).events == []


def test_what_it_had_delivered_is_kept_when_it_has_stopped() -> None:
    slot = only_slot(planned(STALLED, says(STOPPED, next_index=10, delivered_index=9, **OURS)).status)
    assert (slot.state, slot.start, slot.attempts, slot.stalls) == (SlotState.STARTING, 9, 2, 1)
    assert slot.error == STALLED.error


def test_a_pod_that_gets_on_again_runs() -> None:
    step = planned(STALLED, says(GENERATING, next_index=18, delivered_index=8))
    assert (only_slot(step.status).state, only_slot(step.status).error) == (SlotState.RUNNING, None)
    assert step.actions == []


@pytest.mark.parametrize(("start", "reason"), [(10, "SlotsStalled"), (8, "AllSlotsWork")])
def test_it_counts_as_stalled_until_it_gets_on(start: int, reason: str) -> None:
    again = {"state": SlotState.RUNNING, "start": start, "delivered": start, "error": None}
    report = says(GENERATING, start_index=start, next_index=10, delivered_index=start)
    step = planned(STALLED.model_copy(update=again), report)
    assert only_slot(step.status).state is SlotState.RUNNING
    degraded = next(condition for condition in step.status.own_conditions if condition.type == "Degraded")
    assert degraded.reason == reason
    assert ("pod a stalled, was told to start again" in degraded.message) == (reason == "SlotsStalled")


@pytest.mark.parametrize(("end", "reasons"), [(None, ["SlotsStalled"]), (90, ["SlotsStalled"]), (10, [])])
def test_a_pod_that_was_dealt_nothing_does_not_stall(end: int | None, reasons: list[str]) -> None:
    round_ = a_round(a_status(STALLED.model_copy(update={"state": SlotState.RUNNING, "start": 10, "end": end})))
    snapshot = look(round_, (a_pod("a"), says(GENERATING, start_index=10, next_index=10, delivered_index=10)))
    found = [one[0] for finding in FINDINGS if (one := finding(snapshot, round_.status))]
    assert [reason for reason in found if reason == "SlotsStalled"] == reasons


def test_a_pod_that_stalls_again_is_deleted_if_the_round_allows_it() -> None:
    again = STALLED.model_copy(update={"state": SlotState.RUNNING})
    assert [type(action) for action in planned(again, stuck(130)).actions] == [StopPod]
    assert [type(action) for action in planned(again, stuck(130), stall=DELETES).actions] == [DeletePod]
    assert [type(action) for action in planned(a_slot(), stuck(130), stall=DELETES).actions] == [StopPod]


def test_a_silent_pod_keeps_its_slot_and_is_deleted_only_if_the_round_allows_it() -> None:
    silent = PodReport(error="no answer within 5 s", silent_seconds=300)
    step = planned(a_slot(), silent)
    assert only_slot(step.status).state is SlotState.STALLED
    assert only_slot(step.status).pod == "a"
    assert "has not answered for 300 s: no answer within 5 s" in (only_slot(step.status).error or "")
    assert step.actions == []
    assert [type(action) for action in planned(a_slot(), silent, stall=DELETES).actions] == [DeletePod]


def test_a_short_silence_is_patience() -> None:
    step = planned(a_slot(), PodReport(error="no answer", silent_seconds=299), stall=DELETES)
    assert (only_slot(step.status).state, step.actions) == (SlotState.RUNNING, [])


def test_a_round_that_ends_waits_for_no_progress() -> None:
    step = planned(a_slot(), stuck(500), stop_time=NOW)
    assert only_slot(step.status).state is SlotState.RUNNING
    assert [type(action) for action in step.actions] == [StopPod]


def test_a_new_pod_begins_without_stalls() -> None:
    round_ = a_round(a_status(STALLED))
    slot = only_slot(plan(look(round_, (a_pod("a", gone=True), None))).status)
    assert (slot.state, slot.stalls, slot.pod) == (SlotState.WAITING, 0, None)


def test_a_stalled_pod_that_was_evicted_for_it_counts_as_a_retry() -> None:
    """An eviction looks like what the cluster does by itself, which is free."""
    gone = a_pod("a", gone=True, disrupted=True)
    for stall, disruptions in ((DELETES, 0), (DEFAULTS, 1)):
        slot = only_slot(plan(look(a_round(a_status(STALLED), stall=stall), (gone, None))).status)
        assert (slot.state, slot.attempts, slot.disruptions) == (SlotState.WAITING, 2, disruptions)
