# SPDX-License-Identifier: Apache-2.0
"""Where chains of the decode scheme lie in the blocks of a cache.

Most attention reads all tokens of a sequence, so that a chain has a block for each of its parts. Attention with a
window reads the last few only, and states are overwritten with each token. There a chain keeps as few blocks as that
takes, and uses them in turn. What its prefill writes before the window is read within that pass alone, and lies in
blocks that all prefills share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ChainShape(NamedTuple):
    """``nonces`` chains of ``seq_len`` tokens each, and of ``max_tokens`` steps.

    Of so many nonces ``together`` are prefilled at a time.
    """

    nonces: int
    seq_len: int
    max_tokens: int
    together: int

    @property
    def capacity(self) -> int:
        """How many tokens a chain has in the end."""
        return self.seq_len + self.max_tokens


class Placement(NamedTuple):
    """Where a batch of chains lies in their cache.

    ``first`` is the number of the batch's first chain. ``before`` tokens of each are in the cache already: none of them
    before a prefill.
    """

    chains: ChainShape
    first: int = 0
    before: int = 0


class ChainBlocks(NamedTuple):
    """How one kind of attention has its blocks, of ``size`` tokens each.

    Each chain keeps up to ``kept`` of them, which it uses in turn; None stands for all. A single one holds a state, or
    tokens that overwrite each other.
    """

    size: int
    kept: int | None = None

    def each(self, chains: ChainShape) -> int:
        """Return how many blocks a chain keeps."""
        needed = -(-chains.capacity // self.size)
        return needed if self.kept is None else min(self.kept, needed)

    def shared(self, chains: ChainShape) -> int:
        """Return how many blocks of a prefilled chain lie where all prefills have them."""
        if self.kept in (None, 1):
            return 0
        return max(0, -(-chains.seq_len // self.size) - self.each(chains))

    def most_shared(self, tokens: int) -> int:
        """Return how many blocks prefills share at most, of so many tokens at a time."""
        return 0 if self.kept in (None, 1) else -(-tokens // self.size)

    def count(self, chains: ChainShape) -> int:
        """Return the number of all blocks, with the first, which is left empty."""
        return 1 + self.shared(chains) * min(chains.together, chains.nonces) + self.each(chains) * chains.nonces

    def table(self, place: Placement, nonces: int, device: torch.device) -> Tensor:
        """Return the blocks of so many chains from the first on, in the order of tokens: int64 ``[nonces, blocks]``."""
        chains, each, shared = place.chains, self.each(place.chains), self.shared(place.chains)
        numbers = torch.arange(-(-chains.capacity // self.size), device=device)
        rows = torch.arange(nonces, device=device).unsqueeze(1)
        kept = 1 + shared * min(chains.together, chains.nonces) + (place.first + rows) * each + numbers % each
        return kept if place.before else torch.where(numbers < shared, 1 + rows * shared + numbers, kept)
