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
    """A request with the values of its nonces on the CPU, valid once ``done`` has happened.

    There are no values on most ranks, nor from a part that another one follows; ``parts`` is how many there are.
    """

    request: BatchRequest
    parts: int
    values: Tensor | None
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, request: BatchRequest, parts: int, values: Sequence[Tensor], device: torch.device) -> Work:
        """Fetch the values of all batches, without waiting for them on a GPU."""
        complete = torch.cat(tuple(values)) if values else None
        if device.type != "cuda":
            return cls(request, parts, complete, None)
        fetched = None
        if complete is not None:
            fetched = torch.empty(complete.shape, dtype=complete.dtype, pin_memory=True)
            fetched.copy_(complete, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(request, parts, fetched, done)

    def result(self) -> BatchResult:
        """Wait for the work, and return what the request asks for."""
        if self.done is not None:
            self.done.synchronize()
        if self.values is None:
            return BatchResult(parts=self.parts, nonces=[], not_finite=[])
        return batch_result(self.values, self.request, self.parts)
