# SPDX-License-Identifier: Apache-2.0
"""How long a pod has got nothing done."""

from typing import Any

import pytest

from poc_operator.controller.observing import ProgressWatch
from poc_operator.observed import PodReport
from tests.unit.poc_operator.build import says
from vllm_poc.wire.answers import PowState

COMPUTING = says(PowState.GENERATING, next_index=10)
SILENT = PodReport(error="no answer")


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def seconds(*looks: tuple[float, PodReport]) -> tuple[float, float]:
    """Return (stalled, silent) after looking at a pod so many seconds after each other."""
    clock = Clock()
    watch = ProgressWatch(clock)
    report = PodReport()
    for pause, seen in looks:
        clock.now += pause
        report = watch.measured("a", seen)
    return report.stalled_seconds, report.silent_seconds


@pytest.mark.parametrize(
    ("second", "stalled"),
    [
        pytest.param(COMPUTING, 30, id="nothing new"),
        pytest.param(says(PowState.GENERATING, next_index=11), 0, id="progress"),
        pytest.param(says(PowState.GENERATING, next_index=10, held_back_seconds=1), 0, id="chat held it back"),
        pytest.param(says(PowState.GENERATING, next_index=10, delivery_error="HTTP 500"), 0, id="receiver down"),
        pytest.param(says(PowState.GENERATING, next_index=10, paused_by="it sleeps"), 0, id="vLLM sleeps"),
        pytest.param(says(PowState.GENERATING, next_index=10, session="s2"), 0, id="restarted"),
        pytest.param(says(PowState.GENERATING, next_index=10, round_id="other"), 0, id="another round"),
        pytest.param(says(PowState.IDLE, next_index=10), 0, id="nothing to do"),
    ],
)
def test_stalled(second: PodReport, stalled: float) -> None:
    assert seconds((0, COMPUTING), (30, second)) == (stalled, 0)


def test_silence_is_counted_from_the_last_answer() -> None:
    assert seconds((0, COMPUTING), (5, SILENT), (5, SILENT)) == (0, 10)
    assert seconds((0, SILENT), (7, SILENT)) == (0, 7)
    assert seconds((0, COMPUTING), (5, SILENT), (5, COMPUTING)) == (10, 0)


def test_pods_that_are_gone_are_forgotten() -> None:
    clock = Clock()
    watch = ProgressWatch(clock)
    for seen in (COMPUTING, failing()):
        watch.measured("a", seen)
        watch.forget_others(["b"])
        clock.now += 50
        again = watch.measured("a", seen)
        assert (again.stalled_seconds, again.undelivered_seconds) == (0, 0)


def failing(error: str | None = "HTTP 503", **fields: Any) -> PodReport:  # noqa: ANN401
    return says(PowState.GENERATING, **{"next_index": 40, "delivered_index": 20, **fields}, delivery_error=error)


@pytest.mark.parametrize(
    ("looks", "undelivered"),
    [
        pytest.param([(0, failing()), (30, failing()), (30, failing("HTTP 502"))], 60, id="each try fails"),
        pytest.param([(0, failing()), (50, SILENT), (10, failing())], 60, id="the pod is silent meanwhile"),
        pytest.param([(0, failing(None)), (90, failing())], 0, id="the first try"),
        pytest.param([(0, failing(None)), (90, failing(None))], 0, id="nothing to deliver"),
        pytest.param([(0, failing()), (90, failing(None)), (5, failing())], 0, id="a try went well"),
        pytest.param([(0, failing()), (90, failing(delivered_valid=1)), (5, failing(delivered_valid=1))], 5, id="some"),
        pytest.param([(0, failing()), (90, failing(delivered_index=40, delivered_rejected=9))], 90, id="refused"),
        pytest.param([(0, failing()), (90, failing(session="s2"))], 0, id="restarted"),
        pytest.param([(0, failing()), (90, failing(round_id="other"))], 0, id="another round"),
    ],
)
def test_a_receiver_that_accepts_nothing(looks: list[tuple[float, PodReport]], undelivered: float) -> None:
    clock, report = Clock(), PodReport()
    watch = ProgressWatch(clock)
    for pause, seen in looks:
        clock.now += pause
        report = watch.measured("a", seen)
    assert report.undelivered_seconds == undelivered


def test_a_pod_that_has_answered_once_was_heard() -> None:
    watch = ProgressWatch(Clock())
    assert [watch.measured("a", seen).heard for seen in (SILENT, COMPUTING, SILENT)] == [False, True, True]


def batches(*looks: tuple[float, PodReport]) -> tuple[int, float]:
    """Return (nonces, seconds) of the largest batch after looking at a pod so many seconds after each other."""
    clock, report = Clock(), PodReport()
    watch = ProgressWatch(clock)
    for pause, seen in looks:
        clock.now += pause
        report = watch.measured("a", seen)
    return report.batch_nonces, report.batch_seconds


def at(index: int, **fields: Any) -> PodReport:  # noqa: ANN401
    return says(PowState.GENERATING, next_index=index, **fields)


@pytest.mark.parametrize(
    ("looks", "batch"),
    [
        pytest.param([(0, at(500))], (0, 0), id="not seen to move"),
        pytest.param([(0, at(0)), (20, at(0)), (5, at(512))], (512, 25), id="one"),
        pytest.param([(0, at(0)), (25, at(512)), (20, at(600))], (512, 25), id="the largest counts"),
        pytest.param([(0, at(512, end_index=512)), (90, at(512, end_index=512)), (25, at(900))], (388, 25), id="waits"),
        pytest.param(
            [(0, at(0)), (1, SILENT), (99, at(5000)), (25, at(5512))], (512, 25), id="moves that are not seen"
        ),
        pytest.param([(0, at(0)), (25, at(512)), (2, at(512, session="s2"))], (0, 0), id="another server"),
        pytest.param([(0, at(0)), (25, at(512)), (2, at(512, round_id="other"))], (0, 0), id="another round"),
        pytest.param([(0, at(512)), (25, at(0)), (5, at(100))], (100, 5), id="begins anew"),
    ],
)
def test_batches(looks: list[tuple[float, PodReport]], batch: tuple[int, float]) -> None:
    assert batches(*looks) == batch
