# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_poc.server.gate import BusyShare


@pytest.mark.parametrize(
    ("spans", "now", "share"),
    [
        ([], 10, 0.0),
        ([(8, 9)], 10, 0.25),
        ([(7, 9)], 10, 0.5),
        ([(5, 7)], 10, 0.25),
        ([(4, 6)], 10, 0.0),
        ([(0, 1), (6, 7), (8, 10)], 10, 0.75),
        ([(0, 10)], 10, 1.0),
        ([(0, 10)], 13, 0.25),
    ],
)
def test_only_time_inside_the_window_counts(spans: list[tuple[float, float]], now: float, share: float) -> None:
    busy = BusyShare(4, lambda: now)
    for start, end in spans:
        busy.add(start, end)
    assert busy.value() == share


def test_spans_leave_the_window_as_time_goes_by() -> None:
    time = [1.0]
    busy = BusyShare(2, lambda: time[0])
    busy.add(0, 1)
    seen = [busy.value()]
    for time[0] in (2.5, 3.0):
        seen.append(busy.value())
    assert seen == [0.5, 0.25, 0.0]


def test_nothing_piles_up_while_nobody_asks_for_the_share() -> None:
    time = [0.0]
    busy = BusyShare(2, lambda: time[0])
    for time[0] in map(float, range(1000)):
        busy.add(time[0] - 1, time[0])
    assert len(busy._spans) <= 3
