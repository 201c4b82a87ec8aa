# SPDX-License-Identifier: Apache-2.0
"""Whole batches as CUDA graphs: the CPU starts one with a single call, however many operations it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.distributed.parallel_state import graph_capture

from vllm_poc.log import get_logger
from vllm_poc.worker.recipe import Recipe

_log = get_logger(__name__)

#: Recipes and sizes that are kept; each holds the memory of one batch.
MOST_PROGRAMS = 4
#: Runs before the capture, in which libraries choose their kernels and take their memory.
_REHEARSALS = 2


class Program(NamedTuple):
    """A captured batch: it reads ``seeds`` int64 ``[nonces, columns]`` and writes ``values``."""

    graph: torch.cuda.CUDAGraph
    seeds: Tensor
    values: Tensor

    def run(self, seeds: Tensor) -> Tensor:
        """Enqueue the batch for other seeds, and return its values."""
        self.seeds.copy_(seeds, non_blocking=True)
        self.graph.replay()
        return self.values.clone()


class Programs:
    """The programs of recipes and batch sizes, those used last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._programs = OrderedDict[tuple[Recipe, int], Program]()

    def find(self, recipe: Recipe, nonces: int) -> Program | None:
        """Return the program for batches of ``nonces``, if there is one."""
        program = self._programs.get((recipe, nonces))
        if program is not None:
            self._programs.move_to_end((recipe, nonces))
        return program

    def capture(self, recipe: Recipe, seeds: Tensor, batch: Callable[[Tensor], Tensor]) -> None:
        """Make ``batch``, which takes the seeds and enqueues all work, a program. Runs it a few times.

        What a graph cannot hold is left to run as it is. OutOfMemoryError if the device's memory is too small.
        """
        self.forget(recipe)
        try:
            self._programs[recipe, len(seeds)] = self._captured(seeds.to(self._device), batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            _log.exception("this model's forward pass cannot be made a CUDA graph: PoC runs it step by step")

    def _captured(self, static: Tensor, batch: Callable[[Tensor], Tensor]) -> Program:
        for _ in range(_REHEARSALS):
            batch(static)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with graph_capture(device=self._device) as context:  # readies the all-reduce of several ranks
            # Other threads may use the device meanwhile.
            arguments = {"stream": context.stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, pool=self._pool(), **arguments):
                values = batch(static)
        return Program(graph, static, values)

    def forget(self, recipe: Recipe) -> None:
        """Drop the recipe's program, and the oldest beyond the limit."""
        for key in [key for key in self._programs if key[0] == recipe]:
            del self._programs[key]
        while len(self._programs) >= MOST_PROGRAMS:
            self._programs.popitem(last=False)

    def _pool(self) -> tuple[int, int] | None:
        # They never run at the same time, so one can use the memory of another. A pool ends with its last graph.
        for program in self._programs.values():
            pool: tuple[int, int] = program.graph.pool()
            return pool
        return None
