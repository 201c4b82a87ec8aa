# SPDX-License-Identifier: Apache-2.0
"""Autotuning: how many nonces a forward pass holds, chosen by warming up passes of growing size, and so a slice.

What is chosen is kept for the kind of work, and the workers keep the pass captured. They drop what they are not told to
keep, so that this process alone decides which kinds these are: those used last.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, Protocol

from vllm_poc.rpc import STEPS_IN_FLIGHT, BatchRequest, ModelFacts, PassFields, PassSpec, PassTiming, batch_request
from vllm_poc.server.engine import WeightsChangedError
from vllm_poc.wire.messages import RoundRequest

#: Kinds of forward passes that the workers keep captured; each holds the memory of one.
MAX_KINDS = 4
#: Tokens of the first pass that is warmed up; it takes a few milliseconds, or is a single nonce.
_FIRST_TOKENS = 512
#: How much larger than its measured predecessor a pass may be: small ones say little about large ones.
_MOST_GROWTH = 8
#: Share of the time budget that is planned: a card that is hot is slower, and calls take time.
_FILLED = 0.7
#: How many times larger the next pass must be to be worth a warm-up.
_LEAST_GROWTH = 1.25
#: How many times as fast as a smaller pass one in segments must be measured, at least. It is measured on a card that
#: gets hot meanwhile, and saves what that card spends on reading the weights more often.
_WORTH_CUTTING = 0.95

#: Weight of the newest slice in the mean time of a pass.
_NEWEST = 0.2

#: What a search takes, in passes of the largest size: it captures and measures several, and drops another kind.
_SEARCH_COST = 4
#: Kinds of requests whose nonces are added up; the one that was asked for longest ago is forgotten first.
_ASKED_KINDS = 64

#: Readies the workers for a pass, in segments of so many seconds if it takes longer, and lets them keep these others.
WarmUp = Callable[[BatchRequest, float, list[PassFields]], Awaitable[PassTiming]]


class GaveWayError(Exception):
    """Work that others go before was ended in the middle of a slice or of a search, which has to begin anew."""


class TunedPass(NamedTuple):
    """A forward pass of ``nonces`` that the workers have captured, and how long its ``segments`` take together."""

    nonces: int
    seconds: float
    segments: int

    @property
    def rate(self) -> float:
        """Nonces per second."""
        return self.nonces / self.seconds


class Autotuner:
    """Knows the passes that the workers keep captured, by kind; ``budget_seconds`` is what a slice may take."""

    def __init__(self, warm_up: WarmUp, budget_seconds: float) -> None:
        self._warm_up = warm_up
        self._budget = budget_seconds
        self._one_at_a_time = asyncio.Lock()
        self._forgotten = 0  # how often
        self._tuned = OrderedDict[PassSpec, TunedPass]()
        self._asked = OrderedDict[PassSpec, int]()  # nonces of requests

    @property
    def is_full(self) -> bool:
        """Whether the workers keep as many kinds as they may."""
        return len(self._tuned) >= MAX_KINDS

    def find(self, spec: PassSpec) -> TunedPass | None:
        """Return the pass for work of this kind, if there is one."""
        return self._tuned.get(spec)

    def forget(self) -> None:
        """Know nothing any more: the workers drop what they captured."""
        self._forgotten += 1
        self._tuned.clear()
        self._asked.clear()

    def is_worth(self, request: RoundRequest, nonces: int, facts: ModelFacts) -> bool:
        """Whether so many nonces, with those of the same kind that were asked for before, pay for the search."""
        spec = PassSpec.of_round(request)
        self._asked[spec] = self._asked.pop(spec, 0) + nonces
        if len(self._asked) > _ASKED_KINDS:
            self._asked.popitem(last=False)
        return self._asked[spec] >= _SEARCH_COST * _most_captured(spec, facts)

    def used(self, spec: PassSpec) -> None:
        """Let this kind be the last that makes way for another."""
        if spec in self._tuned:
            self._tuned.move_to_end(spec)

    async def tune(self, request: RoundRequest, facts: ModelFacts, gives_way: Callable[[], bool]) -> None:
        """Find the best pass for work like this, once. EngineError as from the engine.

        WeightsChangedError if what it has measured so far is to be forgotten. GaveWayError if it ``gives_way`` between
        two passes.

        Takes seconds in pieces, between which chat runs. Does nothing where the workers capture nothing.
        """
        spec = PassSpec.of_round(request)
        async with self._one_at_a_time:
            if not facts["fused"] or spec in self._tuned:
                return
            while self.is_full:  # whatever comes of this: the workers need the memory now
                made_way, _ = self._tuned.popitem(last=False)
                self._asked.pop(made_way, None)  # what was asked for has paid for the search that is lost now
            found = await fastest_pass(
                partial(self._warmed_up, request, self._forgotten, gives_way),
                limit=_most_captured(spec, facts),
                seq_len=spec.seq_len,
                budget_seconds=self._budget,
            )
            if found is not None:
                self._tuned[spec] = found
            else:
                self._asked.pop(spec, None)  # requests have to pay for another search in vain, too

    async def _warmed_up(
        self,
        request: RoundRequest,
        forgotten: int,
        gives_way: Callable[[], bool],
        nonces: int,
        segment_seconds: float,
    ) -> PassTiming:
        if gives_way():
            raise GaveWayError
        keep = [spec.fields() for spec in self._tuned]
        timing = await self._warm_up(batch_request(request, range(nonces), nonces), segment_seconds, keep)
        if forgotten != self._forgotten:
            raise WeightsChangedError
        return timing


def _most_captured(spec: PassSpec, facts: ModelFacts) -> int:
    """Return how many nonces the largest pass of this kind holds."""
    return max(1, min(facts["max_captured_nonces"], facts["max_captured_tokens"] // spec.seq_len))


def first_nonces(seq_len: int) -> int:
    """Return how many nonces the first pass holds."""
    return max(1, _FIRST_TOKENS // seq_len)


def longest_segment(budget_seconds: float) -> float:
    """Return how many seconds a slice of whole passes, or a segment of one, may take."""
    return _FILLED * budget_seconds / STEPS_IN_FLIGHT


async def fastest_pass(
    warm_up: Callable[[int, float], Awaitable[PassTiming]],
    *,
    limit: int,
    seq_len: int,
    budget_seconds: float,
) -> TunedPass | None:
    """Find the forward pass that computes fastest within the time budget, of up to ``limit`` nonces.

    ``warm_up`` readies the workers for so many nonces, in segments of so many seconds where a pass takes longer.
    None if not even the smallest fits into their memory.
    """
    segment_seconds = longest_segment(budget_seconds)
    best, last, nonces = None, 0, min(limit, first_nonces(seq_len))
    while nonces > (0 if best is None else best.nonces):
        last, candidate = nonces, _tuned(nonces, await warm_up(nonces, segment_seconds))
        if candidate is None:
            nonces = limit = nonces // 2
            continue
        if best is not None and not _is_better(candidate, best, segment_seconds):
            break
        best, nonces = candidate, _next_size(candidate, limit, seq_len, segment_seconds)
    if best is not None and last != best.nonces:  # the workers keep what they captured last
        best = _tuned(best.nonces, await warm_up(best.nonces, segment_seconds))
    return best


def _tuned(nonces: int, found: PassTiming) -> TunedPass | None:
    return None if found["seconds"] is None else TunedPass(nonces, found["seconds"], found["segments"])


def _is_better(larger: TunedPass, best: TunedPass, segment_seconds: float) -> bool:
    if larger.segments == 1:
        return larger.seconds <= segment_seconds
    return larger.rate >= _WORTH_CUTTING * best.rate


def _next_size(best: TunedPass, limit: int, seq_len: int, segment_seconds: float) -> int:
    """Return a larger size that is worth a try, or 0."""
    largest = int(best.nonces * min(_MOST_GROWTH, segment_seconds / best.seconds))
    largest = min(limit, largest - largest % first_nonces(seq_len))  # whole tiles of matrix products
    if largest >= _LEAST_GROWTH * best.nonces:
        return largest
    # Otherwise it is cut; where it is nearly as large as it may be, that gains nothing.
    return limit if limit >= 2 * best.nonces else 0


class SliceSize(Protocol):
    """The size of the next slice of a piece of work; ``ahead`` says how many after it may begin already.

    It was found for ``weights``, as `Scheduler` counts them.
    """

    ahead: int
    weights: int

    @property
    def nonces(self) -> int:
        """Nonces of the slice, at least 1."""
        ...

    def batch(self, nonces: int) -> int:
        """Return how many nonces a forward pass of a slice of ``nonces`` holds."""
        ...

    def learn(self, nonces: int, seconds: float) -> None:
        """Adapt to a slice of ``nonces`` that took ``seconds``."""
        ...


class HalvingSliceSize:
    """One forward pass: the limit, halved as often as the time budget demands.

    Halving keeps the number of shapes small, for each of which the worker may have to prepare.
    """

    ahead = 0
    weights = 0

    def __init__(self, limit: int, budget_seconds: float) -> None:
        self._limit = limit
        self._budget = budget_seconds
        self._halvings = 0
        self._slow_in_a_row = 0

    @property
    def nonces(self) -> int:
        """Size of the next slice, at least 1."""
        return max(1, self._limit >> self._halvings)

    def batch(self, nonces: int) -> int:
        """Return all of them."""
        return nonces

    def learn(self, nonces: int, seconds: float) -> None:
        """Adapt to a slice that took ``seconds``. One slow slice may be the first of its shape."""
        self._slow_in_a_row = self._slow_in_a_row + 1 if seconds > self._budget else 0
        if self._slow_in_a_row > 1 and self.nonces > 1:
            self._halvings += 1
            self._slow_in_a_row = 0
        elif 2 * seconds <= self._budget and self._halvings:
            self._halvings -= 1


class TunedSliceSize:
    """As many captured forward passes as the time budget holds twice, since two slices are on their way; or one.

    A pass that is cut into segments is a slice for each. While one slice is answered, a pipeline of several ``stages``
    has as many behind it.
    """

    weights = 0

    def __init__(self, tuned: TunedPass, stages: int, budget_seconds: float) -> None:
        self.tuned = tuned
        self._batch, self._least_seconds, self._segments = tuned
        self._seconds = self._least_seconds
        self._longest = longest_segment(budget_seconds)
        self.ahead = stages

    @property
    def nonces(self) -> int:
        """Size of the next slice."""
        if self._segments > 1:
            return self._batch
        return self._batch * max(1, int(self._longest / self._seconds))

    def batch(self, nonces: int) -> int:
        """Return the captured size."""
        return self._batch

    def learn(self, nonces: int, seconds: float) -> None:
        """Adapt to a slice of whole passes; a segment of one takes longer than its share.

        One that was computed while chat ran seems to take no time.
        """
        passes, rest = divmod(nonces, self._batch)
        if not rest and self._segments == 1:
            self._seconds = max(self._least_seconds, self._seconds + _NEWEST * (seconds / passes - self._seconds))
