# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_poc.server.sizes import HalvedSize, Rehearsed, RehearsedSize, rehearse

BUDGET = 0.05


def sizes(limit: int, seconds: list[float]) -> list[int]:
    size = HalvedSize(limit, BUDGET)
    seen = []
    for duration in seconds:
        seen.append(size.nonces)
        size.learn(size.nonces, duration)
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
def test_halved_slices_follow_the_time_budget(limit: int, seconds: list[float], expected: list[int]) -> None:
    assert sizes(limit, seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "nonces"),
    [(0.001, 32 * 25), (0.012, 64), (0.0126, 32), (0.4, 32)],
    ids=["many passes", "two fit", "one fits", "none fits"],
)
def test_rehearsed_slices_are_whole_passes_in_half_of_the_budget(seconds: float, nonces: int) -> None:
    size = RehearsedSize(Rehearsed(32, seconds), BUDGET)
    assert (size.nonces, size.batch(size.nonces), size.ahead) == (nonces, 32, True)


def test_rehearsed_slices_shrink_as_passes_get_slower_and_grow_again() -> None:
    size = RehearsedSize(Rehearsed(32, 0.01), BUDGET)
    for _ in range(20):
        size.learn(64, 0.06)
    assert size.nonces == 32
    size.learn(33, 9.0)  # half a pass says nothing
    for _ in range(20):
        size.learn(32, 0.005)
    assert size.nonces == 32 * 4


async def rehearsals(
    limit: int, seq_len: int, per_nonce: float, most: int = 10**9
) -> tuple[Rehearsed | None, list[int]]:
    """What is chosen on a device that takes ``per_nonce`` seconds and has memory for ``most`` nonces."""
    asked: list[int] = []

    async def seconds_of(nonces: int) -> float | None:
        asked.append(nonces)
        return 0.001 + per_nonce * nonces if nonces <= most else None

    return await rehearse(seconds_of, limit=limit, seq_len=seq_len, budget_seconds=BUDGET), asked


@pytest.mark.parametrize(
    ("limit", "seq_len", "per_nonce", "most", "expected"),
    [
        (128, 64, 0.0001, 10**9, [8, 64, 64 * 3]),
        (100, 64, 0.0001, 10**9, [8, 64, 100]),
        (8, 1024, 0.1, 10**9, [1]),
        (128, 64, 0.002, 10**9, [8]),
        (128, 64, 0.0001, 64, [8, 64, 128, 64]),
    ],
)
async def test_a_rehearsal_finds_the_largest_pass_of_which_two_fit(
    limit: int, seq_len: int, per_nonce: float, most: int, expected: list[int]
) -> None:
    expected = [min(nonces, limit) for nonces in expected]
    found, asked = await rehearsals(limit, seq_len, per_nonce, most)
    assert asked == expected
    assert found == Rehearsed(asked[-1], 0.001 + per_nonce * asked[-1])


async def test_a_pass_that_is_slower_than_foreseen_is_given_up_for_the_one_before() -> None:
    asked: list[int] = []

    async def seconds_of(nonces: int) -> float:
        asked.append(nonces)
        return 0.005 if nonces <= 8 else 0.04

    found = await rehearse(seconds_of, limit=128, seq_len=64, budget_seconds=BUDGET)
    assert (found, asked) == (Rehearsed(8, 0.005), [8, 40, 8])


async def test_nothing_is_rehearsed_where_not_even_the_smallest_pass_fits() -> None:
    assert await rehearsals(128, 64, 0.0001, most=7) == (None, [8])
