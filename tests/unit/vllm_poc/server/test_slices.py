# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_poc.server.slices import SliceSize


def sizes(limit: int, seconds: list[float]) -> list[int]:
    size = SliceSize(limit, budget_seconds=0.05)
    seen = []
    for duration in seconds:
        seen.append(size.nonces)
        size.learn(duration)
    return [*seen, size.nonces]


@pytest.mark.parametrize(
    ("limit", "seconds", "expected"),
    [
        (8, [0.04, 0.05, 0.04], [8, 8, 8, 8]),
        (8, [0.9, 0.04, 0.9, 0.04], [8, 8, 8, 8, 8]),
        (8, [0.09, 0.09, 0.06, 0.06, 0.04], [8, 8, 4, 4, 2, 2]),
        (8, [0.09, 0.09, 0.02, 0.02], [8, 8, 4, 8, 8]),
        (1, [0.9] * 4, [1] * 5),
        (3, [0.9] * 8, [3, 3, 1, 1, 1, 1, 1, 1, 1]),
    ],
    ids=["fast", "one slow slice", "slow", "slow, then fast", "single", "odd limit"],
)
def test_slices_follow_the_time_budget(limit: int, seconds: list[float], expected: list[int]) -> None:
    assert sizes(limit, seconds) == expected
