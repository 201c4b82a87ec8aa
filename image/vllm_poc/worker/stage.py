# SPDX-License-Identifier: Apache-2.0
"""This rank's share of a batch: seeded inputs, its layers of the served model, results. Asks no other stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from vllm_poc.maths.sampling import fill_inputs
from vllm_poc.worker.batches import ModelFacts
from vllm_poc.worker.internals import BatchShape, Runner, StageOutput
from vllm_poc.worker.passes import Pass
from vllm_poc.worker.recipe import Recipe
from vllm_poc.worker.results import draw, drawn_bytes, result_values
from vllm_poc.worker.round_tensors import RoundTensors
from vllm_poc.worker.scratch import ScratchCache
from vllm_poc.worker.streams import beside, joined


class Stage:
    """Computes by the pass that it is given. Changes nothing of the chat's."""

    def __init__(self, runner: Runner, limits: ModelFacts, pass_: Pass) -> None:
        self.runner = runner
        self.limits = limits
        self.pass_ = pass_
        self._hidden = limits["hidden_size"]
        self.tensors = RoundTensors(layers=len(runner.layers), hidden=self._hidden, device=runner.device)
        self._scratch = _scratch(runner, limits) if pass_.needs_cache else None
        self._side = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the scratch cache, in bytes; 0 if no layer needs one."""
        return self._scratch.nbytes if self._scratch is not None else 0

    def drawn_bytes(self, recipe: Recipe, nonces: int) -> int:
        """Return how many bytes of a batch depend on the nonces and not on their tokens."""
        return drawn_bytes(recipe, nonces, hidden=self._hidden)

    def load(self, block_hash: str, recipe: Recipe) -> None:
        """Make what all nonces of a block hash share."""
        self.tensors.load(block_hash, recipe, results=self.runner.ranks.has_last_layer)

    def batch(
        self, recipe: Recipe, seeds: Tensor, received: dict[str, Tensor], *, in_one_go: bool = True
    ) -> StageOutput:
        """Return the values of the nonces on the last stage, and what the next one goes on with on the others.

        ``seeds`` are on the device, as `Recipe.seeds` has them; ``received`` is the output of the stage before, which
        this overwrites. Work that is not recorded ``in_one_go`` has no room for a second stream.
        """
        side = self._side if in_one_go else None
        drawn = None
        if self.runner.ranks.has_last_layer:
            with beside(side):
                drawn = draw(seeds, recipe, hidden=self._hidden)
        output = self.forward(recipe, self.inputs(recipe, seeds), received, len(seeds))
        if drawn is None or isinstance(output, dict):
            return output
        joined(side)
        return result_values(output, drawn, self.tensors)

    def inputs(self, recipe: Recipe, seeds: Tensor) -> Tensor | None:
        """Return the embeddings ``[nonces, seq_len, hidden]`` for seeds on the device; None on later stages."""
        if not self.runner.ranks.has_first_layer:
            return None
        size = (len(seeds), recipe.seq_len, self._hidden)
        embeddings = torch.empty(size, dtype=self.runner.dtype, device=self.runner.device)
        fill_inputs(embeddings, seeds[:, : recipe.input_columns])
        return embeddings

    def forward(self, recipe: Recipe, inputs: Tensor | None, received: dict[str, Tensor], nonces: int) -> StageOutput:
        """Return the final norm's output at the last positions, ``[nonces, hidden]``, or what the next stage needs.

        Overwrites ``inputs`` and ``received``.
        """
        shape = BatchShape(nonces, recipe.seq_len)
        plan = self.pass_.plan(shape)
        with self._bound(), self.pass_.applied(self._vectors(recipe), shape):
            output = self.runner.forward(inputs, received, plan)
        if isinstance(output, dict) or len(output) == shape.nonces:
            return output
        return output.view(*shape, -1)[:, -1]

    def _bound(self) -> AbstractContextManager[None]:
        return self._scratch.bound() if self._scratch is not None else nullcontext()

    def _vectors(self, recipe: Recipe) -> Mapping[nn.Module, Tensor]:
        return dict(zip(self.runner.layers, self.tensors.vectors, strict=True)) if recipe.layer_hooks else {}


#: Computes a batch of a stage from what the stage before made.
Batch = Callable[[dict[str, Tensor]], StageOutput]


def _scratch(runner: Runner, limits: ModelFacts) -> ScratchCache:
    return ScratchCache(runner.groups, max_nonces=limits["max_batch_nonces"], max_tokens=limits["max_batch_tokens"])
