# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from tests.support.fakes.clock import FakeClock, settle
from tests.support.fakes.engine import FakeOutputProcessor
from vllm_poc.server.autotune import HalvingSliceSize, TunedPass, TunedSliceSize
from vllm_poc.server.clock import Clock
from vllm_poc.server.engine import OutputProcessor, VllmEngine
from vllm_poc.server.gate import BusyShare, ChatGate
from vllm_poc.settings import Settings

BUDGET = 0.05


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


class Looks:
    """An output processor that finds chat as it is told, look by look, and counts the looks."""

    def __init__(self, found: Iterator[bool]) -> None:
        self.count = 0
        self._found = found

    def has_unfinished_requests(self) -> bool:
        self.count += 1
        return next(self._found)


class Client:
    """An engine client that only knows whether chat runs."""

    def __init__(self, processor: OutputProcessor) -> None:
        self.output_processor = processor

    async def collective_rpc(self, method: str, timeout: float, args: tuple[object, ...]) -> list[Any]:  # noqa: ASYNC109
        raise NotImplementedError

    async def is_sleeping(self) -> bool:
        return False


def gate(processor: OutputProcessor, clock: Clock, **variables: str) -> ChatGate:
    settings = Settings.from_environment({f"VLLM_POC_{name}": value for name, value in variables.items()})
    return ChatGate(VllmEngine(Client(processor), frozenset(), call_seconds=1), settings, clock=clock)


async def test_poc_goes_on_soon_after_the_last_chat() -> None:
    """With the settings that users have."""
    chat, clock = FakeOutputProcessor(), FakeClock()
    chat.busy = True
    waiting = asyncio.create_task(gate(chat, clock).passed())
    for _ in range(100):
        await clock.tick()
    await settle()
    assert not waiting.done()
    chat.busy = False
    ended = clock.now()
    await clock.passes(waiting)
    assert 0 < clock.now() - ended < 0.02


@pytest.mark.parametrize(
    ("found", "looks"),
    [
        ([], 1),
        ([True], 3),
        ([True, False, True, False, True], 7),
    ],
    ids=["an idle server", "a single chat", "one chat after the other"],
)
async def test_poc_does_not_go_between_the_chats_of_a_client(found: list[bool], looks: int) -> None:
    chat = Looks(chain(found, repeat(False)))
    clock = FakeClock()
    closed = gate(chat, clock, CHAT_BACKOFF_SECONDS="0.015625")
    await clock.passes(closed.passed())
    assert chat.count == looks
    assert closed.held_back_seconds == 0.015625 * (looks - 1)


@pytest.mark.parametrize("setting", [{"PRIORITY": "poc-first"}, {"MIN_SHARE": "0.5"}], ids=str)
async def test_chat_does_not_hold_back_what_goes_beside_it(setting: dict[str, str]) -> None:
    chat = FakeOutputProcessor()
    chat.busy = True
    opened = gate(chat, FakeClock(), **setting)
    await opened.passed()  # without any time
    assert opened.held_back_seconds == 0


def sizes(limit: int, seconds: list[float]) -> list[int]:
    size = HalvingSliceSize(limit, BUDGET)
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


def tuned_size(seconds: float, *, segments: int = 1, stages: int = 1) -> TunedSliceSize:
    return TunedSliceSize(TunedPass(32, seconds, segments), stages, BUDGET)


@pytest.mark.parametrize(
    ("seconds", "nonces"),
    [(0.001, 32 * 17), (0.0087, 64), (0.0088, 32), (0.4, 32)],
    ids=["many passes", "two fit", "one fits", "none fits"],
)
def test_two_tuned_slices_fill_most_of_the_budget(seconds: float, nonces: int) -> None:
    size = tuned_size(seconds)
    assert (size.nonces, size.batch(size.nonces), size.ahead) == (nonces, 32, 1)


def test_a_pipeline_has_a_slice_behind_for_each_stage() -> None:
    assert tuned_size(0.001, stages=3).ahead == 3


def test_a_pass_in_segments_makes_several_slices() -> None:
    size = tuned_size(0.2, segments=20)
    size.learn(32, 0.01)
    assert size.nonces == 32


def test_tuned_slices_shrink_as_passes_get_slower_and_grow_again() -> None:
    size = tuned_size(0.005)
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
