# SPDX-License-Identifier: Apache-2.0
"""Whether a batch fits into the device's memory, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

#: Left to vLLM and the driver, in bytes.
_MARGIN = 512 * 2**20
#: What a batch takes while it is captured: once for itself, once for the runs before.
_TIMES = 2
_TIMED_RUNS = 3


class Memory:
    """Learns from small batches what larger ones need."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes_per_token = 0.0

    def has_room_for(self, tokens: int) -> bool:
        """Whether a batch of ``tokens`` fits, as far as is known."""
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return bool(_TIMES * self._bytes_per_token * tokens + _MARGIN <= free + cached)

    def learn(self, tokens: int, run: Callable[[], object]) -> None:
        """Measure what a run of a batch of ``tokens`` takes."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        peak = torch.cuda.max_memory_allocated(self._device)
        self._bytes_per_token = max(self._bytes_per_token, (peak - before) / tokens)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a run, of several in a row, with the device's work."""
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(_TIMED_RUNS):
        run()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / _TIMED_RUNS
