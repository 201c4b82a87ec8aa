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


def has_room_beside_chat(device: torch.device, chat_peak: int, nbytes: int) -> bool:
    """Whether chat finds the memory of its largest forward pass while so many bytes are held. On a CPU it does."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return bool(nbytes + max(chat_peak, _MARGIN) <= free + _kept(device))


def _kept(device: torch.device) -> int:
    """Return how many bytes PyTorch keeps for later."""
    kept: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return kept


class _Need(NamedTuple):
    tokens: int
    bytes: int


class Memory:
    """Foresees from the two largest batches so far what others need, on a GPU. On a CPU all fit.

    ``chat_peak`` is what the activations of chat's largest forward pass take, in bytes.
    """

    def __init__(self, device: torch.device, chat_peak: int = 0) -> None:
        self._device = device
        self._chat_peak = chat_peak
        #: What is known to take so many bytes in a batch of any size.
        self.fixed = 0
        self._known: list[_Need] = []

    def fits(self, tokens: int, drawn: int = 0) -> bool:
        """Whether a batch of ``tokens`` is expected to fit, together with ``drawn`` bytes that do not depend on them.

        It may use memory that is free on the device and that chat does not need at its peak. Memory that PyTorch keeps
        for later does not count: chat needs it, or captured passes do.
        """
        if self._device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        if not self._known:  # nothing but what is drawn
            return bool(_TIMES * drawn <= free)
        needed = _TIMES * (self._needed(tokens) + drawn) + _MARGIN
        return bool(needed <= free - self._still_chats())

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

    def _still_chats(self) -> int:
        """Return how much of chat's peak PyTorch does not keep: vLLM lets go of it once it has measured it."""
        return max(0, self._chat_peak - _kept(self._device))

    def _needed(self, tokens: int) -> float:
        largest = self._known[-1]
        if len(self._known) == 1:
            fixed = min(self.fixed, largest.bytes)
            return fixed + (largest.bytes - fixed) * tokens / largest.tokens
        smaller = self._known[0]
        per_token = max(0.0, (largest.bytes - smaller.bytes) / (largest.tokens - smaller.tokens))
        return largest.bytes + per_token * (tokens - largest.tokens)
