# SPDX-License-Identifier: Apache-2.0
"""What pods say to be delivered counts as far as the gateway has it, and a pod that said too much is named."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.clients.gateway import GatewayClient
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.controller.observing import GatewayObserver
from poc_operator.observed import CollectedRound, GatewayReport, PodReport
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import (
    CALLBACK,
    NOW,
    UID,
    a_config,
    a_pod,
    a_round,
    a_slot,
    a_status,
    doubts,
    has,
    look,
    says,
)
from vllm_poc.wire.answers import PowState

GENERATING, STOPPED = PowState.GENERATING, PowState.STOPPED
ARTIFACTS: dict[str, Any] = {"artifact": {"kDim": 12}, "rTarget": None}
PROTOCOLS: dict[str, dict[str, Any]] = {"distance": {}, "artifact": ARTIFACTS}
NOTHING = GatewayReport(callback=CALLBACK, asked=NOW)
#: What becomes of a nonce: in a distance round it may also be invalid, and is not sent.
OUTCOMES = {"distance": ("valid", "invalid", "rejected"), "artifact": ("valid", "rejected")}


def claim(next_: int, delivered: int, valid: int, rejected: int = 0, state: PowState = GENERATING) -> PodReport:
    """What a pod says of itself."""
    counters: dict[str, Any] = {"delivered_index": delivered, "delivered_valid": valid, "delivered_rejected": rejected}
    return says(state, round_id=UID, next_index=next_, **counters)


def planned(
    slot: Assignment | RoundStatus,
    report: PodReport,
    gateway: GatewayReport,
    *,
    heard: PodReport | None = None,
    after: float = 0,
    **spec: Any,  # noqa: ANN401
) -> RoundStep:
    """Plan once; ``heard`` is what the pod had said before the gateway was asked."""
    known = {"a": heard.status} if heard is not None and heard.status is not None else {}
    status = slot if isinstance(slot, RoundStatus) else a_status(slot)
    seen = dataclasses.replace(gateway, heard=known)
    return plan(look(a_round(status, **{"stop": None} | spec), (a_pod("a"), report), after=after, gateway=seen))


def told(step: RoundStep) -> str:
    return next(one.message for one in step.status.own_conditions if one.type == "Degraded")


@st.composite
def claims(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Any counters in order: next, delivered, valid, rejected."""
    next_ = draw(st.integers(0, 60))
    delivered = draw(st.integers(0, next_))
    valid = draw(st.integers(0, delivered))
    return next_, delivered, valid, draw(st.integers(0, delivered - valid))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(said=claims(), stored=st.integers(0, 60), gap=st.integers(0, 20), heard=st.booleans())
def test_no_pod_is_counted_for_more_than_the_gateway_has(
    protocol: str, said: tuple[int, int, int, int], stored: int, gap: int, heard: bool
) -> None:
    _, delivered, valid, rejected = said
    end = stored + gap if protocol == "distance" and stored else stored
    report = claim(*said)
    step = planned(a_slot(), report, has((stored, end)), heard=report if heard else None, **PROTOCOLS[protocol])
    slot = step.status.assignments[0]
    assert slot.valid == step.status.totals.valid == stored
    results = valid if protocol == "distance" else delivered - rejected
    if protocol == "artifact":
        assert slot.delivered == max(stored, min(delivered, stored + rejected))
    else:
        assert slot.delivered == (max(end, delivered) if valid <= min(stored, end) else end)
    # What it said before the gateway was asked must be there; what it said since may be on its way.
    is_named = heard and max(results, valid) > min(stored, end)
    assert (slot.error or "").startswith("pod a is not believed: it says that") is is_named
    assert (Reason.REPORT_CONTRADICTORY in step.status.degraded) is is_named
    assert len(doubts(step)) == is_named


@st.composite
def histories(draw: st.DrawFn, protocol: str) -> tuple[Sequence[str], int, int, int, int]:
    """What became of a slot's nonces; where it began, what was delivered at a question, stored, and delivered by now.

    The gateway may have more than the pod knows: an answer was lost.
    """
    outcomes = draw(st.lists(st.sampled_from(OUTCOMES[protocol]), max_size=60))
    start, heard, stored, now = sorted(draw(st.tuples(*[st.integers(0, len(outcomes))] * 4)))
    if draw(st.booleans()):
        stored, now = now, stored
    return outcomes, start, heard, stored, now


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(data=st.data())
def test_an_honest_pod_is_never_named_and_is_counted_once_it_is_confirmed(protocol: str, data: st.DataObject) -> None:
    outcomes, start, heard, stored, now = data.draw(histories(protocol))

    def count(word: str, first: int, last: int) -> int:
        return outcomes[first:last].count(word)

    def said(delivered: int) -> PodReport:
        valid, rejected = (count(word, start, delivered) for word in ("valid", "rejected"))
        report = claim(len(outcomes), delivered, valid, rejected)
        assert report.status is not None
        return dataclasses.replace(report, status=report.status.model_copy(update={"start_index": start}))

    # Other pods had delivered up to the start.
    before: dict[str, Any] = {"valid": count("valid", 0, start), "rejected": count("rejected", 0, start)}
    slot = a_slot(start=start, next=start, delivered=start, **before).model_copy(
        update={"valid_before": before["valid"], "rejected_before": before["rejected"]}
    )
    gateway = _gateway_of(protocol, outcomes[:stored])
    step = planned(slot, said(now), gateway, heard=said(heard), **PROTOCOLS[protocol])
    found = step.status.assignments[0]
    assert (found.error, doubts(step)) == (None, [])
    assert Reason.REPORT_CONTRADICTORY not in step.status.degraded
    assert found.valid == count("valid", 0, stored)
    assert found.delivered <= max(now, stored)
    if stored >= now:
        assert found.delivered >= now


def _gateway_of(protocol: str, outcomes: Sequence[str]) -> GatewayReport:
    """What a gateway tells that has all results of these nonces."""
    valid = [index for index, outcome in enumerate(outcomes) if outcome == "valid"]
    end = valid[-1] + 1 if valid else 0
    report = has((len(valid), end))
    if protocol == "distance" or report.collected is None:
        return report
    contiguous = next((place for place, index in enumerate(valid) if place != index), len(valid))
    (slot,) = report.collected.slots
    slots = [slot.model_copy(update={"delivered_index": contiguous})]
    return dataclasses.replace(report, collected=report.collected.model_copy(update={"slots": slots}))


@pytest.mark.parametrize("gateway", [has((10, 10)), has(), NOTHING], ids=["ten", "no slot", "no round"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_pod_is_named_with_what_it_says_and_what_there_is(protocol: str, gateway: GatewayReport) -> None:
    lie = claim(1200, 1000, 1000)
    first = planned(a_slot(), lie, gateway, heard=None, **PROTOCOLS[protocol])
    assert first.events == [], "it may be on its way"
    step = planned(first.status, lie, gateway, heard=lie, after=2, **PROTOCOLS[protocol])
    has_ten = gateway.collected is not None and bool(gateway.collected.slots)
    there_is = "10 of the slot, the last at index 9" if has_ten else "none of the slot"
    said = "pod a is not believed: it says that 1000 results from index 0 on are delivered"
    assert f"{said}, and the gateway has {there_is}" in told(step)
    assert step.status.totals.delivered == step.status.totals.valid == (10 if has_ten else 0)
    assert step.status.totals.checked == 1200
    again = planned(step.status, lie, gateway, heard=lie, after=4, **PROTOCOLS[protocol])
    assert again.events == [], "the Event is sent once"
    believed = planned(again.status, lie, has((1000, 1000)), heard=lie, after=6, **PROTOCOLS[protocol])
    assert (believed.status.assignments[0].error, believed.status.totals.delivered) == (None, 1000)


def test_what_a_pod_said_in_another_session_or_of_another_slot_is_not_held_against_it() -> None:
    lie, report = claim(1200, 1000, 1000), claim(12, 9, 4)
    assert lie.status is not None
    config = a_config(group_id=1, n_groups=2)
    for changed in ({"session_id": "s0"}, {"round_id": "other"}, {"start_index": 7}, {"config": config}):
        heard = dataclasses.replace(lie, status=lie.status.model_copy(update=changed))
        assert planned(a_slot(), report, has((4, 10)), heard=heard).status.assignments[0].error is None


def test_a_gateway_that_does_not_answer_leaves_the_count_to_pods_unless_one_was_caught() -> None:
    silent = dataclasses.replace(has((10, 10)), error="no answer")
    honest = planned(a_slot(), claim(30, 20, 20), silent, heard=claim(12, 10, 10))
    assert honest.status.totals.delivered == 20
    caught = planned(a_slot(), claim(3000, 2000, 2000), silent, heard=claim(1200, 1000, 1000))
    assert caught.status.totals.delivered == 10


def ending(slot: Assignment) -> RoundStatus:
    outcome = {"type": "Complete", "reason": "Completed", "message": "enough"}
    return a_status(slot, stop_time=NOW, outcome=outcome)


def test_a_round_is_not_over_before_the_gateway_was_asked_about_the_last_results() -> None:
    """However long the pod took to deliver them."""
    last = claim(12, 12, 4, state=STOPPED)
    waiting = planned(ending(a_slot(next=12, delivered=8)), last, has((3, 8)), heard=claim(12, 8, 3), after=60)
    assert (waiting.status.state, waiting.status.assignments[0].state) == (State.STOPPING, SlotState.RUNNING)
    over = planned(waiting.status, last, has((4, 10)), heard=last, after=62)
    assert (over.status.state, over.status.totals.delivered) == (State.COMPLETE, 12)
    assert Reason.DELIVERY_INCOMPLETE not in over.status.degraded


def test_a_round_is_not_suspended_before_its_last_results_are_counted() -> None:
    last = claim(12, 12, 4, state=STOPPED)
    stopping = a_status(a_slot(next=12, delivered=8), stop_time=NOW)
    waiting = planned(stopping, last, has((3, 8)), heard=claim(12, 8, 3), after=60, suspend=True)
    assert waiting.status.state is State.SUSPENDING
    over = planned(waiting.status, last, has((4, 10)), heard=last, after=62, suspend=True)
    assert (over.status.state, over.status.totals.delivered) == (State.SUSPENDED, 12)


def test_a_pod_with_other_work_does_not_hold_up_the_end() -> None:
    other = claim(5000, 4000, 4000)
    assert other.status is not None
    busy = dataclasses.replace(other, status=other.status.model_copy(update={"round_id": "another"}))
    over = planned(ending(a_slot(next=12, delivered=8)), busy, has((3, 8)), heard=claim(12, 8, 3), after=60)
    assert over.status.state is State.COMPLETE


def test_a_round_whose_gateway_does_not_answer_ends_by_what_pods_say() -> None:
    last = claim(12, 12, 4, state=STOPPED)
    silent = dataclasses.replace(has((3, 8)), error="no answer")
    over = planned(ending(a_slot(next=12, delivered=8)), last, silent, after=60)
    assert (over.status.state, over.status.totals.delivered) == (State.COMPLETE, 12)


def test_a_pod_that_lied_is_named_when_the_round_is_over() -> None:
    last = claim(1000, 1000, 1000, state=STOPPED)
    stopped = planned(ending(a_slot(next=12, delivered=8)), last, has((3, 8)), heard=last, after=60)
    over = planned(stopped.status, last, has((3, 8)), heard=last, after=62)
    assert over.status.state is State.COMPLETE
    assert "pod a is not believed: it says that 1000 results" in told(over)
    assert (over.status.totals.delivered, over.status.totals.checked) == (8, 1000)


class SlowGateway:
    """A gateway whose answer waits."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    def callback_url(self, *_: str) -> str:
        return CALLBACK

    async def progress(self, *_: str) -> None:
        await self.may_answer.wait()


async def test_what_pods_told_after_the_question_is_not_held_against_the_answer() -> None:
    gateway = SlowGateway()
    log = ObjectLogger(logging.getLogger(__name__), PoCRound.KIND, ObjectRef("ns", "r", UID))
    observer = GatewayObserver(cast(GatewayClient, gateway), ObjectRef("ns", "r", UID), log, time.monotonic)
    first, second = claim(12, 8, 3).status, claim(20, 16, 6).status
    assert first is not None
    assert second is not None
    assert (await observer.observe({"a": first})).heard == {}
    gateway.may_answer.set()
    answered = await observer.observe({"a": second})
    assert (answered.collected, answered.heard) == (None, {"a": first})
    await observer.cancel()


class TellingGateway:
    """A gateway that tells what it is made to."""

    def __init__(self) -> None:
        self.collected: CollectedRound | None = None

    def callback_url(self, *_: str) -> str:
        return CALLBACK

    async def progress(self, *_: str) -> CollectedRound | None:
        return self.collected


async def test_results_that_are_lost_are_told_until_a_plan_that_knew_it_is_recorded() -> None:
    gateway, clock = TellingGateway(), [0.0]
    log = ObjectLogger(logging.getLogger(__name__), PoCRound.KIND, ObjectRef("ns", "r", UID))
    observer = GatewayObserver(cast(GatewayClient, gateway), ObjectRef("ns", "r", UID), log, lambda: clock[0])

    async def answered(*counts: tuple[int, int]) -> GatewayReport:
        clock[0] += 10
        gateway.collected = has(*counts).collected if counts else None
        return await observer.observe({})

    assert (await answered((100, 100), (100, 100))).fallen == set()
    fallen = await answered((80, 80), (100, 100))
    assert fallen.fallen == {0}
    assert (await answered((90, 90), (110, 110))).fallen == {0}, "no plan is recorded that knew it"
    both = await answered((85, 85), (60, 60))
    observer.planned(fallen)
    assert (await observer.observe({})).fallen == {1}, "of slot 0 there is more than that plan knew"
    observer.planned(both)
    assert (await answered((85, 85), (60, 60))).fallen == set()
    assert (await answered()).fallen == set(), "a round that the gateway has forgotten is not lost"
    assert (await answered((5, 5))).fallen == set()
    await observer.cancel()


def test_a_loss_that_cannot_be_true_changes_nothing() -> None:
    nonsense = dataclasses.replace(has((90, 20)), fallen=frozenset({0}))
    slot = a_slot(next=100, delivered=100, valid=100)
    (found,) = planned(slot, claim(100, 100, 100), nonsense, **ARTIFACTS).status.assignments
    assert (found.state, found.delivered, found.attempts) == (SlotState.RUNNING, 100, 1)


@pytest.mark.parametrize(
    ("stored", "end"), [(800, 1000), (800, 800), (1, 1)], ids=["a hole", "a lost tail", "nearly all"]
)
def test_a_round_goes_on_after_the_gateway_has_lost_results(stored: int, end: int) -> None:
    slot = a_slot(next=1000, end=1000, delivered=stored, valid=stored)
    report = says(GENERATING, round_id=UID, next_index=1000, delivered_index=1000, delivered_valid=1000, end_index=1000)
    step = planned(slot, report, has((stored, stored)), heard=report, **ARTIFACTS, stop={"afterValid": 1000})
    (found,) = step.status.assignments
    assert found.end is not None
    assert found.end > 1000, "what is missing is made up for by other nonces"


def test_rejected_nonces_count_when_those_below_them_are_confirmed() -> None:
    report = claim(10, 10, 5, rejected=5)
    (slot,) = planned(a_slot(), report, has((4, 4)), **ARTIFACTS).status.assignments
    assert slot.rejected == 0, "if the pod is lost now, the next one has the same nonces rejected"
    (slot,) = planned(slot, report, has((5, 5)), **ARTIFACTS).status.assignments
    assert (slot.delivered, slot.rejected) == (10, 5)
