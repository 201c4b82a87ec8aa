# SPDX-License-Identifier: Apache-2.0
"""Work that the device has been given, and whose result may still be on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.worker.batches import BatchRequest, BatchResult
from vllm_poc.worker.results import batch_result


class Work(NamedTuple):
    """Values of nonces on the CPU, valid once ``done`` has happened; None on most ranks and from most parts."""

    values: Tensor | None
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, values: Sequence[Tensor], device: torch.device) -> Work:
        """Fetch the values of all batches, without waiting for them on a GPU."""
        complete = torch.cat(tuple(values)) if values else None
        if device.type != "cuda":
            return cls(complete, None)
        fetched = None
        if complete is not None:
            fetched = torch.empty(complete.shape, dtype=complete.dtype, pin_memory=True)
            fetched.copy_(complete, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(fetched, done)

    def wait(self) -> None:
        """Wait for the device."""
        if self.done is not None:
            self.done.synchronize()

    def result(self, request: BatchRequest) -> BatchResult:
        """Wait for the device, and return what the request asks for, if it is this rank that has it."""
        self.wait()
        if self.values is None:
            return BatchResult(complete=True, nonces=[], not_finite=[])
        return batch_result(self.values, request)
