# SPDX-License-Identifier: Apache-2.0
"""Counters are written now and then, everything else at once; what is held back is not forgotten."""

from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus, Totals
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.clients.errors import StoreUnavailable
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.event_loop import Computing
from poc_operator.controller.stored_object import COUNTERS_SECONDS, StatusRecorder
from tests.unit.poc_operator.build import a_round, a_slot, a_status


class Written:
    """A store that keeps what was written last, and a clock."""

    def __init__(self) -> None:
        self.round = a_round(a_status(a_slot()))
        self.writes = 0
        self.fault: Exception | None = None
        self.seconds = 1000.0
        self.recorder = StatusRecorder[PoCRound](cast(ObjectStore, self), lambda: self.seconds, Computing())

    async def write_status(self, round_: PoCRound, status: RoundStatus) -> None:
        """Write."""
        if self.fault is not None:
            raise self.fault
        self.writes += 1
        self.round = round_.model_copy(update={"status": RoundStatus.model_validate(status.stored())})

    async def record(self, status: RoundStatus, after: float = 0) -> int:
        """Record a status ``after`` seconds; return how many writes it took."""
        self.seconds += after
        before = self.writes
        await self.recorder.record(self.round, status)
        return self.writes - before

    @property
    def newest(self) -> RoundStatus:
        """The status that the next plan starts from."""
        return self.recorder.newest(self.round).status


def counted(count: int, **slot: Any) -> RoundStatus:  # noqa: ANN401
    """A status in which the slot has delivered ``count`` nonces."""
    message = f"1 pod computes {count} nonces/s"
    totals = Totals(checked=count, delivered=count)
    return a_status(a_slot(next=count, delivered=count, **slot), totals=totals, message=message)


async def test_counters_are_written_now_and_then() -> None:
    written = Written()
    assert await written.record(counted(1)) == 1
    writes = [await written.record(counted(second), after=1) for second in range(2, 18)]
    assert writes == [0] * 14 + [1, 0]


async def test_counters_are_written_a_little_sooner_where_they_would_be_late() -> None:
    for turn, expected in (
        (4, [0, 0, 0, 1]),
        (4.8, [0, 0, 1, 0]),
        (6, [0, 0, 1, 0]),
        (9.5, [0, 1, 0, 1]),
        (20, [1, 1]),
    ):
        written = Written()
        await written.record(counted(1), after=turn)
        assert [await written.record(counted(2 + index), after=turn) for index in range(len(expected))] == expected


async def test_the_first_results_are_written_at_once() -> None:
    """A round of 15 s would have nothing but zeros until its end."""
    written = Written()
    computing = a_status(a_slot(next=64), totals=Totals(checked=64))
    assert await written.record(counted(0), after=COUNTERS_SECONDS) == 1
    assert await written.record(computing, after=2) == 0
    assert [await written.record(counted(turn), after=2) for turn in range(1, 10)] == [1, *[0] * 7, 1]


async def test_results_are_the_first_ones_once_only() -> None:
    """A gateway that loses what it has, again and again, costs no more writes than one that keeps it."""
    written = Written()
    await written.record(counted(0), after=COUNTERS_SECONDS)
    delivered = [index % 2 == 0 for index in range(30)]
    writes = [await written.record(counted(1 if some else 0), after=1) for some in delivered]
    assert writes.count(1) == 2
    assert writes[0] == 1


async def test_another_process_knows_that_there_were_results() -> None:
    written = Written()
    written.round = a_round(counted(5))
    await written.record(counted(6))
    assert await written.record(counted(0), after=COUNTERS_SECONDS) == 1
    assert await written.record(counted(7), after=1) == 0


@pytest.mark.parametrize(
    "change", [{"state": SlotState.STALLED}, {"session": "s2"}, {"start": 2}, {"attempts": 2}, {"error": "away"}]
)
async def test_everything_else_is_written_at_once(change: dict[str, object]) -> None:
    written = Written()
    await written.record(counted(1))
    assert await written.record(counted(2, **change)) == 1


async def test_what_is_held_back_is_what_the_next_plan_starts_from() -> None:
    written = Written()
    await written.record(counted(1))
    await written.record(counted(2))
    assert written.round.status == counted(1)
    assert written.newest == counted(2)
    written.round = a_round(counted(1), suspend=True)
    assert written.newest == counted(2)


async def test_what_is_held_back_is_written_though_nothing_moves_any_more() -> None:
    written = Written()
    await written.record(counted(1))
    assert [await written.record(counted(2), after=1) for _ in range(15)] == [0] * 14 + [1]
    assert written.round.status == counted(2)
    assert await written.record(counted(2), after=COUNTERS_SECONDS) == 0


async def test_it_gives_way_to_what_somebody_else_has_written() -> None:
    written = Written()
    await written.record(counted(1))
    await written.record(counted(2))
    written.round = a_round(counted(5))
    assert written.newest == counted(5)


async def test_it_is_still_known_after_a_write_that_failed() -> None:
    written = Written()
    await written.record(counted(1))
    await written.record(counted(2))
    written.fault = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await written.record(counted(3), after=COUNTERS_SECONDS)
    assert written.newest == counted(2)
    written.fault = None
    assert await written.record(counted(3)) == 1
    assert written.newest == counted(3)


async def test_nothing_new_is_not_written() -> None:
    written = Written()
    assert await written.record(written.round.status) == 0


async def test_errors_are_not_written_again_because_they_are_cut_when_stored() -> None:
    written = Written()
    status = a_status(*(a_slot(f"p{index}", group=index, error=f"{index} {'x' * 5000}") for index in range(50)))
    assert await written.record(status, after=COUNTERS_SECONDS) == 1
    assert written.newest == status, "this process knows them all"
    assert await written.record(written.newest, after=COUNTERS_SECONDS) == 0
    assert await written.record(written.round.status, after=COUNTERS_SECONDS) == 0


async def test_a_new_process_writes_nothing_only_because_errors_were_cut() -> None:
    written = Written()
    slots = [a_slot("a", error="x" * 5000), a_slot("b", group=1, error="gone")]
    await written.record(a_status(*slots), after=COUNTERS_SECONDS)
    written.recorder = StatusRecorder[PoCRound](cast(ObjectStore, written), lambda: written.seconds, Computing())
    assert await written.record(a_status(*slots), after=COUNTERS_SECONDS) == 0
