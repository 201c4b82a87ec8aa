# SPDX-License-Identifier: Apache-2.0
"""Whole batches as CUDA graphs: the CPU starts one with a single call, however many operations it has."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import GraphCaptureContext, get_pp_group, get_tp_group

from vllm_poc.worker.batches import MOST_PREPARED
from vllm_poc.worker.internals import StageOutput
from vllm_poc.worker.recipe import Recipe
from vllm_poc.worker.stage import Batch

#: A program in one part is for batches of a quarter of its size and more.
_MOST_PADDING = 4


class Program(NamedTuple):
    """A captured batch in parts that run one after the other.

    It reads ``seeds`` int64 ``[nonces, columns]`` and what the stage before made, and writes ``output``. It keeps the
    memory of its ``workspace``.
    """

    parts: Sequence[torch.cuda.CUDAGraph]
    seeds: Tensor
    received: Mapping[str, Tensor]
    output: StageOutput
    workspace: object

    def fill(self, seeds: Tensor, received: Mapping[str, Tensor]) -> None:
        """Enqueue which seeds the batch is for, from the CPU; it repeats one of them where it holds more."""
        missing = len(self.seeds) - len(seeds)
        padded = torch.cat((seeds, seeds[:1].expand(missing, -1)))
        self.seeds.copy_(padded.pin_memory(), non_blocking=True)
        for name, tensor in received.items():
            self.received[name].copy_(tensor)

    def run(self, part: int | None = None) -> StageOutput | None:
        """Enqueue a part, or all of them; the last returns the output of all nonces."""
        for graph in self.parts if part is None else [self.parts[part]]:
            graph.replay()
        if part is not None and part + 1 < len(self.parts):
            return None
        if isinstance(self.output, Tensor):
            return self.output.clone()
        return {name: tensor.clone() for name, tensor in self.output.items()}


class Programs:
    """The programs of recipes and batch sizes, those used last."""

    def __init__(self, device: torch.device, workspace: Callable[[], object]) -> None:
        self._device = device
        self._workspace = workspace
        self._stream = torch.cuda.Stream(device)
        self._programs = OrderedDict[Recipe, Program]()

    def find(self, recipe: Recipe, nonces: int) -> Program | None:
        """Return a program for batches of ``nonces`` or more, but not one that takes longer in one go."""
        program = self._programs.get(recipe)
        if program is None or nonces > len(program.seeds):
            return None
        # What is cut keeps its bound whatever it computes.
        return program if len(program.parts) > 1 or len(program.seeds) <= _MOST_PADDING * nonces else None

    def used(self, recipe: Recipe) -> None:
        """Let the recipe's program be the last that is forgotten."""
        if recipe in self._programs:
            self._programs.move_to_end(recipe)

    def make_room(self, recipe: Recipe) -> None:
        """Forget the recipe's program, and give back the memory that PyTorch keeps: a graph takes its own."""
        self.forget(recipe)
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()

    def capture(
        self, recipe: Recipe, seeds: Tensor, received: dict[str, Tensor], batch: Batch, cuts: Sequence[nn.Module]
    ) -> None:
        """Make ``batch`` of the ``seeds`` on the device a program, whose parts end behind the layers ``cuts``.

        RuntimeError if the device's graphs cannot hold it.
        """
        recording = _Recording(self._pool(), self._device)
        with self._capturing(), recording.cut_behind(cuts), recording.running():
            output = batch(received)
        self._programs[recipe] = Program(recording.graphs, seeds, received, output, self._workspace())

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        # As vLLM's `graph_capture`, which takes a new stream each time; PyTorch keeps memory for each stream for ever.
        context = GraphCaptureContext(self._stream)
        with get_tp_group().graph_capture(context), get_pp_group().graph_capture(context):
            yield

    def forget(self, recipe: Recipe) -> None:
        """Drop the recipe's program, and the oldest beyond the limit."""
        self._programs.pop(recipe, None)
        while len(self._programs) >= MOST_PREPARED:
            self._programs.popitem(last=False)

    def _pool(self) -> tuple[int, int]:
        # They never run at the same time, so one can use the memory of another. A pool ends with its last graph.
        for program in self._programs.values():
            pool: tuple[int, int] = program.parts[0].pool()
            return pool
        new: tuple[int, int] = torch.cuda.graph_pool_handle()
        return new


class _Recording:
    """Graphs that are captured one after the other."""

    def __init__(self, pool: tuple[int, int], device: torch.device) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = pool
        self._device = torch.cuda.current_device() if device.index is None else device.index

    @contextmanager
    def running(self) -> Iterator[None]:
        """Capture what is enqueued while the context lasts."""
        self._begin()
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        self.graphs[-1].capture_end()

    def _abandon(self) -> None:
        try:
            self.graphs[-1].capture_end()
        except RuntimeError:  # says the same; then PyTorch would go on taking memory for this graph
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device, self._pool)
                torch._C._cuda_releasePool(self._device, self._pool)

    @contextmanager
    def cut_behind(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """End a graph and begin the next behind each of these layers while the context lasts."""
        hooks = [layer.register_forward_hook(self._cut) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.graphs.append(graph)

    def _cut(self, *_: object) -> None:
        self.graphs[-1].capture_end()
        self._begin()
