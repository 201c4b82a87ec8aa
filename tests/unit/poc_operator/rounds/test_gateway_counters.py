# SPDX-License-Identifier: Apache-2.0
"""What the gateway's answer does to slots: their counts, and where they begin after a loss."""

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.credentials import RATE_LIMIT, Grant
from poc_operator.observed import CollectedRound, CollectedSlot, GatewayReport, PodReport, RefusedPod, Rivals
from poc_operator.planning.snapshot import StartPod
from poc_operator.rounds.counters import PATIENCE
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import CALLBACK, NOW, UID, a_pod, a_round, a_slot, a_status, doubts, has, look, says
from vllm_poc.wire.answers import PowState

GENERATING, IDLE, STOPPED = PowState.GENERATING, PowState.IDLE, PowState.STOPPED
RUNNING = a_slot(next=12, delivered=8, valid=3)
SILENT = GatewayReport(callback=CALLBACK, error="gateway http://gateway:8080: no answer within 5 s")
NOTHING = GatewayReport(callback=CALLBACK, asked=NOW)


def planned(
    slot: Assignment | RoundStatus,
    report: PodReport,
    gateway: GatewayReport | None,
    *,
    after: float = 0,
    **spec: Any,  # noqa: ANN401
) -> RoundStep:
    status = slot if isinstance(slot, RoundStatus) else a_status(slot)
    return plan(look(a_round(status, **spec), (a_pod("a"), report), after=after, gateway=gateway))


def starts(step: RoundStep) -> list[tuple[int, str]]:
    orders = [action.request for action in step.actions if isinstance(action, StartPod)]
    return [(order.start_index, str(order.url)) for order in orders]


def degraded(step: RoundStep) -> tuple[str, str]:
    condition = next(found for found in step.status.own_conditions if found.type == "Degraded")
    return condition.reason, condition.message


@pytest.mark.parametrize(
    ("gateway", "resumes", "counts"),
    [
        pytest.param(has((5, 11)), True, (12, 11, 5), id="the gateway knows more"),
        pytest.param(has((2, 6)), True, (12, 8, 3), id="its answer is older"),
        pytest.param(has((14, 14)), True, (14, 14, 14), id="the pod's report is older"),
        pytest.param(has((2, 6)), False, (12, 6, 2), id="a reference pod only guesses"),
        pytest.param(has(), True, (12, 8, 3), id="nothing stored yet"),
        pytest.param(has(), False, (12, 0, 0), id="nothing of a reference pod stored yet"),
        pytest.param(NOTHING, True, (12, 8, 3), id="the round is unknown yet"),
        pytest.param(NOTHING, False, (12, 0, 0), id="the reference pod's round is unknown yet"),
        pytest.param(SILENT, False, (12, 8, 3), id="no answer yet about a reference pod"),
        pytest.param(SILENT, True, (12, 9, 4), id="no answer yet"),
    ],
)
def test_counts(gateway: GatewayReport, resumes: bool, counts: tuple[int, int, int]) -> None:
    report = says(GENERATING, next_index=12, delivered_index=9, delivered_valid=4)
    step = planned(RUNNING, dataclasses.replace(report, resumes=resumes), gateway)
    slot = step.status.assignments[0]
    assert (slot.next, slot.delivered, slot.valid) == counts
    assert (step.status.totals.checked, step.status.totals.delivered, step.status.totals.valid) == counts
    assert doubts(step) == []


def test_a_pod_that_knows_less_than_the_gateway_told_is_believed() -> None:
    ahead = a_slot(next=20, delivered=20, valid=9)
    report = says(GENERATING, next_index=15, delivered_index=12, delivered_valid=4)
    for gateway in (has((9, 20)), SILENT):
        step = planned(ahead, report, gateway)
        assert (doubts(step), step.status.assignments[0].error) == ([], None)
    assert len(doubts(planned(ahead, report, has((3, 10))))) == 1
    assert len(doubts(planned(ahead, report, None))) == 1


def test_pods_deliver_to_the_gateway() -> None:
    starting = a_slot(state=SlotState.STARTING)
    step = planned(starting, says(IDLE), SILENT, callbackURL="http://network:1/x")
    assert starts(step) == [(0, CALLBACK)]


RESTARTED = says(IDLE, session="s2")


def test_lost_work_begins_where_the_gateway_ends() -> None:
    lost = planned(RUNNING, RESTARTED, has((3, 8)))
    assert lost.status.assignments[0].lost == NOW
    assert starts(lost) == []
    assert "starts again at index 8, or later if the gateway has more by then" in lost.events[0].message
    old = planned(lost.status, RESTARTED, has((5, 10), asked=0), after=1)
    assert starts(old) == [], "this answer may be older than the loss"
    fresh = planned(old.status, RESTARTED, has((6, 12), asked=2), after=2)
    assert starts(fresh) == [(12, CALLBACK)]
    slot = fresh.status.assignments[0]
    assert (slot.start, slot.next, slot.valid_before, slot.lost) == (12, 12, 6, None)
    later = planned(fresh.status, RESTARTED, has((9, 15), asked=4), after=4)
    assert starts(later) == [(12, CALLBACK)], "what a pod may have been told by now stays"


def test_a_gateway_that_does_not_answer_is_waited_for_only_so_long() -> None:
    lost = planned(RUNNING, RESTARTED, SILENT)
    patience = PATIENCE.total_seconds()
    assert starts(planned(lost.status, RESTARTED, SILENT, after=patience - 1)) == []
    assert starts(planned(lost.status, RESTARTED, SILENT, after=patience)) == [(8, CALLBACK)]


def test_policy_restart_begins_at_the_first_nonce_and_counts_what_is_stored() -> None:
    restart = {"policy": "Restart"}
    lost = planned(RUNNING, RESTARTED, has((3, 8)), retry=restart)
    again = planned(lost.status, RESTARTED, has((3, 8), asked=2), after=2, retry=restart)
    assert starts(again) == [(0, CALLBACK)]
    slot = again.status.assignments[0]
    assert (slot.start, slot.delivered, slot.valid) == (0, 8, 3)
    running = says(GENERATING, session="s2", next_index=4, delivered_index=2, delivered_valid=1)
    on = planned(again.status, running, has((3, 8), asked=4), after=4, retry=restart)
    assert (on.status.assignments[0].state, on.status.totals.delivered) == (SlotState.RUNNING, 8)


def test_a_reference_pod_begins_anew_and_nothing_counts_twice() -> None:
    lost = planned(RUNNING, RESTARTED, has((8, 8)))
    idle = dataclasses.replace(RESTARTED, resumes=False)
    again = planned(lost.status, idle, has((8, 8), asked=2), after=2)
    assert starts(again) == [(0, CALLBACK)]
    assert (again.status.totals.delivered, again.status.totals.valid) == (8, 8)


@pytest.mark.parametrize("before", [GatewayReport(callback=CALLBACK), NOTHING, SILENT])
def test_who_takes_over_from_a_reference_pod_leaves_no_hole(before: GatewayReport) -> None:
    """What it computed and nobody got is computed again."""
    guess = says(GENERATING, next_index=2048, delivered_index=2048, delivered_valid=2048)
    running = planned(a_slot(), dataclasses.replace(guess, resumes=False), before, stop=None)
    assert running.status.totals.delivered == 0

    def look_at(status: RoundStatus, gateway: GatewayReport, after: float) -> RoundStep:
        return plan(look(a_round(status, stop=None), (a_pod("b"), says(IDLE)), after=after, gateway=gateway))

    lost = look_at(running.status, before, 1)
    assert lost.status.assignments[0].uid == "b"
    told = look_at(lost.status, has((512, 512), asked=3), 3)
    assert starts(told) == [(512, CALLBACK)]
    silent = look_at(lost.status, SILENT, 1 + PATIENCE.total_seconds())
    assert starts(silent) == [(0, CALLBACK)]


def test_an_operator_without_the_gateway_goes_on_at_once() -> None:
    lost = planned(RUNNING, RESTARTED, SILENT)
    assert starts(planned(lost.status, RESTARTED, None)) == [(8, "None")]


def test_a_gateway_that_does_not_answer_degrades_the_round() -> None:
    step = planned(RUNNING, says(GENERATING, next_index=12, delivered_index=8, delivered_valid=3), SILENT)
    assert step.status.state is State.RUNNING
    reason, message = degraded(step)
    assert reason == Reason.GATEWAY_UNREACHABLE
    assert message.startswith("gateway http://gateway:8080: no answer within 5 s; pods compute on")


def test_conflicting_results_are_told_with_their_slots() -> None:
    slots = [a_slot(group=0), a_slot("b", group=1)]
    report = says(GENERATING)
    pods = [(a_pod("a"), report), (a_pod("b"), says(IDLE))]
    step = plan(look(a_round(a_status(*slots)), *pods, gateway=has((3, 3), conflicts=2, stride=2)))
    assert degraded(step) == (
        Reason.RESULTS_CONFLICT,
        "results came twice and differ: node 0 group 0 (pod a: 2); the first ones are kept",
    )


def test_a_round_is_not_over_while_the_gateway_may_know_more() -> None:
    """A reference pod says nothing after its stop; what it sent last the gateway tells a moment later."""
    outcome = {"type": "Complete", "reason": "Completed", "message": "enough"}
    ending = a_status(a_slot(next=12, delivered=8), stop_time=NOW, outcome=outcome)
    report = dataclasses.replace(says(IDLE), resumes=False)
    waiting = planned(ending, report, has((8, 8)), after=1)
    assert waiting.status.state is State.STOPPING
    told = planned(waiting.status, report, has((12, 12), asked=2), after=2)
    assert (told.status.state, told.status.totals.delivered) == (State.COMPLETE, 12)
    missing = planned(waiting.status, report, has((8, 8), asked=5), after=PATIENCE / timedelta(seconds=1))
    assert degraded(missing) == (Reason.DELIVERY_INCOMPLETE, "4 computed nonces were not delivered to the gateway")


def test_a_round_that_is_over_tells_what_its_receiver_answered_last() -> None:
    outcome = {"type": "Complete", "reason": "Completed", "message": "enough"}
    ending = a_status(a_slot(next=12, delivered=8), stop_time=NOW, outcome=outcome)
    counts: dict[str, Any] = {"next_index": 12, "delivered_index": 8, "delivery_error": "http://x: HTTP 503"}
    missing = "4 computed nonces were not delivered to spec.callbackURL"
    over = planned(ending, says(STOPPED, round_id=UID, **counts), None, after=1)
    assert over.status.state is State.COMPLETE
    assert degraded(over) == (Reason.DELIVERY_INCOMPLETE, f"{missing} (http://x: HTTP 503)")
    other = planned(ending, says(STOPPED, round_id="another", **counts), None, after=1)
    assert degraded(other) == (Reason.DELIVERY_INCOMPLETE, missing), "the answer is about another round"


def told(*slots: CollectedSlot, **fields: Any) -> GatewayReport:  # noqa: ANN401
    sums = {"stored": 0, "duplicates": 0, "conflicts": 0, "forwarded": 0}
    answer = CollectedRound(uid=UID, slots=list(slots), **sums | fields)
    return GatewayReport(callback=CALLBACK, collected=answer, asked=NOW)


def collected(**fields: Any) -> CollectedSlot:  # noqa: ANN401
    honest = {"slot": 0, "stored": 9, "last_nonce": 8, "delivered_index": 9, "duplicates": 0, "conflicts": 0}
    return CollectedSlot(**honest | {"forwarded": 0} | fields)


ARTIFACTS: dict[str, Any] = {"artifact": {"kDim": 12}, "rTarget": None}


@pytest.mark.parametrize("resumes", [True, False], ids=["ours", "reference"])
@pytest.mark.parametrize(
    ("slots", "says_why"),
    [
        ([collected(last_nonce=2147483646, delivered_index=2147483647)], "no pod can have computed more than 3500000"),
        ([collected(stored=10)], "10 are stored and delivered up to index 9, of 9 that there can be"),
        ([collected(delivered_index=10)], "9 are stored and delivered up to index 10, of 9 that there can be"),
        ([collected(stored=8)], "it is delivered up to index 9, and 8 are stored"),
        ([collected(forwarded=10)], "10 are forwarded, and 9 are stored"),
        ([collected(), collected()], "it is listed 2 times"),
        ([collected(slot=1)], "slot 1: it is no slot of the round"),
        ([collected(slot=10**9)], "it is no slot of the round"),
    ],
)
def test_numbers_of_the_gateway_that_cannot_be_true_are_not_counted(
    slots: list[CollectedSlot], says_why: str, resumes: bool
) -> None:
    """Nor do they end the round, which stops after 10 nonces."""
    report = dataclasses.replace(says(GENERATING, next_index=6, delivered_index=4, delivered_valid=4), resumes=resumes)
    slot = a_slot(next=5, delivered=3, valid=3)
    step = planned(slot, report, told(*slots), stop={"afterNonces": 10}, **ARTIFACTS)
    assert (step.status.outcome, step.status.state) == (None, State.RUNNING)
    # Of a slot that the gateway is silent about it has nothing: what is recorded of our pod stays.
    expected = (3 if resumes else 0) if slots[0].slot else (4 if resumes else 3)
    assert step.status.totals.delivered == expected
    assert Reason.GATEWAY_CONTRADICTORY in step.status.degraded
    assert says_why in degraded(step)[1]


def test_what_can_be_true_is_counted() -> None:
    report = says(GENERATING, next_index=6, delivered_index=4, delivered_valid=4)
    step = planned(a_slot(next=5), report, told(collected()), stop={"afterNonces": 100}, **ARTIFACTS)
    assert step.status.totals.delivered == 9
    assert Reason.GATEWAY_CONTRADICTORY not in step.status.degraded


def test_both_rivals_are_named() -> None:
    rivals = [Rivals(kept="a", other="b", nonce=3, count=2), Rivals(kept=None, other="b", nonce=5, count=1)]
    step = planned(a_slot(), says(GENERATING), told(collected(conflicts=3, rivals=rivals)), **ARTIFACTS)
    assert degraded(step) == (
        Reason.RESULTS_CONFLICT,
        "results came twice and differ: node 0 group 0 (2 from nonce 3 on: pod a, then pod b, "
        "1 from nonce 5 on: pod (unknown), then pod b); the first ones are kept",
    )


def test_a_pod_whose_deliveries_are_refused_is_named() -> None:
    liar = RefusedPod(slot=0, pod="liar", count=7, why="nonce 1 is of slot 1")
    step = planned(a_slot(), says(GENERATING), told(collected(), refused=[liar]), **ARTIFACTS)
    reason, message = degraded(step)
    assert reason == Reason.DELIVERIES_REFUSED
    assert "pod liar (7 times, the last: nonce 1 is of slot 1)" in message


def test_a_limit_that_keeps_the_gateway_from_storing_is_named() -> None:
    why = "gateway.limits.resultsPerRound (POC_GATEWAY_ROUND_RESULTS) allows 9"
    step = planned(a_slot(), says(GENERATING), told(collected(), limit_reached=why), **ARTIFACTS)
    reason, message = degraded(step)
    assert reason == Reason.ROUND_FULL
    assert message.endswith(f"results and refuses new ones: {why}")
    assert step.status.outcome is None, "the round goes on, since its pods keep what they have"


def failing(seconds: float = 60, answer: str = "HTTP 507", **fields: Any) -> PodReport:  # noqa: ANN401
    """Return what is known of a pod whose receiver has accepted nothing for so long."""
    told = {"next_index": 12, "delivered_index": 8, "delivered_valid": 3, **fields}
    report = says(GENERATING, **told, delivery_error=f"http://x: {answer}")
    return dataclasses.replace(report, undelivered_seconds=seconds)


FAILING = failing()


@pytest.mark.parametrize("gateway", [None, has((3, 8))], ids=["no gateway", "gateway"])
def test_a_pod_whose_deliveries_fail_is_named_with_the_last_answer(gateway: GatewayReport | None) -> None:
    step = planned(RUNNING, FAILING, gateway)
    assert degraded(step) == (Reason.DELIVERIES_FAILING, "pods cannot deliver: a (http://x: HTTP 507)")
    assert step.events == [], "it may come and go while a receiver is overloaded"


def test_a_receiver_that_refuses_for_good_is_named_though_nothing_waits() -> None:
    step = planned(RUNNING, failing(answer="HTTP 405", delivered_index=12, delivered_rejected=4), None)
    assert step.status.degraded.split(",") == [Reason.DELIVERIES_FAILING, Reason.RESULTS_REJECTED]


@pytest.mark.parametrize(
    ("report", "gateway"),
    [
        pytest.param(failing(seconds=59), None, id="it may pass"),
        pytest.param(failing(seconds=59), has((3, 8)), id="the gateway may just start"),
        pytest.param(FAILING, SILENT, id="the gateway does not answer, which is told"),
        pytest.param(FAILING, told(collected(), limit_reached="so many"), id="the round is full, which is told"),
        pytest.param(FAILING, has((12, 12)), id="the gateway has all of it"),
        pytest.param(says(GENERATING, next_index=12, delivered_index=8, delivered_valid=3), None, id="it delivers"),
        pytest.param(says(IDLE, session="s2", delivery_error="http://x: HTTP 507"), None, id="of other work"),
    ],
)
def test_deliveries_that_fail_are_told_once_and_while_there_is_something_to_deliver(
    report: PodReport, gateway: GatewayReport | None
) -> None:
    step = planned(RUNNING, report, gateway, **(ARTIFACTS if gateway is not None and gateway.collected else {}))
    assert Reason.DELIVERIES_FAILING not in step.status.degraded


def test_a_start_grants_one_slot_to_one_pod() -> None:
    status = a_status(a_slot(None, SlotState.WAITING, node=1, group=1, start=7), slots=4, groups=2, start_time=None)
    nodes = {"first": 0, "last": 1, "count": 2, "groups": 2}
    pod = a_pod("b", uid="uid-of-b")
    step = plan(look(a_round(status, nodes=nodes), (pod, says(IDLE)), after=3, gateway=NOTHING))
    (start,) = [action for action in step.actions if isinstance(action, StartPod)]
    assert start.grant == Grant(
        round=UID,
        slot=3,
        pod="b",
        pod_uid="uid-of-b",
        start=7,
        since=int(NOW.timestamp()) + 3,
        rate=RATE_LIMIT,
    )


def test_a_pod_that_the_gateway_does_not_know_any_more_is_told_again() -> None:
    unauthorized = says(GENERATING, next_index=12, delivered_index=8, delivered_valid=3, callback_unauthorized=True)
    step = planned(RUNNING, unauthorized, has((3, 8)))
    (start,) = [action for action in step.actions if isinstance(action, StartPod)]
    assert (start.request.start_index, start.request.round_id) == (RUNNING.start, UID)
    assert start.grant is not None
    assert (start.grant.start, start.grant.since) == (12, int(NOW.timestamp())), "what it has computed it may deliver"
    assert step.status.assignments[0].state is SlotState.RUNNING
    well = says(GENERATING, next_index=12, delivered_index=8, delivered_valid=3)
    assert [action for action in planned(RUNNING, well, has((3, 8))).actions if isinstance(action, StartPod)] == []
