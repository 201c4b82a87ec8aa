# SPDX-License-Identifier: Apache-2.0
"""Forward passes are tried before they are repeated: whether they fit into the memory, how long they take.

All ranks do the same, and decide together.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.logs import get_logger
from vllm_poc.worker.batches import Rehearsal
from vllm_poc.worker.few_layers import only, spans
from vllm_poc.worker.memory import Memory
from vllm_poc.worker.programs import Programs
from vllm_poc.worker.recipe import Recipe
from vllm_poc.worker.stage import Stage

_log = get_logger(__name__)

_TIMED_RUNS = 2
#: Parts that are timed, for all.
_TIMED_PARTS = 2
#: How many times longer than a graph a pass may take whose operations are started one by one.
_SLOWER_WITHOUT_GRAPH = 4
#: How a capture ends; the worst of all ranks counts.
_CAPTURED, _CANNOT, _NO_ROOM = range(3)

#: The answer if the device's memory is too small.
NO_ROOM = Rehearsal(seconds=None, parts=1)


class _Trial(NamedTuple):
    """What a stage got from the one before, and how many seconds all its layers would take."""

    received: dict[str, Tensor]
    seconds: float


class Rehearser:
    """Prepares the passes of a stage; on a GPU as CUDA graphs."""

    def __init__(self, stage: Stage, programs: Programs | None, memory: Memory) -> None:
        self._stage = stage
        self._programs = programs
        self._device = stage.runner.device
        self._memory = memory

    def rehearse(self, recipe: Recipe, seeds: Tensor, part_seconds: float) -> Rehearsal:
        """Prepare passes of as many nonces as there are ``seeds``, in parts of up to ``part_seconds`` where it can."""
        ranks, tokens = self._stage.runner.ranks, len(seeds) * recipe.seq_len
        if not ranks.agreed(self._memory.has_room_for(tokens, self._stage.drawn_bytes(recipe, len(seeds)))):
            return NO_ROOM
        seeds = seeds.to(self._device)
        with self._memory.learning(tokens):
            received, seconds = self._try(recipe, seeds)
        seconds = ranks.largest(seconds)
        if self._programs is None:
            return Rehearsal(seconds=seconds, parts=1)
        return _Capture(self._stage, self._programs, recipe, seeds, received).rehearsal(seconds, part_seconds)

    def _try(self, recipe: Recipe, seeds: Tensor) -> _Trial:
        """Run a few layers, first those that come first, if need be, then the last ones, of which most are alike."""
        runner = self._stage.runner
        some = spans(runner)
        # All stages do the same number of runs, and the last of them is timed.
        runs = 1 + int(runner.ranks.largest(len(some)))
        padded = [*some, *[some[-1]] * (runs - len(some))]
        return [self._run(recipe, seeds, span) for span in padded][-1]

    def _run(self, recipe: Recipe, seeds: Tensor, span: range) -> _Trial:
        ranks = self._stage.runner.ranks
        received = ranks.receive()
        kept = {name: tensor.clone() for name, tensor in received.items()}
        with only(self._stage.runner, span) as times:
            started = _now(self._device)
            output = self._stage.batch(recipe, seeds, received)
            seconds = _now(self._device) - started
        if isinstance(output, dict):
            ranks.send(output)
        return _Trial(kept, times * seconds)


class _Capture(NamedTuple):
    """A batch that is made a program."""

    stage: Stage
    programs: Programs
    recipe: Recipe
    seeds: Tensor
    received: dict[str, Tensor]

    def rehearsal(self, seconds: float, part_seconds: float) -> Rehearsal:
        """Capture the batch, which takes ``seconds`` without a graph, and time it."""
        # A small pass takes most of these seconds to be started: try it in one go.
        parts = self._parts(seconds, part_seconds) if seconds > _SLOWER_WITHOUT_GRAPH * part_seconds else 1
        outcome, measured = self._measured(parts)
        wanted = self._parts(measured, part_seconds)
        if outcome == _CAPTURED and (parts == 1 < wanted or 2 * wanted <= parts):
            parts = wanted
            outcome, measured = self._measured(parts)
        if outcome == _CAPTURED:
            return Rehearsal(seconds=measured, parts=parts)
        self.programs.forget(self.recipe)
        return NO_ROOM if outcome == _NO_ROOM else Rehearsal(seconds=seconds, parts=1)

    def _measured(self, parts: int) -> tuple[int, float]:
        """Capture the batch in so many parts; return how that ended on all ranks, and the seconds of a stage's pass."""
        ranks = self.stage.runner.ranks
        self.programs.make_room(self.recipe)
        outcome = int(ranks.largest(self._captured(parts)))
        return outcome, ranks.largest(self._seconds(parts)) if outcome == _CAPTURED else 0.0

    def _parts(self, seconds: float, part_seconds: float) -> int:
        """Return how many parts all stages cut a pass of ``seconds`` into, at most one for each layer."""
        ranks, layers = self.stage.runner.ranks, len(self.stage.runner.own_layers)
        together = max(1, min(layers, int(layers * part_seconds / seconds))) if seconds else layers
        return min(int(ranks.largest(math.ceil(layers / together))), -int(ranks.largest(-layers)))

    def _layers(self, part: int, parts: int) -> int:
        """Return how many layers this stage has before a part."""
        return part * len(self.stage.runner.own_layers) // parts

    def _captured(self, parts: int) -> int:
        cuts = [self.stage.runner.own_layers[self._layers(part, parts) - 1] for part in range(1, parts)]
        batch = partial(self.stage.batch, self.recipe, self.seeds, in_one_go=not cuts)
        try:
            self.programs.capture(self.recipe, self.seeds, self.received, batch, cuts)
        except torch.OutOfMemoryError:
            return _NO_ROOM
        except RuntimeError:
            _log.exception("this model's forward pass cannot be made a CUDA graph: PoC runs it step by step")
            return _CANNOT
        return _CAPTURED

    def _seconds(self, parts: int) -> float:
        """Return the time of a pass from that of its first parts."""
        program = self.programs.find(self.recipe, len(self.seeds))
        assert program is not None  # noqa: S101 - captured just now
        timed = min(_TIMED_PARTS, parts)
        started = 0.0
        for run in range(1 + _TIMED_RUNS):
            if run == 1:  # the first puts the graphs on the device
                started = _now(self.seeds.device)
            for part in range(timed):
                program.run(part)
        layers = self._layers(timed, parts)
        return (_now(self.seeds.device) - started) / _TIMED_RUNS * len(self.stage.runner.own_layers) / layers


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
