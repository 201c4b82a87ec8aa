# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from vllm_poc.server.sizes import HalvedSize, Rehearsed, RehearsedSize, rehearse
from vllm_poc.worker.batches import Rehearsal

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


def rehearsed_size(seconds: float, *, parts: int = 1, stages: int = 1) -> RehearsedSize:
    return RehearsedSize(Rehearsed(32, seconds, parts), stages, BUDGET)


@pytest.mark.parametrize(
    ("seconds", "nonces"),
    [(0.001, 32 * 17), (0.0087, 64), (0.0088, 32), (0.4, 32)],
    ids=["many passes", "two fit", "one fits", "none fits"],
)
def test_two_rehearsed_slices_fill_most_of_the_budget(seconds: float, nonces: int) -> None:
    size = rehearsed_size(seconds)
    assert (size.nonces, size.batch(size.nonces), size.ahead) == (nonces, 32, 1)


def test_a_pipeline_has_a_slice_behind_for_each_stage() -> None:
    assert rehearsed_size(0.001, stages=3).ahead == 3


def test_a_pass_in_parts_makes_several_slices() -> None:
    size = rehearsed_size(0.2, parts=20)
    size.learn(32, 0.01)
    assert size.nonces == 32


def test_rehearsed_slices_shrink_as_passes_get_slower_and_grow_again() -> None:
    size = rehearsed_size(0.005)
    assert size.nonces == 32 * 3
    for _ in range(20):
        size.learn(64, 0.06)
    assert size.nonces == 32
    size.learn(33, 9.0)  # half a pass says nothing
    for _ in range(20):
        size.learn(32, 0.005)
    assert size.nonces == 32 * 3
    for _ in range(20):
        size.learn(32, 0.0001)  # the device computed it while chat held back the question
    assert size.nonces == 32 * 3


class Device:
    """A GPU that takes ``start`` seconds for a pass and ``per_nonce`` for each nonce, of which it has room for some."""

    def __init__(self, per_nonce: float, *, start: float = 0.001, most: int = 10**9, cuts: bool = True) -> None:
        self.asked: list[int] = []
        self._start = start
        self._per_nonce = per_nonce
        self._most = most
        self._cuts = cuts

    async def prepare(self, nonces: int, part_seconds: float) -> Rehearsal:
        self.asked.append(nonces)
        seconds = self.seconds(nonces)
        parts = max(1, math.ceil(seconds / part_seconds)) if self._cuts else 1
        return Rehearsal(seconds=seconds if nonces <= self._most else None, parts=parts)

    def seconds(self, nonces: int) -> float:
        return self._start + self._per_nonce * nonces


async def chosen(device: Device, *, limit: int, seq_len: int) -> Rehearsed | None:
    return await rehearse(device.prepare, limit=limit, seq_len=seq_len, budget_seconds=BUDGET)


@pytest.mark.parametrize(
    ("limit", "per_nonce", "asked"),
    [
        (128, 0.0001, [8, 64, 128]),
        (100, 0.0001, [8, 64, 100]),
        (12, 0.002, [8]),
    ],
    ids=["the limit fits", "an odd limit", "the limit is near"],
)
async def test_a_rehearsal_finds_the_largest_pass_of_which_two_fit(
    limit: int, per_nonce: float, asked: list[int]
) -> None:
    device = Device(per_nonce)
    found = await chosen(device, limit=limit, seq_len=64)
    assert device.asked == asked
    assert found == Rehearsed(asked[-1], device.seconds(asked[-1]), 1)


async def test_passes_are_not_cut_where_the_largest_is_hardly_larger() -> None:
    device = Device(0.0001, start=0.0002)
    assert await chosen(device, limit=300, seq_len=64) == Rehearsed(168, device.seconds(168), 1)
    assert device.asked == [8, 64, 168]


@pytest.mark.parametrize(("slower", "chosen_size"), [(1.04, 512), (1.1, 168)])
async def test_larger_passes_are_cut_unless_they_are_slower(slower: float, chosen_size: int) -> None:
    device = Device(0.0001, start=0.0)

    async def prepare(nonces: int, part_seconds: float) -> Rehearsal:
        found = await device.prepare(nonces, part_seconds)
        if nonces == 512 and found["seconds"] is not None:
            found["seconds"] *= slower
        return found

    found = await rehearse(prepare, limit=512, seq_len=64, budget_seconds=BUDGET)
    assert found is not None
    assert found.nonces == chosen_size
    assert device.asked == [8, 64, 168, 512, *([] if chosen_size == 512 else [chosen_size])]


async def test_large_passes_are_cut_if_they_are_faster() -> None:
    device = Device(0.01)
    assert await chosen(device, limit=32, seq_len=1024) == Rehearsed(32, device.seconds(32), 19)
    assert device.asked == [1, 32]


async def test_the_largest_pass_is_foreseen_to_fill_the_budget() -> None:
    device = Device(0.0018, start=0.0012)  # two nonces more than a whole multiple of the first one fit
    assert await chosen(device, limit=8, seq_len=1024) == Rehearsed(8, device.seconds(8), 1)
    assert device.asked == [1, 5, 8]


async def test_a_pass_that_is_slower_than_foreseen_is_given_up_for_the_one_before() -> None:
    asked: list[int] = []

    async def prepare(nonces: int, _: float) -> Rehearsal:
        asked.append(nonces)
        return Rehearsal(seconds=0.005 if nonces <= 8 else 0.04, parts=1)

    found = await rehearse(prepare, limit=128, seq_len=64, budget_seconds=BUDGET)
    assert (found, asked) == (Rehearsed(8, 0.005, 1), [8, 24, 8])


async def test_a_pass_that_finds_no_room_is_halved() -> None:
    device = Device(0.01, most=20)
    assert await chosen(device, limit=32, seq_len=1024) == Rehearsed(16, device.seconds(16), 10)
    assert device.asked == [1, 32, 16]


async def test_nothing_is_rehearsed_where_not_even_the_smallest_pass_fits() -> None:
    device = Device(0.0001, most=0)
    assert await chosen(device, limit=128, seq_len=64) is None
    assert device.asked == [8, 4, 2, 1]
