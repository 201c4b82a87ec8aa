# SPDX-License-Identifier: Apache-2.0
"""PoC batches on the served model: seeded inputs, its forward pass, results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from vllm_poc.maths.inputs import fill_inputs
from vllm_poc.worker.batches import BatchRequest, BatchResult, ModelFacts, Rehearsal
from vllm_poc.worker.internals import BatchShape, Runner
from vllm_poc.worker.limits import check_shape
from vllm_poc.worker.passes import Pass, PlainPass
from vllm_poc.worker.programs import Programs
from vllm_poc.worker.recipe import Recipe
from vllm_poc.worker.rehearsal import Memory, seconds_of
from vllm_poc.worker.results import draw, result_values
from vllm_poc.worker.round_tensors import RoundTensors
from vllm_poc.worker.scratch import ScratchCache
from vllm_poc.worker.streams import beside, joined
from vllm_poc.worker.work import Work

#: Computes a request together with all other ranks.
Compute = Callable[[], BatchResult | None]


class Gpu:
    """What a GPU has beside the model."""

    def __init__(self, device: torch.device) -> None:
        self.programs = Programs(device)
        self.memory = Memory(device)
        self.side = torch.cuda.Stream(device)


class PocModel:
    """Computes PoC batches on the served model by the pass that it is given, or by vLLM's own."""

    def __init__(self, runner: Runner, limits: ModelFacts, pass_: Pass | None = None) -> None:
        self.runner = runner
        self.pass_ = pass_ or PlainPass(runner)
        self._limits = limits
        self.tensors = RoundTensors(layers=len(runner.layers), hidden=limits["hidden_size"], device=runner.device)
        self._scratch = self._make_scratch() if self.pass_.needs_cache else None
        self._gpu = Gpu(runner.device) if runner.device.type == "cuda" else None
        self._begun: Work | None = None

    @property
    def fused(self) -> bool:
        """Whether the forward pass is another than vLLM's own."""
        return not isinstance(self.pass_, PlainPass)

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the scratch cache, in bytes; 0 if no layer needs one."""
        return self._scratch.nbytes if self._scratch is not None else 0

    def prepare(self, request: BatchRequest) -> Compute:
        """Do what a rank can do alone; what is returned computes the request, together with all other ranks.

        ValueError if a batch exceeds the limits that ``poc_describe`` tells. The result is None on every rank but one.
        """
        recipe = Recipe.of(request)
        check_shape(BatchShape(min(request["batch"], len(request["nonces"])), recipe.seq_len), self._limits)
        return partial(self._compute, request, recipe)

    def rehearse(self, request: BatchRequest) -> Rehearsal:
        """Prepare batches like this one for repetition. For one rank on a GPU, which has all layers."""
        recipe, gpu = Recipe.of(request), self._gpu
        assert gpu is not None  # noqa: S101 - the caller's duty
        tokens = len(request["nonces"]) * recipe.seq_len
        if not gpu.memory.has_room_for(tokens):
            return Rehearsal(seconds=None)
        seeds = recipe.seeds(request, request["nonces"])
        try:
            with torch.inference_mode():
                self.tensors.load(request["block_hash"], recipe)
                gpu.memory.learn(tokens, lambda: self._values(recipe, seeds))
                gpu.programs.capture(recipe, seeds, partial(self._batch, recipe))
                return Rehearsal(seconds=seconds_of(lambda: self._values(recipe, seeds), self.runner.device))
        except torch.OutOfMemoryError:
            gpu.programs.forget(recipe)
            return Rehearsal(seconds=None)

    def inputs(self, recipe: Recipe, seeds: Tensor) -> Tensor:
        """Return the embeddings ``[nonces, seq_len, hidden]`` for seeds on the device, as `Recipe.seeds` has them."""
        size = (len(seeds), recipe.seq_len, self._limits["hidden_size"])
        embeddings = torch.empty(size, dtype=self.runner.dtype, device=self.runner.device)
        fill_inputs(embeddings, seeds[:, : recipe.input_columns])
        return embeddings

    def last_hidden(self, recipe: Recipe, inputs: Tensor | None, nonces: int) -> Tensor | None:
        """Return the final norm's output at the last positions, ``[nonces, hidden]``. Overwrites ``inputs``.

        Only the first stage has inputs; None if another stage has the output. Changes nothing of the chat's.
        """
        shape = BatchShape(nonces, recipe.seq_len)
        plan = self.pass_.plan(shape)
        bound = self._scratch.bound() if self._scratch is not None else nullcontext()
        with bound, self.pass_.applied(self._vectors(recipe), shape):
            hidden = self.runner.forward(inputs, plan)
        if hidden is None:
            return None
        return hidden if len(hidden) == shape.nonces else hidden.view(*shape, -1)[:, -1]

    def _compute(self, request: BatchRequest, recipe: Recipe) -> BatchResult | None:
        with torch.inference_mode(), self.runner.ranks.together():
            mine: BatchRequest = {**request, "ahead": []}
            work = self._begun if self._begun is not None and self._begun.request == mine else self._begin(mine, recipe)
            if request["ahead"]:
                self._begun = self._begin({**mine, "nonces": request["ahead"]}, recipe)
            return work.result() if self.runner.ranks.answers else None

    def _begin(self, request: BatchRequest, recipe: Recipe) -> Work:
        self.tensors.load(request["block_hash"], recipe)
        parts = [
            # The CPU hashes while the device computes the batch before.
            self._values(recipe, recipe.seeds(request, nonces))
            for nonces in _batched(request["nonces"], request["batch"])
        ]
        return Work.of(request, [part for part in parts if part is not None])

    def _values(self, recipe: Recipe, seeds: Tensor) -> Tensor | None:
        if self._gpu is None:
            return self._batch(recipe, seeds)
        pinned, program = seeds.pin_memory(), self._gpu.programs.find(recipe, len(seeds))
        if program is not None:
            return program.run(pinned)
        return self._batch(recipe, pinned.to(self.runner.device, non_blocking=True))

    def _batch(self, recipe: Recipe, seeds: Tensor) -> Tensor | None:
        side = self._gpu.side if self._gpu is not None else None
        with beside(side):
            drawn = draw(seeds, recipe, hidden=self._limits["hidden_size"])
        inputs = self.inputs(recipe, seeds) if self.runner.ranks.has_first_layer else None
        hidden = self.last_hidden(recipe, inputs, len(seeds))
        joined(side)
        return result_values(hidden, drawn, self.tensors) if hidden is not None else None

    def _vectors(self, recipe: Recipe) -> Mapping[nn.Module, Tensor]:
        return dict(zip(self.runner.layers, self.tensors.vectors, strict=True)) if recipe.layer_hooks else {}

    def _make_scratch(self) -> ScratchCache:
        limits = self._limits
        return ScratchCache(
            self.runner.groups, max_nonces=limits["max_batch_nonces"], max_tokens=limits["max_batch_tokens"]
        )


def _batched(nonces: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(nonces), size):
        yield nonces[start : start + size]
