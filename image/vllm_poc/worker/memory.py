# SPDX-License-Identifier: Apache-2.0
"""Whether a batch fits into the memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

#: Left to vLLM and the driver, in bytes.
_MARGIN = 512 * 2**20
#: How much more a batch may take than was foreseen: memory has gaps.
_TIMES = 1.3


class _Need(NamedTuple):
    tokens: int
    bytes: int


class Memory:
    """Foresees from the two largest batches so far what others need. Before the first, and on a CPU, all fit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[_Need] = []

    def has_room_for(self, tokens: int) -> bool:
        """Whether a batch of ``tokens`` fits, as far as is known, into what nobody has taken.

        What PyTorch keeps for later is not counted: it is what chat needs at its peak, or that of recorded passes.
        """
        if not self._known:
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        return bool(_TIMES * self._needed(tokens) + _MARGIN <= free)

    @contextmanager
    def learning(self, tokens: int) -> Iterator[None]:
        """Measure what batches of ``tokens`` take that run while the context lasts."""
        if self._device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        need = _Need(tokens, torch.cuda.max_memory_allocated(self._device) - before)
        self._known = sorted({known.tokens: known for known in [*self._known, need]}.values())[-2:]

    def _needed(self, tokens: int) -> float:
        largest = self._known[-1]
        if len(self._known) == 1:
            return largest.bytes * tokens / largest.tokens
        smaller = self._known[0]
        per_token = max(0.0, (largest.bytes - smaller.bytes) / (largest.tokens - smaller.tokens))
        return largest.bytes + per_token * (tokens - largest.tokens)
