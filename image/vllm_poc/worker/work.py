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
    """A request with the values of its nonces on the CPU, valid once ``done`` has happened. No values on most ranks."""

    request: BatchRequest
    values: Tensor | None
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, request: BatchRequest, parts: Sequence[Tensor]) -> Work:
        """Fetch the values of all batches, without waiting for them on a GPU."""
        if not parts:
            return cls(request, None, None)
        values = torch.cat(tuple(parts))
        if not values.is_cuda:
            return cls(request, values, None)
        fetched = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        fetched.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(request, fetched, done)

    def result(self) -> BatchResult | None:
        """Wait for the values, and return what the request asks for."""
        if self.values is None:
            return None
        if self.done is not None:
            self.done.synchronize()
        return batch_result(self.values, self.request)
