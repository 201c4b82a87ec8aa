# SPDX-License-Identifier: Apache-2.0
"""The curves: rates of rounds, and how soon chat's answers begin."""

from math import inf

import pytest

from poc_gateway.metrics import HTTP_SECONDS
from poc_gateway.query.web.history import MOST_POINTS, POINT_SECONDS, History, chat_buckets, quantile


class Clock:
    """Seconds that a test lets pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CHAT = {0.1: 0.0, 0.25: 0.0, 0.5: 0.0, inf: 0.0}


def test_a_point_is_what_came_since_the_last() -> None:
    clock = Clock()
    history = History(clock)
    assert not history.add({"a": 1_000, "b": 5}, CHAT)
    clock.now += POINT_SECONDS - 1
    assert not history.add({"a": 1_100, "b": 5}, CHAT)
    assert history.due_in() == 1
    clock.now += 1
    assert history.add({"a": 1_300, "b": 5, "new": 900}, CHAT | {0.25: 20.0, 0.5: 30.0, inf: 30.0})
    (point,) = history.points
    assert point["rates"] == {"a": 20.0}
    assert (point["chat_rate"], point["chat_median"], point["chat_p95"]) == (2.0, 0.2125, 0.4625)


def test_the_curve_is_bounded() -> None:
    clock = Clock()
    history = History(clock)
    for number in range(MOST_POINTS + 5):
        history.add({"a": number}, CHAT)
        clock.now += POINT_SECONDS
    assert len(history.points) == MOST_POINTS


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({0.1: 0.0, inf: 0.0}, 0.5, None),
        ({0.1: 10.0, inf: 10.0}, 0.5, 0.05),
        ({0.1: 0.0, inf: 10.0}, 0.5, 0.1),
        ({}, 0.5, None),
    ],
)
def test_quantiles_are_those_of_prometheus(buckets: dict[float, float], share: float, expected: float | None) -> None:
    assert quantile(buckets, share) == expected


def test_chat_is_what_the_networks_port_has_answered() -> None:
    before = chat_buckets().get(inf, 0.0)
    HTTP_SECONDS.labels("network", "/v1/{path}", "2xx").observe(0.2)
    HTTP_SECONDS.labels("inside", "/v1/{path}", "2xx").observe(0.2)
    HTTP_SECONDS.labels("network", "/health", "2xx").observe(0.2)
    for refused in ("4xx", "5xx"):
        HTTP_SECONDS.labels("network", "/v1/{path}", refused).observe(0.001)
    assert chat_buckets()[inf] == before + 1
