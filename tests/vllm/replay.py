# SPDX-License-Identifier: Apache-2.0
"""Forward passes that are replayed in segments on a CPU, which has no CUDA graphs: the last one computes all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_poc.worker.graphs import CapturedPass, GraphCache
from vllm_poc.worker.warm_up import WarmUp

if TYPE_CHECKING:
    from vllm_poc.rpc import PassSpec
    from vllm_poc.worker.graphs import Batch
    from vllm_poc.worker.model.adapter import StageOutput
    from vllm_poc.worker.model_runner import PocModelRunner


class _Segment:
    """Stands in for a CUDA graph, and fails unless the segment before it was the last that ran."""

    last: tuple[object, int] | None = None

    def __init__(self, captured: object, number: int, replay: Callable[[], None] = lambda: None) -> None:
        self._place = (captured, number)
        self._replay = replay

    def replay(self) -> None:
        captured, number = self._place
        if number and _Segment.last != (captured, number - 1):
            raise RuntimeError(f"segment {number} ran after {_Segment.last}")
        _Segment.last = self._place
        self._replay()


class _ReplayedGraphs(GraphCache):
    def __init__(self) -> None:
        self._captured = {}

    def evict(self, spec: PassSpec, keep: Collection[PassSpec]) -> None:
        """Drop what the real one drops."""
        for known in set(self._captured) - (set(keep) - {spec}):
            self.forget(known)

    def capture(
        self, spec: PassSpec, seeds: Tensor, received: dict[str, Tensor], batch: Batch, cuts: Sequence[nn.Module]
    ) -> None:
        """Make a pass that computes ``batch`` anew from what then stands in ``seeds`` and ``received``."""

        def computed() -> StageOutput:
            return batch({name: tensor.clone() for name, tensor in received.items()})

        def replay() -> None:
            found = computed()
            if isinstance(output, Tensor):
                output.copy_(found)
            else:
                for name, tensor in output.items():
                    tensor.copy_(found[name])

        output = computed()
        captured = object()
        segments = [*(_Segment(captured, number) for number in range(len(cuts))), _Segment(captured, len(cuts), replay)]
        self._captured[spec] = CapturedPass(segments, seeds, received, output, None)


def replay_passes(runner: PocModelRunner) -> None:
    """Let the runner ready its passes for repetition, and in segments, as on a GPU."""
    torch.Tensor.pin_memory = lambda tensor: tensor
    runner._graphs = _ReplayedGraphs()
    runner._warm_up = WarmUp(runner.stage, runner._graphs, runner.memory)
