# SPDX-License-Identifier: Apache-2.0
"""A slot leaves its pod when the pod has stopped for certain: by its own word, by its lease, or with its object."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.leases import recorded_end
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.lifecycle import complete
from poc_operator.planning.snapshot import Loss, StartPod, StopPod
from poc_operator.rounds.leaving import renewal
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import NOW, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState

GENERATING, IDLE, STOPPED = PowState.GENERATING, PowState.IDLE, PowState.STOPPED
END = NOW + timedelta(seconds=1000)
OURS = {"round_id": "round-uid"}
RUNNING = a_slot(next=10, delivered=8, valid=3)
STARTING = a_slot(state=SlotState.STARTING)
COMPUTES = says(GENERATING, next_index=20, delivered_index=16, delivered_valid=5)
HAS_STOPPED = says(STOPPED, next_index=20, delivered_index=20, delivered_valid=6, **OURS)
SILENT = PodReport(error="no answer within 5 s", silent_seconds=20)
SPARE = (a_pod("b"), says(session="s2"))

#: How a pod leaves, and what is said of it.
WAYS: Mapping[str, str] = {"deleted": "pod a is being deleted", "relabelled": "pod a is not selected any more"}
MOVES_ON: Mapping[str, str] = {"deleted": " when its pod has ended,", "relabelled": ""}
ways = pytest.mark.parametrize("way", WAYS)


def round_with(slot: Assignment, *, end: bool = True, **fields: Any) -> PoCRound:  # noqa: ANN401 - fields of the status
    return a_round(a_status(slot, lease_end_time=END if end else None, **fields), age=50_000)


def leaves(way: str, report: PodReport, round_: PoCRound, *, after: float = 0, spare: bool = True) -> RoundStep:
    """What is planned when the pod leaves in this way and reports this, with a spare beside it."""
    pods = [SPARE] if spare else []
    if way == "deleted":
        return plan(look(round_, (a_pod("a", terminating=True), report), *pods, after=after))
    return plan(look(round_, *pods, others=[(a_pod("a", labels={}), report)], after=after))


def only_slot(step: RoundStep) -> Assignment:
    return step.status.assignments[0]


def told(step: RoundStep) -> list[tuple[type, str]]:
    return [(type(action), action.pod.uid) for action in step.actions if isinstance(action, StartPod | StopPod)]


def condition(status: RoundStatus, kind: str) -> tuple[str, str]:
    found = next(condition for condition in status.own_conditions if condition.type == kind)
    return found.reason, found.message


@ways
@pytest.mark.parametrize("slot", [RUNNING, STARTING], ids=["running", "starting"])
def test_a_pod_that_leaves_keeps_its_slot_and_is_told_to_stop(way: str, slot: Assignment) -> None:
    step = leaves(way, COMPUTES, round_with(slot))
    left = only_slot(step)
    assert (left.state, left.uid, left.lease_end_time, left.error) == (SlotState.LEAVING, "a", END, WAYS[way])
    assert (left.session, left.next, left.delivered) == ("s1", 20, 16)
    assert told(step) == [(StopPod, "a")]
    assert condition(step.status, "Degraded") == (
        "SlotsLeaving",
        "1 slot waits for its pod to stop; the first moves on"
        f"{MOVES_ON[way]} by 2026-01-01T12:16:40Z at the latest: {WAYS[way]}",
    )


@ways
def test_the_slot_moves_on_when_the_pod_has_stopped_and_its_last_deliveries_count(way: str) -> None:
    leaving = only_slot(leaves(way, COMPUTES, round_with(RUNNING)))
    step = leaves(way, HAS_STOPPED, round_with(leaving))
    slot = only_slot(step)
    assert (slot.state, slot.uid, slot.start, slot.valid) == (SlotState.STARTING, "b", 20, 6)
    assert (slot.lease_end_time, slot.error) == (None, WAYS[way])
    assert told(step) == [(StartPod, "b")]
    assert [(event.reason, event.loss) for event in step.events] == [("WorkLost", Loss.POD_LEFT)]


@ways
@pytest.mark.parametrize(
    "report",
    [
        pytest.param(says(IDLE, session="s9"), id="restarted"),
        pytest.param(says(GENERATING, round_id="other"), id="other work"),
        pytest.param(says(IDLE), id="says nothing of it"),
        pytest.param(says(PowState.VALIDATING, round_id="round-uid"), id="validates"),
    ],
)
def test_a_pod_that_computes_something_else_or_nothing_gives_the_slot_back(way: str, report: PodReport) -> None:
    slot = only_slot(leaves(way, report, round_with(RUNNING)))
    assert (slot.uid, slot.start) == ("b", 8)


@ways
@pytest.mark.parametrize(
    "report",
    [
        pytest.param(replace(says(IDLE), in_flight=True), id="a start is on its way"),
        pytest.param(replace(says(IDLE), started="s1"), id="it took a start just now"),
    ],
)
def test_a_pod_that_may_have_been_started_just_now_keeps_the_slot(way: str, report: PodReport) -> None:
    step = leaves(way, report, round_with(STARTING))
    assert (only_slot(step).state, only_slot(step).uid, told(step)) == (SlotState.LEAVING, "a", [])


@ways
@pytest.mark.parametrize(
    ("after", "leased", "end", "state"),
    [
        pytest.param(0, True, True, SlotState.LEAVING, id="at once"),
        pytest.param(999, True, True, SlotState.LEAVING, id="before its lease has run out"),
        pytest.param(1000, True, True, SlotState.STARTING, id="when its lease has run out"),
        pytest.param(10**6, False, True, SlotState.LEAVING, id="a pod that knows no leases"),
        pytest.param(10**6, True, False, SlotState.LEAVING, id="leases were never recorded"),
    ],
)
def test_a_silent_pod_keeps_its_slot_until_its_lease_has_run_out(
    way: str, after: float, leased: bool, end: bool, state: SlotState
) -> None:
    round_ = round_with(RUNNING.model_copy(update={"leased": leased}), end=end)
    leaving = only_slot(leaves(way, SILENT, round_, spare=False))
    assert leaving.state is SlotState.LEAVING
    assert leaving.error == f"{WAYS[way]}, and does not answer: no answer within 5 s"
    step = leaves(way, SILENT, round_with(leaving, end=end), after=after)
    assert only_slot(step).state is state
    assert told(step) == ([(StartPod, "b")] if state is SlotState.STARTING else [])


def test_what_a_lease_ended_costs_no_retry() -> None:
    leaving = only_slot(leaves("deleted", SILENT, round_with(RUNNING)))
    step = leaves("deleted", SILENT, round_with(leaving), after=1000)
    assert (only_slot(step).attempts, only_slot(step).disruptions) == (2, 1)
    assert step.events[0].loss is Loss.LEASE_EXPIRED
    assert "does not answer" not in (only_slot(step).error or "")


def test_the_end_of_the_lease_stays_as_it_was_when_the_pod_began_to_leave() -> None:
    """Those of other pods are renewed meanwhile."""
    leaving = only_slot(leaves("deleted", SILENT, round_with(RUNNING)))
    later = a_round(a_status(leaving, lease_end_time=END + timedelta(hours=1)), age=50_000)
    assert only_slot(leaves("deleted", SILENT, later, after=900)).lease_end_time == END


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([], id="no object any more"),
        pytest.param([a_pod("a", gone=True)], id="all containers have ended"),
        pytest.param([a_pod("a", gone=True, terminating=True)], id="deleted and ended"),
    ],
)
def test_a_pod_that_is_gone_frees_its_slot_at_once(pods: list[PodView]) -> None:
    slot = only_slot(plan(look(round_with(RUNNING), *[(pod, None) for pod in pods], SPARE)))
    assert (slot.state, slot.uid) == (SlotState.STARTING, "b")


def test_a_pod_that_is_selected_again_stops_all_the_same_and_may_have_a_slot_anew() -> None:
    leaving = only_slot(leaves("relabelled", COMPUTES, round_with(RUNNING)))
    back = plan(look(round_with(leaving), (a_pod("a"), COMPUTES)))
    assert (only_slot(back).state, told(back)) == (SlotState.LEAVING, [(StopPod, "a")])
    stopped = plan(look(round_with(only_slot(back)), (a_pod("a"), HAS_STOPPED)))
    assert (only_slot(stopped).state, only_slot(stopped).uid, only_slot(stopped).start) == (SlotState.STARTING, "a", 20)


def test_pods_that_leave_get_no_slot() -> None:
    step = plan(look(a_round(), (a_pod("a", terminating=True), says()), (a_pod("b"), says(session="s2"))))
    assert [slot.uid for slot in step.status.assignments] == ["b"]


def test_an_orphan_that_is_being_deleted_is_stopped_and_holds_its_slot() -> None:
    waiting = a_slot(None, SlotState.STARTING).model_copy(update={"pod": "b", "uid": "b"})
    orphan = (a_pod("a", terminating=True), says(GENERATING, config=None))
    assert told(plan(look(round_with(waiting), orphan, SPARE)))[0] == (StopPod, "a")


@ways
def test_a_round_that_ends_waits_for_the_pods_that_leave(way: str) -> None:
    leaving = only_slot(leaves(way, COMPUTES, round_with(RUNNING)))
    ending = round_with(leaving, stop_time=NOW, outcome=complete("spec.finish is set"))
    step = leaves(way, COMPUTES, ending)
    assert (only_slot(step).state, told(step)) == (SlotState.LEAVING, [(StopPod, "a")])
    done = only_slot(leaves(way, HAS_STOPPED, ending))
    assert (done.state, done.delivered, done.valid, done.unconfirmed) == (SlotState.DONE, 20, 6, False)


@pytest.mark.parametrize("state", [SlotState.RUNNING, SlotState.LEAVING])
def test_a_suspended_round_that_goes_on_waits_for_a_pod_that_never_confirmed_its_stop(state: SlotState) -> None:
    slot = RUNNING.model_copy(update={"state": state})
    pods = ((a_pod("a"), SILENT), SPARE)
    suspended = round_with(slot, stop_time=NOW)
    suspended = suspended.model_copy(update={"spec": suspended.spec.model_copy(update={"suspend": True})})
    settled = only_slot(plan(look(suspended, *pods, after=100)))
    assert (settled.state, settled.unconfirmed, settled.lease_end_time) == (SlotState.DONE, True, END)
    resumed = plan(look(round_with(settled, stop_time=NOW), *pods, after=200))
    assert (only_slot(resumed).state, told(resumed)) == (SlotState.LEAVING, [])
    freed = plan(look(round_with(only_slot(resumed)), *pods, after=1000))
    assert (only_slot(freed).state, only_slot(freed).uid, only_slot(freed).unconfirmed) == (
        SlotState.STARTING,
        "b",
        False,
    )


def test_a_silent_pod_that_stays_loses_its_slot_when_its_lease_has_run_out() -> None:
    silent = replace(SILENT, silent_seconds=300)
    stalled = only_slot(plan(look(round_with(RUNNING), (a_pod("a"), silent), SPARE)))
    assert (stalled.state, stalled.lease_end_time) == (SlotState.STALLED, END)
    held = only_slot(plan(look(round_with(stalled), (a_pod("a"), silent), SPARE, after=999)))
    assert (held.state, held.uid) == (SlotState.STALLED, "a")
    moved = only_slot(plan(look(round_with(stalled), (a_pod("a"), silent), SPARE, after=1000)))
    assert (moved.state, moved.uid) == (SlotState.STARTING, "b")


def test_a_pod_that_answers_again_in_time_has_its_lease_renewed_again() -> None:
    stalled = RUNNING.model_copy(update={"state": SlotState.STALLED, "lease_end_time": END})
    slot = only_slot(plan(look(round_with(stalled), (a_pod("a"), COMPUTES))))
    assert (slot.state, slot.lease_end_time) == (SlotState.RUNNING, None)


def test_a_pod_whose_lease_ran_out_is_started_again_and_that_costs_no_retry() -> None:
    """As after a time without an operator."""
    assert HAS_STOPPED.status is not None
    told = {"stop_reason": "LeaseExpired", "stop_message": "the lease ran out"}
    expired = replace(HAS_STOPPED, status=HAS_STOPPED.status.model_copy(update=told))
    step = plan(look(round_with(RUNNING), (a_pod("a"), expired)))
    slot = only_slot(step)
    assert (slot.state, slot.uid, slot.start, slot.attempts, slot.disruptions) == (SlotState.STARTING, "a", 20, 2, 1)
    assert step.events[0].message.startswith("node 0 group 0: pod a stopped: the lease ran out")


# What is recorded, and renewed.


@pytest.mark.parametrize(
    ("state", "stopping", "renewed"),
    [
        (SlotState.STARTING, False, True),
        (SlotState.RUNNING, False, True),
        (SlotState.WAITING, False, False),
        (SlotState.STALLED, False, False),
        (SlotState.LEAVING, False, False),
        (SlotState.DONE, False, False),
        (SlotState.FAILED, False, False),
        (SlotState.RUNNING, True, False),
    ],
)
def test_only_pods_that_are_to_compute_on_have_their_leases_renewed(
    state: SlotState, stopping: bool, renewed: bool
) -> None:
    slot = RUNNING.model_copy(update={"state": state})
    found = renewal(round_with(slot, stop_time=NOW if stopping else None), 100)
    assert (found is not None and found.is_of("a", NOW)) is renewed


def test_nothing_is_renewed_before_it_is_recorded_when_the_leases_end() -> None:
    assert renewal(round_with(RUNNING, end=False), 100) is None


def test_the_first_start_finds_the_end_of_its_lease_recorded() -> None:
    step = plan(look(a_round(), (a_pod("a"), says()), lease_seconds=120))
    start = next(action for action in step.actions if isinstance(action, StartPod))
    assert start.request.lease_seconds == 120
    assert step.status.lease_end_time == recorded_end(None, NOW, 120)


@pytest.mark.parametrize(("leases", "leased"), [(True, True), (False, False)])
def test_it_is_recorded_whether_the_pod_knows_leases(leases: bool, leased: bool) -> None:
    assert only_slot(plan(look(a_round(), (a_pod("a"), says(leases=leases))))).leased is leased


def test_a_pod_that_computes_without_a_lease_is_not_taken_to_have_one() -> None:
    """As one that an operator without leases has started, until a poll gives it one."""
    assert COMPUTES.status is not None
    unleased = replace(COMPUTES, status=COMPUTES.status.model_copy(update={"lease_remaining_seconds": None}))
    slot = only_slot(plan(look(round_with(RUNNING), (a_pod("a"), unleased))))
    assert not slot.leased
    assert only_slot(plan(look(round_with(slot), (a_pod("a"), COMPUTES)))).leased
