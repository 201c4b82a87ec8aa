# SPDX-License-Identifier: Apache-2.0
"""The forward pass as PoC runs it on a GPU: vLLM's model with fused operations, and no cache where none is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.worker import workspace
from vllm.v1.worker.workspace import WorkspaceManager

from vllm_poc.kernels import layers as kernels
from vllm_poc.worker.fusion.attention import (
    CachedPlans,
    attention_layers,
    cache_patches,
    needs_no_cache,
    prefill_patches,
    prefill_plan,
)
from vllm_poc.worker.fusion.last_token import last_tokens_only
from vllm_poc.worker.fusion.operations import is_plain_norm, operation_patches, operations
from vllm_poc.worker.fusion.patches import Patch, patched
from vllm_poc.worker.fusion.quantisation import quantisation_patches
from vllm_poc.worker.hooks import reflected_layers

if TYPE_CHECKING:
    from vllm_poc.worker.internals import AttentionPlan, BatchShape, Runner


class FusedPass:
    """A `vllm_poc.worker.passes.Pass` for CUDA and models whose attention is FlashAttention."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._attention = attention_layers(runner)
        self._plans = CachedPlans(runner)
        self.needs_cache = not needs_no_cache(self._attention)
        self._operations = operations(runner.model)
        self._norm_after = dict(_norms_after(runner))
        self._workspace = WorkspaceManager(runner.device)

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Describe a batch to the attention layers."""
        return self._plans[shape] if self.needs_cache else prefill_plan(self._runner, shape)

    def workspace(self) -> object:
        """Return the memory that operations have worked in or read: whoever records them must keep it.

        When one asks for more, vLLM lets go of it and takes another.
        """
        return [*self._workspace._current_workspaces, *self._plans.kept()]

    @contextmanager
    def applied(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> Iterator[None]:
        """Make the model compute this way, and reflect each layer's output along its vector."""
        norms = {self._norm_after[layer]: vector for layer, vector in vectors.items() if layer in self._norm_after}
        others = {layer: vector for layer, vector in vectors.items() if layer not in self._norm_after}
        patches = [*operation_patches(self._operations, norms), *quantisation_patches()]
        patches += cache_patches() if self.needs_cache else prefill_patches(self._attention, shape.seq_len)
        # vLLM's is locked, and too small for larger batches than chat's.
        patches.append(Patch(workspace, "_manager", self._workspace))
        last = last_tokens_only(self._runner.layers[-1], shape)
        with patched(patches), reflected_layers(others, _reflected), last:
            yield


def _norms_after(runner: Runner) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each layer of this stage with the norm that reads its output, where it can do the layer's reflection."""
    last_norm = getattr(getattr(runner.model, "model", None), "norm", None)
    following = [getattr(layer, "input_layernorm", None) for layer in runner.layers[1:]]
    for layer, norm in zip(runner.layers, [*following, last_norm], strict=True):
        # A layer of another stage is reflected there, even if this one has the norm.
        if is_plain_norm(norm) and not isinstance(layer, PPMissingLayer):
            yield layer, norm


def _reflected(x: Tensor, vector: Tensor) -> Tensor:
    kernels.reflect(x, vector)
    return x
