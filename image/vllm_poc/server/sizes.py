# SPDX-License-Identifier: Apache-2.0
"""How many nonces a slice and a forward pass hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

#: Tokens of the first batch that is rehearsed; it takes a few milliseconds, or is a single nonce.
_FIRST_TOKENS = 512
#: How much larger than its measured predecessor a batch may be: small ones say little about large ones.
_MOST_GROWTH = 8
#: Weight of the newest slice in the mean time of a batch.
_NEWEST = 0.2


class SliceSize(Protocol):
    """The size of the next slice of a piece of work; ``ahead`` says whether the one after it may begin already."""

    ahead: bool

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

    ahead = False

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
    """A forward pass of ``nonces`` that the workers have prepared, and how long it took."""

    nonces: int
    seconds: float


class RehearsedSize:
    """As many prepared forward passes as half of the time budget holds, at least one: two slices are on their way."""

    ahead = True

    def __init__(self, rehearsed: Rehearsed, budget_seconds: float) -> None:
        self._batch, self._seconds = rehearsed
        self._budget = budget_seconds

    @property
    def nonces(self) -> int:
        """Size of the next slice."""
        return self._batch * max(1, int(self._budget / 2 / self._seconds))

    def batch(self, nonces: int) -> int:
        """Return the prepared size."""
        return self._batch

    def learn(self, nonces: int, seconds: float) -> None:
        """Adapt to a slice of whole passes; a part of one takes longer than its share."""
        passes, rest = divmod(nonces, self._batch)
        if not rest:
            self._seconds += _NEWEST * (seconds / passes - self._seconds)


async def rehearse(
    seconds_of: Callable[[int], Awaitable[float | None]], *, limit: int, seq_len: int, budget_seconds: float
) -> Rehearsed | None:
    """Find the largest forward pass, up to ``limit`` nonces, of which two fit into the time budget.

    ``seconds_of`` prepares one of so many nonces and returns its time, or None if the memory is too small. None if
    not even the smallest fits.
    """
    best, nonces = None, min(limit, max(1, _FIRST_TOKENS // seq_len))
    while True:
        seconds = await seconds_of(nonces)
        if seconds is None or (best is not None and 2 * seconds > budget_seconds):
            if best is not None:
                await seconds_of(best.nonces)  # the workers keep what they prepared last
            return best
        best = Rehearsed(nonces, seconds)
        growth = min(_MOST_GROWTH, int(budget_seconds / 2 / seconds))
        if nonces == limit or growth <= 1:
            return best
        nonces = min(limit, nonces * growth)
