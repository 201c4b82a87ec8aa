# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also measures the GPU, and PoC the way its reference computes it."""

from __future__ import annotations

import time

import torch

from vllm_poc.maths.sampling import fill_stepwise
from vllm_poc.worker.batches import BatchRequest
from vllm_poc.worker.extension import PocWorkerExtension
from vllm_poc.worker.forward import PocModel
from vllm_poc.worker.limits import model_facts
from vllm_poc.worker.recipe import Recipe
from vllm_poc.worker.results import draw, result_values

_SIDE = 8192
_PRODUCTS = 20


class MeasuringExtension(PocWorkerExtension):
    """PoC's extension with a few methods more."""

    def poc_bench_weights(self) -> None:
        """Give all weights a sensible size; vLLM's dummy weights are next to nothing. Leaves quantised ones."""
        generator = torch.Generator("cuda").manual_seed(5)
        with torch.inference_mode():
            for weight in self.model_runner.get_model().parameters():
                if weight.ndim == 1 and weight.dtype.itemsize > 1:
                    weight.data.fill_(1.0)
                elif weight.dtype.itemsize > 1:
                    weight.data.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)

    def poc_bench_peak(self) -> float:
        """Return the operations per second of a large product of matrices in bfloat16."""
        left, right = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(3):
            left @ right
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(_PRODUCTS):
            left @ right
        torch.cuda.synchronize()
        return _PRODUCTS * 2 * _SIDE**3 / (time.perf_counter() - started)

    def poc_bench_naive(self, request: BatchRequest, seconds: float) -> float:
        """Return the nonces per second of the plain way, on one GPU.

        The inputs nonce by nonce in many operations, vLLM's eager forward pass for 32 nonces, then the results.
        """
        model = PocModel(self._poc().runner, model_facts(self.model_runner.vllm_config))
        recipe = Recipe.of(request)
        with torch.inference_mode():
            model.tensors.load(request["block_hash"], recipe)
            self._naive_batch(model, recipe, request)
            count, started = 0, time.perf_counter()
            while time.perf_counter() - started < seconds:
                self._naive_batch(model, recipe, request)
                count += len(request["nonces"])
            return count / (time.perf_counter() - started)

    def _naive_batch(self, model: PocModel, recipe: Recipe, request: BatchRequest) -> None:
        seeds = recipe.seeds(request, request["nonces"]).to(model.runner.device)
        hidden_size = self.model_runner.vllm_config.model_config.get_hidden_size()
        size = (len(seeds), recipe.seq_len, hidden_size)
        inputs = torch.empty(size, dtype=model.runner.dtype, device=model.runner.device)
        for row, seed in zip(inputs.view(len(seeds), -1), seeds[:, 0], strict=True):
            fill_stepwise(row, seed)
        hidden = model.last_hidden(recipe, inputs, len(seeds))
        assert hidden is not None  # noqa: S101 - one GPU has all layers
        result_values(hidden, draw(seeds, recipe, hidden=hidden_size), model.tensors).cpu()
