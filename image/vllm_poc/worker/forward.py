# SPDX-License-Identifier: Apache-2.0
"""One PoC batch: seeded inputs, the served model's forward pass on scratch memory, results."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from vllm_poc.maths.inputs import fill_inputs
from vllm_poc.maths.reflections import layer_vectors
from vllm_poc.worker.batches import BatchRequest, BatchResult, ModelFacts
from vllm_poc.worker.hooks import reflected_layers
from vllm_poc.worker.internals import AttentionPlan, BatchShape, Runner
from vllm_poc.worker.limits import check_shape
from vllm_poc.worker.results import batch_result
from vllm_poc.worker.scratch import ScratchCache


class PocModel:
    """Computes PoC batches on the served model. Allocates the scratch cache once."""

    def __init__(self, runner: Runner, limits: ModelFacts) -> None:
        self._runner = runner
        self._limits = limits
        self.scratch = ScratchCache(
            runner.groups, max_nonces=limits["max_batch_nonces"], max_tokens=limits["max_batch_tokens"]
        )

    def prepare(self, request: BatchRequest) -> Callable[[], BatchResult | None]:
        """Do what a rank can do alone; what is returned computes the batch, together with all other ranks.

        ValueError if the batch exceeds the limits that ``poc_describe`` tells. None is the result of
        every rank but one.
        """
        shape = BatchShape(len(request["nonces"]), request["seq_len"])
        check_shape(shape, self._limits)
        with torch.inference_mode():
            inputs = self._inputs(request, shape) if self._runner.ranks.has_first_layer else None
            plan = self._runner.plan(shape)
            hooks = self._hooks(request)
        return partial(self._compute, request, inputs, plan, hooks)

    def _compute(
        self, request: BatchRequest, inputs: Tensor | None, plan: AttentionPlan, hooks: AbstractContextManager[None]
    ) -> BatchResult | None:
        with torch.inference_mode():
            with self._runner.ranks.together(), self.scratch.bound(), hooks:
                hidden = self._runner.forward(inputs, plan)
            if hidden is None or not self._runner.ranks.answers:
                return None
            last = hidden.view(*plan.shape, -1)[:, -1]
            return batch_result(last, request)

    def _inputs(self, request: BatchRequest, shape: BatchShape) -> Tensor:
        size = (*shape, self._limits["hidden_size"])
        embeddings = torch.empty(size, dtype=self._runner.dtype, device=self._runner.device)
        seeded_by = (request["block_hash"], request["public_key"], request["nonces"])
        fill_inputs(embeddings, *seeded_by, strong_rng=request["strong_rng"])
        return embeddings

    def _hooks(self, request: BatchRequest) -> AbstractContextManager[None]:
        if not request["layer_hooks"]:
            return nullcontext()
        vectors = layer_vectors(
            block_hash=request["block_hash"],
            num_layers=len(self._runner.layers),
            hidden=self._limits["hidden_size"],
            device=self._runner.device,
        )
        return reflected_layers(self._runner.layers, vectors)
