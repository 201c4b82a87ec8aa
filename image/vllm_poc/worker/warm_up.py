# SPDX-License-Identifier: Apache-2.0
"""Forward passes are warmed up before they are repeated: whether they fit into the memory, and how long they take.

On a GPU they become CUDA graphs. All ranks do the same, and decide together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_poc.logs import get_logger
from vllm_poc.rpc import PassSpec, PassTiming
from vllm_poc.worker.graphs import Batch, GraphCache
from vllm_poc.worker.memory import Memory
from vllm_poc.worker.model.adapter import ModelAdapter, StageOutput
from vllm_poc.worker.model.layer_subset import only, spans

_log = get_logger(__name__)

_TIMED_RUNS = 2
#: Segments that are timed, for all.
_TIMED_SEGMENTS = 2
#: How many times longer than a graph a pass may take whose operations are started one by one.
_SLOWER_WITHOUT_GRAPH = 4
#: How a capture ends; the worst of all ranks counts.
_CAPTURED, _CANNOT, _OUT_OF_MEMORY = range(3)

#: The answer if the device's memory is too small.
OUT_OF_MEMORY = PassTiming(seconds=None, segments=1)


class StageBatches(Protocol):
    """What is needed of this rank's share of a batch."""

    @property
    def adapter(self) -> ModelAdapter:
        """The served model."""
        ...

    def drawn_bytes(self, spec: PassSpec, nonces: int) -> int:
        """Return how many bytes of a batch depend on the nonces and not on their tokens."""
        ...

    def batch(
        self, spec: PassSpec, seeds: Tensor, received: dict[str, Tensor], *, in_one_go: bool = True
    ) -> StageOutput:
        """Return the values of the nonces on the last stage, and what the next one goes on with on the others."""
        ...


class _FirstRun(NamedTuple):
    """What a stage got from the one before, and how many seconds all its layers would take."""

    received: dict[str, Tensor]
    seconds: float


class WarmUp:
    """Readies the passes of a stage for repetition; on a GPU as CUDA graphs."""

    def __init__(self, stage: StageBatches, graphs: GraphCache | None, memory: Memory) -> None:
        self._stage = stage
        self._graphs = graphs
        self._device = stage.adapter.device
        self._memory = memory

    def run(self, spec: PassSpec, seeds: Tensor, segment_seconds: float, keep: Collection[PassSpec]) -> PassTiming:
        """Ready passes of as many nonces as there are ``seeds``, in segments of up to ``segment_seconds`` where it can.

        Of the passes captured before, those of the specifications ``keep`` stay.
        """
        ranks, tokens = self._stage.adapter.ranks, len(seeds) * spec.seq_len
        if not ranks.agreed(self._memory.fits(tokens, self._stage.drawn_bytes(spec, len(seeds)))):
            return OUT_OF_MEMORY
        seeds = seeds.to(self._device)
        with self._memory.learning(tokens):
            received, seconds = self._run_subset(spec, seeds)
        seconds = ranks.largest(seconds)
        if self._graphs is None:
            return PassTiming(seconds=seconds, segments=1)
        return _Capture(self._stage, self._graphs, spec, seeds, received, keep).timing(seconds, segment_seconds)

    def _run_subset(self, spec: PassSpec, seeds: Tensor) -> _FirstRun:
        """Run a few layers, first those that come first, if need be, then the last ones, of which most are alike."""
        adapter = self._stage.adapter
        some = spans(adapter)
        # All stages do the same number of runs, and the last of them is timed.
        runs = 1 + int(adapter.ranks.largest(len(some)))
        padded = [*some, *[some[-1]] * (runs - len(some))]
        return [self._run(spec, seeds, span) for span in padded][-1]

    def _run(self, spec: PassSpec, seeds: Tensor, span: range) -> _FirstRun:
        ranks = self._stage.adapter.ranks
        received = ranks.receive()
        kept = {name: tensor.clone() for name, tensor in received.items()}
        with only(self._stage.adapter, span) as times:
            started = _now(self._device)
            output = self._stage.batch(spec, seeds, received)
            seconds = _now(self._device) - started
        if isinstance(output, dict):
            ranks.send(output)
        return _FirstRun(kept, times * seconds)


class _Capture(NamedTuple):
    """A batch that is captured."""

    stage: StageBatches
    graphs: GraphCache
    spec: PassSpec
    seeds: Tensor
    received: dict[str, Tensor]
    keep: Collection[PassSpec]

    def timing(self, seconds: float, segment_seconds: float) -> PassTiming:
        """Capture the batch, which takes ``seconds`` without a graph, and time it."""
        # A small pass takes most of these seconds to be started: try it in one go.
        segments = self._segments(seconds, segment_seconds) if seconds > _SLOWER_WITHOUT_GRAPH * segment_seconds else 1
        outcome, measured = self._measured(segments)
        wanted = self._segments(measured, segment_seconds)
        if outcome == _CAPTURED and (segments == 1 < wanted or 2 * wanted <= segments):
            segments = wanted
            outcome, measured = self._measured(segments)
        if outcome == _CAPTURED:
            return PassTiming(seconds=measured, segments=segments)
        self.graphs.forget(self.spec)
        return OUT_OF_MEMORY if outcome == _OUT_OF_MEMORY else PassTiming(seconds=seconds, segments=1)

    def _measured(self, segments: int) -> tuple[int, float]:
        """Capture the batch in so many segments; return how that ended on all ranks, and the seconds of a pass."""
        ranks = self.stage.adapter.ranks
        self.graphs.evict(self.spec, self.keep)
        outcome = int(ranks.largest(self._captured(segments)))
        return outcome, ranks.largest(self._seconds(segments)) if outcome == _CAPTURED else 0.0

    def _segments(self, seconds: float, segment_seconds: float) -> int:
        """Return how many segments all stages cut a pass of ``seconds`` into, at most one for each layer."""
        ranks, layers = self.stage.adapter.ranks, len(self.stage.adapter.own_layers)
        together = max(1, min(layers, int(layers * segment_seconds / seconds))) if seconds else layers
        return min(int(ranks.largest(math.ceil(layers / together))), -int(ranks.largest(-layers)))

    def _layers(self, segment: int, segments: int) -> int:
        """Return how many layers this stage has before a segment."""
        return segment * len(self.stage.adapter.own_layers) // segments

    def _captured(self, segments: int) -> int:
        cuts = [self.stage.adapter.own_layers[self._layers(segment, segments) - 1] for segment in range(1, segments)]
        batch: Batch = partial(self.stage.batch, self.spec, self.seeds, in_one_go=not cuts)
        try:
            self.graphs.capture(self.spec, self.seeds, self.received, batch, cuts)
        except torch.OutOfMemoryError:
            return _OUT_OF_MEMORY
        except RuntimeError:
            _log.exception("this model's forward pass cannot be made a CUDA graph: PoC runs it step by step")
            return _CANNOT
        return _CAPTURED

    def _seconds(self, segments: int) -> float:
        """Return the time of a pass from that of its first segments."""
        captured = self.graphs.find(self.spec, len(self.seeds))
        assert captured is not None  # noqa: S101 - captured just now
        timed = min(_TIMED_SEGMENTS, segments)
        started = 0.0
        for run in range(1 + _TIMED_RUNS):
            if run == 1:  # the first puts the graphs on the device
                started = _now(self.seeds.device)
            for segment in range(timed):
                captured.run(segment)
        layers = self._layers(timed, segments)
        return (_now(self.seeds.device) - started) / _TIMED_RUNS * len(self.stage.adapter.own_layers) / layers


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
