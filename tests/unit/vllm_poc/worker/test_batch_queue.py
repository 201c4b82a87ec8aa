# SPDX-License-Identifier: Apache-2.0
"""Which stage of a pipeline computes what in which step."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

from tests.support.builders.batches import a_batch  # noqa: E402
from vllm_poc.rpc import BatchRequest, BatchResult  # noqa: E402
from vllm_poc.worker.batch_queue import AsyncOutput, BatchQueue  # noqa: E402

CPU = torch.device("cpu")


def request(first: int, *ahead: int) -> BatchRequest:
    """Ask for one nonce, which others follow."""
    return a_batch([first], seq_len=8, protocol="distance", ahead=[[nonce] for nonce in ahead])


class Step(NamedTuple):
    """What a stage computes in a step, and what the stage before hands it then."""

    nonce: int | None
    segment: int
    taken: int | None


class Rank:
    """A stage that writes down what it is given to do. The value of a nonce is the nonce."""

    def __init__(self, stage: int, queue: BatchQueue) -> None:
        self.stage = stage
        self.queue = queue
        self.steps: list[Step] = []

    def call(self, asked: BatchRequest) -> BatchResult:
        """Do what a worker does when it is asked."""
        if not self.queue.continues_with(asked):
            self.queue = BatchQueue(asked, segments=self.queue.segments, batch=1, stages=self.queue.stages)
        self.queue.follow(asked, lambda _: True)
        for _ in self.queue.steps():
            mine, coming = self.queue.request_at(self.stage), self.queue.request_at(self.stage - 1)
            nonce = mine["nonces"][0] if mine is not None else None
            taken = coming["nonces"][0] if coming is not None and self.queue.ends_passes and self.stage > 0 else None
            self.steps.append(Step(nonce, self.queue.segment, taken))
            values = [torch.tensor([[float(nonce)]])] if nonce is not None and self.queue.ends_passes else []
            self.queue.begun(AsyncOutput.of(values, CPU))
        return self.queue.answer()


def ranks(stages: int, segments: int, first: int = 0) -> list[Rank]:
    return [
        Rank(stage, BatchQueue(request(first), segments=segments, batch=1, stages=stages)) for stage in range(stages)
    ]


def answered(line: list[Rank], asked: BatchRequest) -> tuple[list[float], int]:
    """Ask all ranks until the answer is complete; return the last one's values and how many calls it took."""
    calls, complete = 0, False
    while not complete:
        *_, last = found = [rank.call(asked) for rank in line]
        assert {answer["complete"] for answer in found} == {last["complete"]}
        calls, complete = calls + 1, last["complete"]
    return last["distances"], calls


@pytest.mark.parametrize("segments", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_stage_computes_every_part_once_and_what_it_was_handed(stages: int, segments: int) -> None:
    line, last = ranks(stages, segments), 20
    calls = []
    for nonce in range(last):
        ahead = range(nonce + 1, min(last, nonce + 1 + stages))
        values, count = answered(line, request(nonce, *ahead))
        assert values == [float(nonce)]
        calls.append(count)
    assert calls == [stages * segments] + [segments] * (last - 1)
    for rank in line:
        done = [(step.nonce, step.segment) for step in rank.steps if step.nonce is not None]
        assert done == [(nonce, segment) for nonce in range(last) for segment in range(segments)]
    for before, after in pairwise(line):
        handed = [step.nonce for step in before.steps if step.nonce is not None and step.segment + 1 == segments]
        assert [step.taken for step in after.steps if step.taken is not None] == handed
        for sent, taken in zip(before.steps, after.steps, strict=True):
            assert taken.taken in (None, sent.nonce), "what is sent in a step is taken in that step"


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_no_stage_rests_while_requests_are_known_ahead(stages: int) -> None:
    line = ranks(stages, 3)
    for nonce in range(9):
        answered(line, request(nonce, *range(nonce + 1, nonce + 1 + stages)))
    for rank in line:
        resting = Counter(step.nonce is None for step in rank.steps)
        assert resting[True] == 3 * rank.stage, "only before the first request arrives"


@given(
    stages=st.integers(min_value=1, max_value=4),
    segments=st.integers(min_value=1, max_value=4),
    known=st.lists(st.integers(min_value=0, max_value=5), min_size=1, max_size=9),
)
def test_whatever_is_known_ahead_passes_begin_with_their_first_part(
    stages: int, segments: int, known: list[int]
) -> None:
    line = ranks(stages, segments)
    for nonce, count in enumerate(known):
        assert answered(line, request(nonce, *range(nonce + 1, nonce + 1 + count)))[0] == [float(nonce)]
    for rank in line:
        before = Step(None, 0, None)
        for step in rank.steps:
            if step.nonce is not None and step.segment > 0:
                assert (before.nonce, before.segment) == (step.nonce, step.segment - 1)
            before = step
    for before_rank, after_rank in pairwise(line):
        handed: int | None = None
        for sent, step in zip(before_rank.steps, after_rank.steps, strict=True):
            if step.nonce is not None and step.segment == 0:
                assert handed == step.nonce, "what a stage begins is what it was handed last"
            assert step.taken in (None, sent.nonce)
            handed = step.taken if step.taken is not None else handed


def test_a_request_without_a_follower_is_answered_and_leaves_nothing() -> None:
    line = ranks(2, 3)
    assert answered(line, request(0)) == ([0.0], 6)
    assert not line[0].queue.continues_with(request(0))
    assert list(line[0].queue.steps()) == []


def test_what_was_begun_must_follow() -> None:
    queue = BatchQueue(request(0), segments=1, batch=1, stages=2)
    queue.follow(request(0, 1, 2), lambda _: True)
    assert queue.continues_with(request(0, 1, 2))
    assert queue.continues_with(request(0, 1)), "what is not known any more does no harm"
    assert not queue.continues_with(request(0, 1, 3))
    assert not queue.continues_with(request(1, 2))
    assert not queue.continues_with({**request(0, 1, 2), "block_hash": "other"})


def test_a_request_of_another_kind_is_not_begun_ahead() -> None:
    line = ranks(1, 1)
    queue = line[0].queue
    queue.follow(request(0, 1, 2, 3), lambda following: following["nonces"] != [2])
    assert queue.continues_with(request(0, 1, 9)), "2 and what comes after it are not known here"
