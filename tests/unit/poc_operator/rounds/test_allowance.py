# SPDX-License-Identifier: Apache-2.0
"""Rounds that stop after so many nonces: how far each slot may go."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import Assignment, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.controller.observing import ProgressWatch
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import ExtendPod, OtherRound, StartPod
from poc_operator.rounds.allowance import FIRST_BATCHES
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import NOW, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState

BATCH = 10
FIRST = FIRST_BATCHES * BATCH
NODES = {"first": 0, "last": 1, "count": 2}


def planned(status: RoundStatus | None, *reports: PodReport, **stop: int) -> RoundStep:
    round_ = a_round(status, stop=stop or None, batchSize=BATCH, nodes=NODES)
    return plan(look(round_, *((a_pod(name), report) for name, report in zip("ab", reports, strict=False))))


def slot(name: str, node: int, **fields: Any) -> Assignment:  # noqa: ANN401
    return a_slot(name, node=node, session=f"s-{name}", **fields)


def report(name: str, node: int, **fields: Any) -> PodReport:  # noqa: ANN401
    return says(PowState.GENERATING, session=f"s-{name}", **fields)


def running(*slots: Assignment) -> RoundStatus:
    return a_status(*slots, slots=2, groups=1)


def ends(step: RoundStep) -> list[int | None]:
    return [found.end for found in step.status.assignments]


def extensions(step: RoundStep) -> dict[str, int]:
    return {act.pod.name: act.request.end_index for act in step.actions if isinstance(act, ExtendPod)}


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"after_nonces": 10_000}, [FIRST, FIRST]),
        ({"after_nonces": 101}, [51, 50]),
        ({"after_valid": 30}, [15, 15]),
    ],
)
def test_the_first_portions(stop: dict[str, int], expected: list[int]) -> None:
    step = planned(None, says(session="s-a"), says(session="s-b"), **stop)
    assert ends(step) == expected
    starts = [action.request.end_index for action in step.actions if isinstance(action, StartPod)]
    assert starts == expected


@pytest.mark.parametrize("stop", [{}, {"after_seconds": 60}])
def test_other_rounds_have_no_portions(stop: dict[str, int]) -> None:
    assert ends(planned(None, says(session="s-a"), says(session="s-b"), **stop)) == [None, None]


def test_a_pod_that_has_done_half_of_its_portion_gets_more_in_time() -> None:
    slots = slot("a", 0, next=900, end=1000), slot("b", 1, next=100, end=1000)
    fast = report("a", 0, next_index=900, end_index=1000, rate_per_second=50)
    slow = report("b", 1, next_index=100, end_index=1000, rate_per_second=5)
    step = planned(running(*slots), fast, slow, after_nonces=100_000)
    assert ends(step) == [900 + 50 * 20, 1000]
    assert extensions(step) == {"a": 1900}


def test_no_more_is_dealt_than_is_left() -> None:
    slots = slot("a", 0, next=900, end=1000), slot("b", 1, next=900, end=900)
    reports = [
        report(name, node, next_index=900, end_index=end, rate_per_second=500)
        for node, (name, end) in enumerate([("a", 1000), ("b", 900)])
    ]
    step = planned(running(*slots), *reports, after_nonces=2001)
    assert ends(step) == [1051, 950]
    assert sum(end or 0 for end in ends(step)) == 2001


def test_chains_that_are_stored_behind_a_gap_are_not_dealt_once_more() -> None:
    """A reference pod has left one out, and was lost. Another pod gets what is left."""
    lost = a_slot(node=0, state=SlotState.WAITING, pod=None, delivered=10, valid=198, next=10)
    status = running(lost, slot("b", 1, end=0))
    round_ = a_round(status, stop={"afterNonces": 200}, nodes=NODES, decode={"maxTokens": 4}, rTarget=None)
    step = plan(look(round_, (a_pod("b"), report("b", 1))))
    assert ends(step)[1] == 2


def test_a_pod_that_has_not_heard_is_told_again() -> None:
    slots = slot("a", 0, next=10, end=5000), slot("b", 1, next=10, end=5000)
    deaf = report("a", 0, next_index=10, end_index=1000, rate_per_second=1)
    knows = report("b", 1, next_index=10, end_index=5000, rate_per_second=1)
    assert extensions(planned(running(*slots), deaf, knows, after_nonces=10_000)) == {"a": 5000}


def test_a_pod_that_knows_no_portions_is_left_alone() -> None:
    slots = slot("a", 0, next=10, end=20), slot("b", 1, next=10, end=20)
    step = planned(running(*slots), report("a", 0, next_index=10), report("b", 1, next_index=10), after_nonces=10_000)
    assert extensions(step) == {}


def test_the_valid_share_so_far_tells_how_many_nonces_are_needed() -> None:
    counted = {"next": 999, "delivered": 999, "valid": 99, "end": 999}
    slots = slot("a", 0, **counted), slot("b", 1, state=SlotState.DONE)
    told = {"next_index": 999, "delivered_index": 999, "delivered_valid": 99, "end_index": 999}
    step = planned(running(*slots), report("a", 0, **told, rate_per_second=1000), after_valid=199)
    assert ends(step)[0] == 999 + 1000


@pytest.mark.parametrize(("delivered", "end"), [(1000, 1000 + BATCH), (999, 1000)])
def test_for_the_last_valid_nonces_each_idle_pod_tries_a_batch(delivered: int, end: int) -> None:
    slots = (
        slot("a", 0, next=1000, delivered=delivered, valid=890, end=1000),
        slot("b", 1, next=1000, delivered=900, valid=890, end=1500),
    )
    told = {"next_index": 1000, "delivered_valid": 890, "rate_per_second": 1000}
    reports = (
        report("a", 0, **told, delivered_index=delivered, end_index=1000),
        report("b", 1, **told, delivered_index=900, end_index=1500),
    )
    step = planned(running(*slots), *reports, after_valid=1781)
    assert ends(step) == [end, 1500]


def test_a_lost_slot_gets_a_new_portion() -> None:
    slots = slot("a", 0, next=90, delivered=50, end=100), slot("b", 1, next=10, end=500)
    step = planned(
        running(*slots), says(session="new"), report("b", 1, next_index=10, end_index=500), after_nonces=10_000
    )
    lost = step.status.assignments[0]
    assert (lost.state, lost.start, lost.end) == (SlotState.STARTING, 50, 50 + FIRST)


def test_a_round_that_ends_deals_nothing() -> None:
    status = running(slot("a", 0, next=10, end=20)).model_copy(update={"stop_time": NOW})
    step = planned(status, report("a", 0, next_index=20, end_index=20), after_nonces=10_000)
    assert ends(step) == [20]
    assert extensions(step) == {}


BATCH_SECONDS, CHAINS = 25.0, 20_000


class ChainPod:
    """Computes what it may as one batch of chains, which takes the same time whatever it has; then its index moves."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.sizes: list[int] = []
        self.next = 0
        self.end = 0
        self.now = 0.0
        self._done_at: float | None = None

    def advance(self, seconds: float) -> None:
        self.now += seconds
        if self._done_at is not None and self.now >= self._done_at:
            self.next += self.sizes[-1]
            self._done_at = None
        size = min(self._limit, self.end - self.next)
        if self._done_at is None and size > 0:
            self.sizes.append(size)
            self._done_at = self.now + BATCH_SECONDS

    def answer(self) -> PodReport:
        told = {"next_index": self.next, "delivered_index": self.next, "end_index": self.end}
        return report("a", 0, **told, rate_per_second=self.next / self.now if self.now else 0)


@pytest.mark.parametrize("limit", [150, 700, 1536, 2048])
def test_batches_of_chains_do_not_shrink(limit: int) -> None:
    """A pod that gets some seconds' work at its rate would compute ever smaller batches, and so ever slower."""
    pod, watch, status = ChainPod(limit), ProgressWatch(lambda: pod.now), running(slot("a", 0))
    while pod.next < CHAINS:
        pod.advance(2)
        assert pod.now < 2 * CHAINS / limit * BATCH_SECONDS
        round_ = a_round(status, stop={"afterNonces": CHAINS}, rTarget=None, decode={"maxTokens": 256})
        seen = watch.measured("a", pod.answer())
        step = plan(look(round_, (a_pod("a"), seen), after=pod.now))
        status = step.status
        pod.end = next((end for end in ends(step) if end is not None), pod.end)
    assert (pod.next, sum(pod.sizes)) == (CHAINS, CHAINS)
    assert pod.sizes == [*[limit] * (CHAINS // limit), CHAINS % limit]


@pytest.mark.parametrize("stop", [{"after_nonces": 100}, {"after_valid": 100}])
def test_what_a_given_up_slot_was_dealt_others_get(stop: dict[str, int]) -> None:
    """A round would never end whose last nonces that slot keeps: those that it may compute, and those not delivered."""
    lost = slot("a", 0, state=SlotState.FAILED, next=30, end=60, delivered=20, valid=20)
    other = slot("b", 1, next=40, end=40, delivered=40, valid=40)
    told = report("b", 1, next_index=40, end_index=40, delivered_index=40, delivered_valid=40)
    step = plan(look(a_round(running(lost, other), stop=stop, batchSize=BATCH, nodes=NODES), (a_pod("b"), told)))
    assert step.status.assignments[1].end == 80


def test_a_slot_that_its_pod_refused_gets_another_allowance() -> None:
    begun = slot("a", 0, state=SlotState.STARTING, end=60)
    other = slot("b", 1, next=40, end=40, delivered=40)
    refused = replace(says(session="s-a"), refusal=("EngineNotReady", "not now"))
    told = report("b", 1, next_index=40, end_index=40, delivered_index=40, delivered_valid=14)
    step = planned(running(begun, other), refused, told, after_nonces=100)
    assert [(found.state, found.end) for found in step.status.assignments] == [
        (SlotState.WAITING, None),
        (SlotState.RUNNING, 100),
    ]


@pytest.mark.parametrize(
    ("idle", "shares"),
    [(119, [60, 40]), (120, [60, 80])],
)
def test_what_a_silent_pod_keeps_others_get_once_nobody_works(idle: int, shares: list[int]) -> None:
    """After ``stall.afterSeconds``. Its pod may come back, and what it delivers then is over and above."""
    silent = slot("a", 0, state=SlotState.STALLED, next=30, end=60, delivered=20)
    waits = slot("b", 1, next=40, end=40, delivered=40)
    told = report("b", 1, next_index=40, end_index=40, delivered_index=40)
    status = running(silent, waits).model_copy(update={"idle_time": NOW - timedelta(seconds=idle)})
    assert ends(planned(status, PodReport(error="?", silent_seconds=500), told, after_nonces=100)) == shares


def test_a_slot_that_is_bound_late_does_not_get_what_others_were_dealt() -> None:
    """Nor does it compute without an end."""
    lost = a_slot(None, state=SlotState.WAITING, node=0)
    waits = slot("b", 1, next=40, end=40, delivered=40)
    told = report("b", 1, next_index=40, end_index=40, delivered_index=40)
    status = running(lost, waits).model_copy(update={"idle_time": NOW - timedelta(seconds=120)})
    step = planned(status, says(session="s-a"), told, after_nonces=100)
    assert ends(step) == [0, 100]


def test_a_pod_that_has_just_begun_gets_nothing_of_what_another_is_about_to_compute() -> None:
    """However long nobody worked before: pods may have loaded their model for longer than ``stall.afterSeconds``."""
    first = slot("a", 0, state=SlotState.STARTING, next=0, end=500)
    second = slot("b", 1, state=SlotState.STARTING, next=0, end=0)
    status = running(first, second).model_copy(update={"idle_time": NOW - timedelta(seconds=300)})
    step = planned(status, says(), report("b", 1, next_index=0, end_index=0, delivered_index=0), after_nonces=500)
    assert [found.state for found in step.status.assignments] == [SlotState.STARTING, SlotState.RUNNING]
    assert (ends(step), extensions(step), step.status.idle_time) == ([500, 0], {}, None)


def test_the_rest_is_dealt_though_a_round_that_goes_first_waits_for_the_pods() -> None:
    """It gets them when this one ends."""
    silent = slot("a", 0, state=SlotState.STALLED, next=30, end=60, delivered=20)
    waits = slot("b", 1, next=40, end=40, delivered=40)
    told = report("b", 1, next_index=40, end_index=40, delivered_index=40)
    status = running(silent, waits).model_copy(update={"idle_time": NOW - timedelta(seconds=120)})
    round_ = a_round(status, stop={"after_nonces": 100}, batchSize=BATCH, nodes=NODES)
    pods = ((a_pod("a"), PodReport(error="?", silent_seconds=500)), (a_pod("b"), told))
    seen = replace(look(round_, *pods), find_other_rounds=lambda: (goes_first("a", "b"),))
    assert ends(plan(seen)) == [60, 80]


def goes_first(*pods: str) -> OtherRound:
    """A round of a higher priority that wants these pods."""
    return OtherRound(
        id="first",
        name="ns/first",
        place=(-10, 1, 0, NOW, "first"),
        priority=10,
        replaces=False,
        block=("ab", 7, "key"),
        wanted=frozenset(pods),
        needs=len(pods),
    )
