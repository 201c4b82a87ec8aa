# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from vllm_poc.rpc import PassTiming
from vllm_poc.server.autotune import TunedPass, fastest_pass

BUDGET = 0.05


class Device:
    """A GPU that takes ``start`` seconds for a pass and ``per_nonce`` for each nonce, of which it has room for some."""

    def __init__(self, per_nonce: float, *, start: float = 0.001, most: int = 10**9, cuts: bool = True) -> None:
        self.asked: list[int] = []
        self._start = start
        self._per_nonce = per_nonce
        self._most = most
        self._cuts = cuts

    async def warm_up(self, nonces: int, segment_seconds: float) -> PassTiming:
        self.asked.append(nonces)
        seconds = self.seconds(nonces)
        segments = max(1, math.ceil(seconds / segment_seconds)) if self._cuts else 1
        return PassTiming(seconds=seconds if nonces <= self._most else None, segments=segments)

    def seconds(self, nonces: int) -> float:
        return self._start + self._per_nonce * nonces


async def chosen(device: Device, *, limit: int, seq_len: int) -> TunedPass | None:
    return await fastest_pass(device.warm_up, limit=limit, seq_len=seq_len, budget_seconds=BUDGET)


@pytest.mark.parametrize(
    ("limit", "per_nonce", "asked"),
    [
        (128, 0.0001, [8, 64, 128]),
        (100, 0.0001, [8, 64, 100]),
        (12, 0.002, [8]),
    ],
    ids=["the limit fits", "an odd limit", "the limit is near"],
)
async def test_autotuning_finds_the_largest_pass_of_which_two_fit(
    limit: int, per_nonce: float, asked: list[int]
) -> None:
    device = Device(per_nonce)
    found = await chosen(device, limit=limit, seq_len=64)
    assert device.asked == asked
    assert found == TunedPass(asked[-1], device.seconds(asked[-1]), 1)


async def test_passes_are_not_cut_where_the_largest_is_hardly_larger() -> None:
    device = Device(0.0001, start=0.0002)
    assert await chosen(device, limit=300, seq_len=64) == TunedPass(168, device.seconds(168), 1)
    assert device.asked == [8, 64, 168]


@pytest.mark.parametrize(("slower", "chosen_size"), [(1.04, 512), (1.1, 168)])
async def test_larger_passes_are_cut_unless_they_are_slower(slower: float, chosen_size: int) -> None:
    device = Device(0.0001, start=0.0)

    async def warm_up(nonces: int, segment_seconds: float) -> PassTiming:
        found = await device.warm_up(nonces, segment_seconds)
        if nonces == 512 and found["seconds"] is not None:
            found["seconds"] *= slower
        return found

    found = await fastest_pass(warm_up, limit=512, seq_len=64, budget_seconds=BUDGET)
    assert found is not None
    assert found.nonces == chosen_size
    assert device.asked == [8, 64, 168, 512, *([] if chosen_size == 512 else [chosen_size])]


async def test_large_passes_are_cut_if_they_are_faster() -> None:
    device = Device(0.01)
    assert await chosen(device, limit=32, seq_len=1024) == TunedPass(32, device.seconds(32), 19)
    assert device.asked == [1, 32]


async def test_the_largest_pass_is_foreseen_to_fill_the_budget() -> None:
    device = Device(0.0018, start=0.0012)  # two nonces more than a whole multiple of the first one fit
    assert await chosen(device, limit=8, seq_len=1024) == TunedPass(8, device.seconds(8), 1)
    assert device.asked == [1, 5, 8]


async def test_a_pass_that_is_slower_than_foreseen_is_given_up_for_the_one_before() -> None:
    asked: list[int] = []

    async def warm_up(nonces: int, _: float) -> PassTiming:
        asked.append(nonces)
        return PassTiming(seconds=0.005 if nonces <= 8 else 0.04, segments=1)

    found = await fastest_pass(warm_up, limit=128, seq_len=64, budget_seconds=BUDGET)
    assert (found, asked) == (TunedPass(8, 0.005, 1), [8, 24, 8])


async def test_a_pass_that_finds_no_room_is_halved() -> None:
    device = Device(0.01, most=20)
    assert await chosen(device, limit=32, seq_len=1024) == TunedPass(16, device.seconds(16), 10)
    assert device.asked == [1, 32, 16]


async def test_nothing_is_tuned_where_not_even_the_smallest_pass_fits() -> None:
    device = Device(0.0001, most=0)
    assert await chosen(device, limit=128, seq_len=64) is None
    assert device.asked == [8, 4, 2, 1]
