# SPDX-License-Identifier: Apache-2.0
"""How rounds end, are suspended, and expire."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import Outcome, Result, SlotState, State
from poc_operator.observed import GatewayReport
from poc_operator.planning.snapshot import DeleteWork, StopPod
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import NOW, a_pod, a_round, a_slot, a_status, has, look, says
from vllm_poc.wire.answers import PowState

GENERATING, STOPPED = PowState.GENERATING, PowState.STOPPED
RUNNING = a_status(a_slot())
OURS = {"round_id": "round-uid"}


@pytest.mark.parametrize(
    ("spec", "counters", "after", "state", "reason"),
    [
        ({}, {"next_index": 100, "delivered_index": 99}, 0, State.RUNNING, None),
        ({}, {"next_index": 100, "delivered_index": 100}, 0, State.STOPPING, Reason.COMPLETED),
        (
            {"stop": {"afterValid": 5}},
            {"next_index": 9, "delivered_index": 9, "delivered_valid": 4},
            0,
            State.RUNNING,
            None,
        ),
        (
            {"stop": {"afterValid": 5}},
            {"next_index": 9, "delivered_index": 9, "delivered_valid": 5},
            0,
            State.STOPPING,
            Reason.COMPLETED,
        ),
        ({"stop": {"afterSeconds": 60}}, {}, 54, State.RUNNING, None),
        ({"stop": {"afterSeconds": 60}}, {}, 55, State.STOPPING, Reason.COMPLETED),
        ({"activeDeadlineSeconds": 60}, {}, 54, State.RUNNING, None),
        ({"activeDeadlineSeconds": 60}, {}, 55, State.STOPPING, Reason.DEADLINE_EXCEEDED),
        (
            {"activeDeadlineSeconds": 1},
            {"next_index": 100, "delivered_index": 100},
            0,
            State.STOPPING,
            Reason.COMPLETED,
        ),
    ],
)
def test_ends_of_a_running_round(
    spec: dict[str, Any], counters: dict[str, Any], after: int, state: State, reason: Reason | None
) -> None:
    step = plan(look(a_round(RUNNING, **spec), (a_pod("a"), says(GENERATING, **counters)), after=after))
    assert step.status.state is state
    assert (step.status.outcome.reason if step.status.outcome else None) == reason
    assert [type(action) for action in step.actions] == ([StopPod] if reason else [])


def test_a_stopped_pod_completes_the_round() -> None:
    stopping = plan(look(a_round(RUNNING), (a_pod("a"), says(GENERATING, next_index=100, delivered_index=100)))).status
    report = says(STOPPED, next_index=104, delivered_index=104, delivered_valid=9, **OURS)
    step = plan(look(a_round(stopping), (a_pod("a"), report)))
    assert step.status.state is State.COMPLETE
    assert (step.status.totals.checked, step.status.totals.delivered, step.status.totals.valid) == (
        104,
        104,
        9,
    )
    assert step.status.completion_time == NOW
    status = step.status
    assert (status.desired, status.running, status.done, status.failed) == (1, 0, 1, 0)
    assert status.totals.rate == "20.8", "the mean of the 5 s that it ran"


@pytest.mark.parametrize(("in_flight", "state"), [(True, State.STOPPING), (False, State.COMPLETE)])
def test_an_idle_pod_whose_stop_is_not_answered_holds_up_the_end(in_flight: bool, state: State) -> None:
    """Its last passes run, and what the next round begins beside them comes out wrong."""
    stopping = a_status(a_slot(next=104, delivered=104, valid=9), stop_time=NOW, outcome=_outcome())
    report = replace(says(PowState.IDLE), resumes=False, in_flight=in_flight)
    assert plan(look(a_round(stopping), (a_pod("a"), report), after=1)).status.state is state


def test_undelivered_results_are_told() -> None:
    stopping = a_status(a_slot(), stop_time=NOW, outcome=_outcome())
    report = says(STOPPED, next_index=104, delivered_index=100, **OURS)
    status = plan(look(a_round(stopping), (a_pod("a"), report))).status
    degraded = next(c for c in status.own_conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", Reason.DELIVERY_INCOMPLETE)
    assert "4 computed nonces were not delivered" in status.message


@pytest.mark.parametrize(("delivered", "message"), [(0, "; no result was delivered"), (100, "")])
def test_a_round_without_any_result_says_so(delivered: int, message: str) -> None:
    slot = a_slot(state=SlotState.DONE, next=delivered, delivered=delivered, valid=delivered)
    stopping = a_status(slot, stop_time=NOW, outcome=_outcome())
    status = plan(look(a_round(stopping), (a_pod("a"), says(STOPPED)), after=60)).status
    assert (status.state, status.message) == (State.COMPLETE, f"{_outcome()['message']}{message}")


def test_what_a_pod_that_cannot_resume_drops_at_its_stop_is_no_warning() -> None:
    """Such a pod never sends its last results: that is expected, and every round of theirs would end with it."""
    slot = a_slot(state=SlotState.DONE, next=104, delivered=100, valid=100, session="containerd://a#0")
    stopping = a_status(slot, stop_time=NOW, outcome=_outcome())
    seen = look(a_round(stopping, artifact={"kDim": 4}, rTarget=None), after=60, gateway=has((100, 100)))
    status = plan(seen).status
    assert (status.state, status.totals.checked, status.totals.delivered) == (State.COMPLETE, 104, 100)
    assert status.degraded == ""


def with_a_gap(stored: int, at: int = 10) -> GatewayReport:
    """So many of the first slot, the last at index 199, and nothing at one index."""
    gateway = has((stored, 200))
    assert gateway.collected is not None
    gateway.collected.slots[0] = gateway.collected.slots[0].model_copy(update={"delivered_index": at})
    return gateway


CHAINS: dict[str, Any] = {"decode": {"maxTokens": 4}, "rTarget": None}


def test_a_chain_that_a_reference_pod_leaves_out_stands_in_the_way_of_no_other() -> None:
    """Such pods drop a chain with a step that is not finite, and tell nobody: the gateway has it never."""
    told = replace(says(GENERATING, session="containerd://a#0", next_index=200), resumes=False)
    slot = a_slot(session="containerd://a#0")
    round_ = a_round(a_status(slot), **CHAINS, stop={"afterNonces": 199})
    running = plan(look(round_, (a_pod("a"), told), gateway=with_a_gap(198))).status
    assert (running.state, running.totals.delivered, running.totals.valid) == (State.RUNNING, 198, 198)
    stopping = plan(look(round_, (a_pod("a"), told), gateway=with_a_gap(199))).status
    assert stopping.outcome is not None
    assert stopping.outcome.message == "spec.stop.afterNonces of 199 reached"
    idle = replace(says(PowState.IDLE, session="containerd://a#0"), resumes=False)
    after = a_round(stopping, **CHAINS, stop={"afterNonces": 199})
    ended = plan(look(after, (a_pod("a"), idle), after=60, gateway=with_a_gap(199))).status
    assert (ended.state, ended.totals.delivered) == (State.COMPLETE, 199)
    assert "; 1 computed nonce was not delivered" in ended.message


def test_chains_behind_a_first_one_that_is_left_out_are_results() -> None:
    """Also while a pod that has restarted computes them anew."""
    slot = a_slot(next=5, session="containerd://a#0")
    round_ = a_round(a_status(slot), **CHAINS, stop={"afterNonces": 199})
    told = replace(says(GENERATING, session="containerd://a#0", next_index=5), resumes=False)
    ending = plan(look(round_, (a_pod("a"), told), gateway=with_a_gap(199, at=0))).status
    assert (ending.totals.checked, ending.totals.delivered) == (199, 199)
    idle = replace(says(PowState.IDLE, session="containerd://a#0"), resumes=False)
    after = a_round(ending, **CHAINS, stop={"afterNonces": 199})
    ended = plan(look(after, (a_pod("a"), idle), after=60, gateway=with_a_gap(199, at=0))).status
    assert (ended.state, ended.message) == (State.COMPLETE, "spec.stop.afterNonces of 199 reached")


@pytest.mark.parametrize(("next_index", "rate"), [(200, "0.0"), (500, "50.0")], ids=["again", "beyond"])
def test_work_that_is_repeated_is_no_rate(next_index: int, rate: str) -> None:
    """A pod that cannot resume begins anew, and computes for a while what the gateway has."""
    session = "containerd://a#1"
    slot = a_slot(next=500, delivered=500, valid=500, session=session)
    told = says(GENERATING, session=session, next_index=next_index, rate_per_second=50.0)
    seen = look(
        a_round(a_status(slot), artifact={"kDim": 4}, rTarget=None, stop=None),
        (a_pod("a"), replace(told, resumes=False)),
        gateway=has((500, 500)),
    )
    assert plan(seen).status.totals.rate == rate


def _outcome() -> dict[str, str]:
    return {"type": "Complete", "reason": "Completed", "message": "enough"}


def test_an_unreachable_pod_delays_the_end_only_so_long() -> None:
    stopping = a_status(a_slot(), stop_time=NOW, outcome=_outcome())
    early = plan(look(a_round(stopping), (a_pod("a"), None), after=89)).status
    late = plan(look(a_round(stopping), (a_pod("a"), None), after=90)).status
    assert (early.state, late.state) == (State.STOPPING, State.COMPLETE)


@pytest.mark.parametrize(("age", "failed"), [(899, False), (900, True)])
def test_a_round_without_pods_fails_at_its_start_deadline(age: int, failed: bool) -> None:
    status = plan(look(a_round(age=age))).status
    assert (status.state is State.FAILED) is failed
    if failed:
        assert status.outcome is not None
        assert status.outcome.reason == Reason.START_DEADLINE_EXCEEDED


def test_pods_that_never_answer_again_fail_the_round() -> None:
    lost = plan(look(a_round(RUNNING), (a_pod("a"), None))).status
    assert lost.poll_failure_time == NOW
    assert lost.state is State.RUNNING
    failed = plan(look(a_round(lost), (a_pod("a"), None), after=300)).status
    assert failed.outcome is not None
    assert failed.outcome.reason == Reason.PODS_UNREACHABLE


def test_one_answer_ends_the_poll_failure() -> None:
    lost = a_status(a_slot(), poll_failure_time=NOW - timedelta(seconds=299))
    assert plan(look(a_round(lost), (a_pod("a"), says(GENERATING)))).status.poll_failure_time is None


def test_every_slot_given_up_fails_the_round() -> None:
    status = a_status(a_slot(state=SlotState.FAILED, error="gave up"))
    ended = plan(look(a_round(status), (a_pod("a"), says()))).status
    assert ended.state is State.FAILED
    assert ended.outcome is not None
    assert ended.outcome.message == "1 of 1 slots were given up, the first: gave up"


def test_a_round_whose_other_slots_are_computed_does_not_wait_for_those_given_up() -> None:
    lost, whole = a_slot(state=SlotState.FAILED, error="gave up"), a_slot("b", group=1, state=SlotState.DONE)
    status = a_status(lost, whole, a_slot("c", group=2, state=SlotState.RUNNING))
    assert plan(look(a_round(status), (a_pod("c"), says(GENERATING)))).status.outcome is None
    ended = plan(look(a_round(a_status(lost, whole)), (a_pod("a"), says()))).status
    assert ended.outcome is not None
    assert (ended.outcome.type, ended.outcome.reason) == (Result.FAILED, Reason.BACKOFF_LIMIT_EXCEEDED)
    assert "1 of 2 slots" in ended.outcome.message


def test_suspend_stops_and_resume_goes_on_after_what_was_delivered() -> None:
    pod = a_pod("a")
    suspending = plan(look(a_round(RUNNING, suspend=True), (pod, says(GENERATING, next_index=10)))).status
    assert suspending.state is State.SUSPENDING
    stopped = says(STOPPED, next_index=12, delivered_index=12, delivered_valid=2, **OURS)
    suspended = plan(look(a_round(suspending, suspend=True), (pod, stopped))).status
    assert suspended.state is State.SUSPENDED
    still = plan(look(a_round(suspended, suspend=True), (pod, stopped), after=10_000)).status
    assert (still.state, still.outcome) == (State.SUSPENDED, None)
    step = plan(look(a_round(suspended), (pod, stopped)))
    assert step.status.assignments[0].start == 12
    assert step.status.assignments[0].valid_before == 2
    assert len(step.actions) == 1


def test_a_round_created_suspended_starts_nothing() -> None:
    step = plan(look(a_round(suspend=True), (a_pod("a"), says())))
    assert (step.status.state, list(step.actions)) == (State.SUSPENDED, [])


@pytest.mark.parametrize(("ttl", "after", "deletes"), [(None, 999, 0), (60, 59, 0), (60, 60, 1), (0, 0, 1)])
def test_time_to_live(ttl: int | None, after: int, deletes: int) -> None:
    over = RoundStatus(state=State.COMPLETE, completion_time=NOW)
    step = plan(look(a_round(over, ttlSecondsAfterFinished=ttl), after=after))
    assert list(step.actions) == [DeleteWork()] * deletes


def test_a_finished_round_never_restarts() -> None:
    over = a_status(a_slot(state=SlotState.DONE), state=State.COMPLETE, completion_time=NOW)
    round_ = a_round(over)
    step = plan(look(round_, (a_pod("a"), says())))
    assert step.status == over.model_copy(update={"observed_generation": round_.metadata.generation})
    assert not step.actions


FINISH = "spec.finish is set"


def test_finish_ends_a_running_round_as_its_stop_would() -> None:
    step = plan(look(a_round(RUNNING, finish=True), (a_pod("a"), says(GENERATING, next_index=10))))
    assert (step.status.state, [type(action) for action in step.actions]) == (State.STOPPING, [StopPod])
    report = says(STOPPED, next_index=12, delivered_index=12, delivered_valid=2, **OURS)
    over = plan(look(a_round(step.status, finish=True), (a_pod("a"), report))).status
    assert (over.state, over.outcome and over.outcome.message) == (State.COMPLETE, FINISH)
    assert (over.outcome and over.outcome.reason, over.totals.delivered) == (Reason.COMPLETED, 12)


@pytest.mark.parametrize("suspend", [True, False])
def test_finish_completes_a_suspended_round_at_once(suspend: bool) -> None:
    slot = a_slot(state=SlotState.DONE, next=12, delivered=12)
    suspended = a_status(slot, state=State.SUSPENDED, stop_time=NOW - timedelta(hours=1))
    step = plan(look(a_round(suspended, finish=True, suspend=suspend), (a_pod("a"), says())))
    assert (step.status.state, list(step.actions)) == (State.COMPLETE, [])
    assert step.status.totals.delivered == 12


def test_finish_completes_a_round_that_never_started() -> None:
    step = plan(look(a_round(finish=True), (a_pod("a"), says())))
    assert (step.status.state, list(step.actions)) == (State.COMPLETE, [])
    assert (step.status.outcome and step.status.outcome.message, step.status.totals.checked) == (FINISH, 0)


def test_finish_changes_no_end_that_is_decided() -> None:
    failing = a_status(a_slot(), stop_time=NOW, outcome={"type": "Failed", "reason": "PodsBusy", "message": "busy"})
    status = plan(look(a_round(failing, finish=True), (a_pod("a"), says(GENERATING)))).status
    assert status.outcome is not None
    assert status.outcome.message == "busy"


def test_the_mean_rate_leaves_suspensions_out() -> None:
    """100 nonces in 10 s, an hour's pause, 100 more in 10 s."""
    worked = a_status(
        a_slot(state=SlotState.DONE, pod=None, next=100, delivered=100),
        start_time=NOW,
        stop_time=NOW + timedelta(seconds=10),
    )
    resumed = plan(look(a_round(worked, stop=None), (a_pod("a"), says()), after=3600)).status
    assert (resumed.worked_seconds, resumed.start_time, resumed.stop_time) == (10, None, None)
    running = resumed.model_copy(
        update={
            "start_time": NOW + timedelta(seconds=3600),
            "stop_time": NOW + timedelta(seconds=3610),
            "outcome": Outcome(type=Result.COMPLETE, reason="Completed", message="enough"),
            "assignments": [a_slot(state=SlotState.DONE, next=200, delivered=200)],
        }
    )
    over = plan(look(a_round(running, stop=None), (a_pod("a"), says()), after=3615)).status
    assert (over.state, over.totals.rate) == (State.COMPLETE, "10.0")


def test_the_mean_rate_is_that_before_a_suspension_from_which_a_round_never_came_back() -> None:
    slot = a_slot(state=SlotState.WAITING, pod=None, next=100, delivered=100)
    lost = a_status(slot, worked_seconds=10, start_time=None, stop_time=NOW)
    ended = lost.model_copy(
        update={"outcome": Outcome(type=Result.FAILED, reason="StartDeadlineExceeded", message="late")}
    )
    over = plan(look(a_round(ended, stop=None), after=1)).status
    assert (over.state, over.totals.rate) == (State.FAILED, "10.0")
