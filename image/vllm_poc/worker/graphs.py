# SPDX-License-Identifier: Apache-2.0
"""Whole batches as CUDA graphs: the CPU starts one with a single call, however many operations it has."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from vllm_poc.rpc import PassSpec
from vllm_poc.worker.model.adapter import StageOutput
from vllm_poc.worker.model.ranks import Ranks

#: A pass in one segment is for batches of a quarter of its size and more.
_MOST_PADDING = 4

#: Computes a batch of a stage from what the stage before made.
Batch = Callable[[dict[str, Tensor]], StageOutput]


class CapturedPass(NamedTuple):
    """A captured batch in segments that run one after the other.

    It reads ``seeds`` int64 ``[nonces, columns]`` and what the stage before made, and writes ``output``. It keeps the
    memory of its ``workspace``.
    """

    segments: Sequence[torch.cuda.CUDAGraph]
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

    def run(self, segment: int | None = None) -> StageOutput | None:
        """Enqueue a segment, or all of them; the last returns the output of all nonces."""
        for graph in self.segments if segment is None else [self.segments[segment]]:
            graph.replay()
        if segment is not None and segment + 1 < len(self.segments):
            return None
        if isinstance(self.output, Tensor):
            return self.output.clone()
        return {name: tensor.clone() for name, tensor in self.output.items()}


class GraphCache:
    """One captured pass for each specification, as long as the server wants it kept."""

    def __init__(self, ranks: Ranks, device: torch.device, workspace: Callable[[], object]) -> None:
        self._ranks = ranks
        self._device = device
        self._workspace = workspace
        self._stream = torch.cuda.Stream(device)
        self._captured: dict[PassSpec, CapturedPass] = {}

    def find(self, spec: PassSpec, nonces: int) -> CapturedPass | None:
        """Return a pass for batches of ``nonces`` or more, except one that takes longer in one go."""
        captured = self._captured.get(spec)
        if captured is None or nonces > len(captured.seeds):
            return None
        # Segments keep their time bound for any batch; a whole pass may be much larger than what is asked for.
        return captured if len(captured.segments) > 1 or len(captured.seeds) <= _MOST_PADDING * nonces else None

    def evict(self, spec: PassSpec, keep: Collection[PassSpec]) -> None:
        """Drop all passes except ``keep``, and the one of ``spec``, and give back the memory that PyTorch keeps.

        A graph takes memory of its own.
        """
        for known in list(self._captured):
            if known == spec or known not in keep:
                self.forget(known)
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()

    def capture(
        self, spec: PassSpec, seeds: Tensor, received: dict[str, Tensor], batch: Batch, cuts: Sequence[nn.Module]
    ) -> None:
        """Capture ``batch`` of the ``seeds`` on the device, in segments that end behind the layers ``cuts``.

        RuntimeError if the device's graphs cannot hold it.
        """
        recording = _Recording(self._pool(), self._device)
        with self._ranks.graph_capture(self._stream), recording.cut_behind(cuts), recording.running():
            output = batch(received)
        self._captured[spec] = CapturedPass(recording.graphs, seeds, received, output, self._workspace())

    def forget(self, spec: PassSpec) -> None:
        """Drop the pass of this specification."""
        self._captured.pop(spec, None)

    def _pool(self) -> tuple[int, int]:
        # They never run at the same time, so one can use the memory of another. A pool ends with its last graph.
        for captured in self._captured.values():
            pool: tuple[int, int] = captured.segments[0].pool()
            return pool
        new: tuple[int, int] = torch.cuda.graph_pool_handle()
        return new


class StepGraphs:
    """Graphs of steps. They share memory, so they never run at the same time."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._alive = WeakSet[torch.cuda.CUDAGraph]()

    def capture(
        self, operations: Callable[[], None], cuts: Sequence[nn.Module], resumed: Callable[[], object]
    ) -> list[torch.cuda.CUDAGraph]:
        """Capture what ``operations`` enqueue, in graphs that end behind the layers ``cuts``.

        Each graph but the first begins with what ``resumed`` enqueues. RuntimeError if the device's graphs cannot hold
        it.
        """
        alive = next(iter(self._alive), None)  # a pool ends with its last graph
        recording = _Recording(alive.pool() if alive is not None else torch.cuda.graph_pool_handle(), self._device)
        with self._ranks.graph_capture(self._stream), recording.cut_behind(cuts, resumed), recording.running():
            operations()
        self._alive.update(recording.graphs)
        return recording.graphs


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
    def cut_behind(self, layers: Sequence[nn.Module], resumed: Callable[[], object] = lambda: None) -> Iterator[None]:
        """End a graph and begin the next, with what ``resumed`` enqueues, behind each layer while the context lasts."""

        def cut(*_: object) -> None:
            self.graphs[-1].capture_end()
            self._begin()
            resumed()

        hooks = [layer.register_forward_hook(cut) for layer in layers]
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
