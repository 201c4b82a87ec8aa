# SPDX-License-Identifier: Apache-2.0
"""Forward passes that are replayed in parts on a CPU, which has no CUDA graphs: the last part computes all of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm_poc.worker.programs import Program, Programs
from vllm_poc.worker.rehearsal import Rehearser

if TYPE_CHECKING:
    from vllm_poc.worker.forward import PocModel
    from vllm_poc.worker.internals import StageOutput
    from vllm_poc.worker.recipe import Recipe
    from vllm_poc.worker.stage import Batch


class _Part:
    """Stands in for a CUDA graph, and fails unless the part before it was the last that ran."""

    last: tuple[object, int] | None = None

    def __init__(self, program: object, number: int, replay: Callable[[], None] = lambda: None) -> None:
        self._place = (program, number)
        self._replay = replay

    def replay(self) -> None:
        program, number = self._place
        if number and _Part.last != (program, number - 1):
            raise RuntimeError(f"part {number} ran after {_Part.last}")
        _Part.last = self._place
        self._replay()


class _ReplayedPrograms(Programs):
    def __init__(self) -> None:
        self._programs = OrderedDict()

    def make_room(self, recipe: Recipe) -> None:
        """Forget the recipe's program."""
        self.forget(recipe)

    def capture(
        self, recipe: Recipe, seeds: Tensor, received: dict[str, Tensor], batch: Batch, cuts: Sequence[nn.Module]
    ) -> None:
        """Make a program that computes ``batch`` anew from what then stands in ``seeds`` and ``received``."""

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
        program = object()
        parts = [*(_Part(program, number) for number in range(len(cuts))), _Part(program, len(cuts), replay)]
        self._programs[recipe] = Program(parts, seeds, received, output, None)


def replay_passes(model: PocModel) -> None:
    """Let the model prepare its passes for repetition, and in parts, as on a GPU."""
    torch.Tensor.pin_memory = lambda tensor: tensor
    model._programs = _ReplayedPrograms()
    model._rehearser = Rehearser(model.stage, model._programs, model.memory)
