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
from vllm_poc.worker.batches import BatchRequest, BatchResult  # noqa: E402
from vllm_poc.worker.flow import Flow  # noqa: E402
from vllm_poc.worker.work import Work  # noqa: E402

CPU = torch.device("cpu")


def request(first: int, *ahead: int) -> BatchRequest:
    """Ask for one nonce, which others follow."""
    return {**a_batch([first], seq_len=8, ahead=[[nonce] for nonce in ahead]), "protocol": "distance"}


class Step(NamedTuple):
    """What a stage computes in a step, and what the stage before hands it then."""

    nonce: int | None
    part: int
    taken: int | None


class Rank:
    """A stage that writes down what it is given to do. The value of a nonce is the nonce."""

    def __init__(self, stage: int, flow: Flow) -> None:
        self.stage = stage
        self.flow = flow
        self.steps: list[Step] = []

    def call(self, asked: BatchRequest) -> BatchResult:
        """Do what a worker does when it is asked."""
        if not self.flow.continues_with(asked):
            self.flow = Flow(asked, parts=self.flow.parts, batch=1, stages=self.flow.stages)
        self.flow.follow(asked, lambda _: True)
        for _ in self.flow.steps():
            mine, coming = self.flow.request_at(self.stage), self.flow.request_at(self.stage - 1)
            nonce = mine["nonces"][0] if mine is not None else None
            taken = coming["nonces"][0] if coming is not None and self.flow.ends_passes and self.stage > 0 else None
            self.steps.append(Step(nonce, self.flow.part, taken))
            values = [torch.tensor([[float(nonce)]])] if nonce is not None and self.flow.ends_passes else []
            self.flow.begun(Work.of(values, CPU))
        return self.flow.answer()


def ranks(stages: int, parts: int, first: int = 0) -> list[Rank]:
    return [Rank(stage, Flow(request(first), parts=parts, batch=1, stages=stages)) for stage in range(stages)]


def answered(line: list[Rank], asked: BatchRequest) -> tuple[list[float], int]:
    """Ask all ranks until the answer is complete; return the last one's values and how many calls it took."""
    calls, complete = 0, False
    while not complete:
        *_, last = found = [rank.call(asked) for rank in line]
        assert {answer["complete"] for answer in found} == {last["complete"]}
        calls, complete = calls + 1, last["complete"]
    return last["distances"], calls


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_stage_computes_every_part_once_and_what_it_was_handed(stages: int, parts: int) -> None:
    line, last = ranks(stages, parts), 20
    calls = []
    for nonce in range(last):
        ahead = range(nonce + 1, min(last, nonce + 1 + stages))
        values, count = answered(line, request(nonce, *ahead))
        assert values == [float(nonce)]
        calls.append(count)
    assert calls == [stages * parts] + [parts] * (last - 1)
    for rank in line:
        done = [(step.nonce, step.part) for step in rank.steps if step.nonce is not None]
        assert done == [(nonce, part) for nonce in range(last) for part in range(parts)]
    for before, after in pairwise(line):
        handed = [step.nonce for step in before.steps if step.nonce is not None and step.part + 1 == parts]
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
    parts=st.integers(min_value=1, max_value=4),
    known=st.lists(st.integers(min_value=0, max_value=5), min_size=1, max_size=9),
)
def test_whatever_is_known_ahead_passes_begin_with_their_first_part(stages: int, parts: int, known: list[int]) -> None:
    line = ranks(stages, parts)
    for nonce, count in enumerate(known):
        assert answered(line, request(nonce, *range(nonce + 1, nonce + 1 + count)))[0] == [float(nonce)]
    for rank in line:
        before = Step(None, 0, None)
        for step in rank.steps:
            if step.nonce is not None and step.part > 0:
                assert (before.nonce, before.part) == (step.nonce, step.part - 1)
            before = step
    for before_rank, after_rank in pairwise(line):
        handed: int | None = None
        for sent, step in zip(before_rank.steps, after_rank.steps, strict=True):
            if step.nonce is not None and step.part == 0:
                assert handed == step.nonce, "what a stage begins is what it was handed last"
            assert step.taken in (None, sent.nonce)
            handed = step.taken if step.taken is not None else handed


def test_a_request_without_a_follower_is_answered_and_leaves_nothing() -> None:
    line = ranks(2, 3)
    assert answered(line, request(0)) == ([0.0], 6)
    assert not line[0].flow.continues_with(request(0))
    assert list(line[0].flow.steps()) == []


def test_what_was_begun_must_follow() -> None:
    flow = Flow(request(0), parts=1, batch=1, stages=2)
    flow.follow(request(0, 1, 2), lambda _: True)
    assert flow.continues_with(request(0, 1, 2))
    assert flow.continues_with(request(0, 1)), "what is not known any more does no harm"
    assert not flow.continues_with(request(0, 1, 3))
    assert not flow.continues_with(request(1, 2))
    assert not flow.continues_with({**request(0, 1, 2), "block_hash": "other"})


def test_a_request_of_another_kind_is_not_begun_ahead() -> None:
    line = ranks(1, 1)
    flow = line[0].flow
    flow.follow(request(0, 1, 2, 3), lambda following: following["nonces"] != [2])
    assert flow.continues_with(request(0, 1, 9)), "2 and what comes after it are not known here"
