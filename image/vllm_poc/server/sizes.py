# SPDX-License-Identifier: Apache-2.0
"""How many nonces a slice and a forward pass hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from vllm_poc.worker.batches import UNDER_WAY, Rehearsal

#: Tokens of the first batch that is rehearsed; it takes a few milliseconds, or is a single nonce.
_FIRST_TOKENS = 512
#: How much larger than its measured predecessor a batch may be: small ones say little about large ones.
_MOST_GROWTH = 8
#: Weight of the newest slice in the mean time of a batch.
_NEWEST = 0.2
#: Share of the time budget that is planned: a card that is hot is slower, and calls take time.
_FILLED = 0.7
#: How many times larger the next batch must be to be worth a rehearsal.
_LEAST_GROWTH = 1.25
#: How many times as fast as a smaller pass one in parts must be measured, at least. It is measured on a card that gets
#: hot meanwhile, and saves what that card spends on reading the weights more often.
_WORTH_CUTTING = 0.95


class SliceSize(Protocol):
    """The size of the next slice of a piece of work; ``ahead`` says how many after it may begin already."""

    ahead: int

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


class HalvedSize:
    """One forward pass: the limit, halved as often as the time budget demands.

    Halving keeps the number of shapes small, for each of which the worker may have to prepare.
    """

    ahead = 0

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


class Rehearsed(NamedTuple):
    """A forward pass of ``nonces`` that the workers have prepared, how long it took, and in how many parts it runs."""

    nonces: int
    seconds: float
    parts: int

    @property
    def rate(self) -> float:
        """Nonces per second."""
        return self.nonces / self.seconds


def longest_part(budget_seconds: float) -> float:
    """Return how many seconds a slice of whole passes, or a part of one, may take."""
    return _FILLED * budget_seconds / UNDER_WAY


class RehearsedSize:
    """As many prepared forward passes as the time budget holds twice, since two slices are on their way; or one.

    A pass that is cut into parts is a slice for each. While one slice is answered, a pipeline of several ``stages`` has
    as many behind it.
    """

    def __init__(self, rehearsed: Rehearsed, stages: int, budget_seconds: float) -> None:
        self._batch, self._least_seconds, self._parts = rehearsed
        self._seconds = self._least_seconds
        self._longest = longest_part(budget_seconds)
        self.ahead = stages

    @property
    def nonces(self) -> int:
        """Size of the next slice."""
        if self._parts > 1:
            return self._batch
        return self._batch * max(1, int(self._longest / self._seconds))

    def batch(self, nonces: int) -> int:
        """Return the prepared size."""
        return self._batch

    def learn(self, nonces: int, seconds: float) -> None:
        """Adapt to a slice of whole passes; a part of one takes longer than its share.

        One that was computed while chat ran seems to take no time.
        """
        passes, rest = divmod(nonces, self._batch)
        if not rest and self._parts == 1:
            self._seconds = max(self._least_seconds, self._seconds + _NEWEST * (seconds / passes - self._seconds))


async def rehearse(
    prepare: Callable[[int, float], Awaitable[Rehearsal]],
    *,
    limit: int,
    seq_len: int,
    budget_seconds: float,
) -> Rehearsed | None:
    """Find the forward pass that computes fastest within the time budget, of up to ``limit`` nonces.

    ``prepare`` makes the workers ready for so many nonces, in parts of so many seconds where a pass takes longer.
    None if not even the smallest fits into their memory.
    """
    part_seconds = longest_part(budget_seconds)
    best, last, nonces = None, 0, min(limit, max(1, _FIRST_TOKENS // seq_len))
    while nonces > (0 if best is None else best.nonces):
        last, candidate = nonces, _prepared(nonces, await prepare(nonces, part_seconds))
        if candidate is None:
            nonces = limit = nonces // 2
            continue
        if best is not None and not _is_better(candidate, best, part_seconds):
            break
        best, nonces = candidate, _next_size(candidate, limit, seq_len, part_seconds)
    if best is not None and last != best.nonces:  # the workers keep what they prepared last
        best = _prepared(best.nonces, await prepare(best.nonces, part_seconds))
    return best


def _prepared(nonces: int, found: Rehearsal) -> Rehearsed | None:
    return None if found["seconds"] is None else Rehearsed(nonces, found["seconds"], found["parts"])


def _is_better(larger: Rehearsed, best: Rehearsed, part_seconds: float) -> bool:
    if larger.parts == 1:
        return larger.seconds <= part_seconds
    return larger.rate >= _WORTH_CUTTING * best.rate


def _next_size(best: Rehearsed, limit: int, seq_len: int, part_seconds: float) -> int:
    """Return a larger size that is worth a try, or 0."""
    largest = int(best.nonces * min(_MOST_GROWTH, part_seconds / best.seconds))
    largest = min(limit, largest - largest % max(1, _FIRST_TOKENS // seq_len))  # whole tiles of matrix products
    if largest >= _LEAST_GROWTH * best.nonces:
        return largest
    # Otherwise it is cut; where it is nearly as large as it may be, that gains nothing.
    return limit if limit >= 2 * best.nonces else 0
