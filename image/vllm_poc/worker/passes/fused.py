# SPDX-License-Identifier: Apache-2.0
"""The forward pass as PoC runs it on a GPU: vLLM's model with fused operations, and no cache where none is needed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.worker import workspace
from vllm.v1.worker.workspace import WorkspaceManager
from vllm.v1.worker.workspace import current_workspace_manager as vllms_workspace

from vllm_poc.kernels import layers as kernels
from vllm_poc.worker.model.layer_subset import has_streams
from vllm_poc.worker.passes.attention import (
    CachedPlans,
    cache_patches,
    index_patches,
    is_compressed,
    needs_no_cache,
    prefill_patches,
    prefill_plan,
)
from vllm_poc.worker.passes.experts import expert_layout, expert_patches, tile_patches, unpacked_bytes
from vllm_poc.worker.passes.operations import is_plain_norm, operation_patches, operations
from vllm_poc.worker.passes.plain import Patch, patched, reflected_layers
from vllm_poc.worker.passes.quantisation import quantisation_patches
from vllm_poc.worker.passes.recurrent import Chunks, is_recurrent, recurrent_patches

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm_poc.kernels.packed_experts import PackedLayout
    from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter
    from vllm_poc.worker.model.scratch import BatchShape


class FusedPass:
    """A `vllm_poc.worker.passes.plain.Pass` for CUDA and kinds of attention that `passes.attention` knows."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._attention = list(adapter.attention_layers.values())
        self._plans = CachedPlans(adapter)
        self.needs_cache = not needs_no_cache(self._attention)
        self._recurrent = is_recurrent(self._attention)
        self._chunks = Chunks()
        #: Attention with an index has room for the tokens of vLLM's largest batch, and no more.
        self.takes_larger_batches = not is_compressed(self._attention) and not self._recurrent
        self._operations = operations(adapter.model)
        self._expert_layout = expert_layout(adapter)
        #: Memory that a batch of any size takes, in bytes.
        self.fixed_bytes = 0 if self._expert_layout is None else unpacked_bytes(adapter)
        self._norm_after = dict(_norms_after(adapter))
        # vLLM's is locked, and too small for larger batches than chat's. Recurrent layers take gigabytes for any batch.
        self._workspace = vllms_workspace() if self._recurrent else WorkspaceManager(adapter.device)

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Describe a batch to the attention layers."""
        return self._plans[shape] if self.needs_cache else prefill_plan(self._adapter, shape)

    def workspace(self) -> object:
        """Return the memory that operations have worked in or read: whoever records them must keep it.

        When one asks for more, vLLM lets go of it and takes another.
        """
        return [*self._workspace._current_workspaces, *self._plans.kept(), *self._chunks.kept()]

    @contextmanager
    def applied(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> Iterator[None]:
        """Make the model compute this way, and reflect each layer's output along its vector."""
        patches = [*index_patches(self._adapter.model)]
        patches += cache_patches() if self.needs_cache else prefill_patches(self._attention, shape.seq_len)
        patches += recurrent_patches(self._adapter.model, shape, self._chunks) if self._recurrent else ()
        with self._fused(vectors, patches, self._expert_layout), last_tokens_only(self._adapter.layers[-1], shape):
            yield

    def continuing(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> AbstractContextManager[None]:
        """Do the same where sequences go on from a cache, by the server's own attention."""
        patches = [*index_patches(self._adapter.model), *cache_patches(), *tile_patches()]
        # In a step each expert has few tokens: there it takes longest to read its weights, which are smaller packed.
        return self._fused(vectors, patches, self._expert_layout if shape.seq_len > 1 else None)

    @contextmanager
    def _fused(
        self, vectors: Mapping[nn.Module, Tensor], others: Iterable[Patch], layout: PackedLayout | None
    ) -> Iterator[None]:
        norms = {self._norm_after[layer]: vector for layer, vector in vectors.items() if layer in self._norm_after}
        rest = {layer: vector for layer, vector in vectors.items() if layer not in self._norm_after}
        patches = [*operation_patches(self._operations, norms), *quantisation_patches(), *others]
        patches += [*expert_patches(layout), Patch(workspace, "_manager", self._workspace)]
        with patched(patches), reflected_layers(rest, _reflected):
            yield


def _norms_after(adapter: ModelAdapter) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each layer of this stage with the norm that reads its output, where it can do the layer's reflection."""
    last_norm = getattr(getattr(adapter.model, "model", None), "norm", None)
    own = [getattr(layer, "input_layernorm", None) for layer in adapter.layers]
    for layer, first, norm in zip(adapter.layers, own, [*own[1:], last_norm], strict=True):
        # A layer of another stage is reflected there, even if this one has the norm. Between other layers is more, and
        # what mixes several streams takes only the weights of norms.
        if has_streams(adapter):
            return
        if is_plain_norm(norm) and is_plain_norm(first) and not isinstance(layer, PPMissingLayer):
            yield layer, norm


def _reflected(x: Tensor, vector: Tensor) -> Tensor:
    kernels.reflect(x.view(-1, x.shape[-1]), vector)
    return x


def last_tokens_only(layer: nn.Module, shape: BatchShape) -> AbstractContextManager[None]:
    """Drop all tokens except the last of each sequence behind the attention of ``layer``, the model's last.

    Nobody reads what the layer makes of the others. While the context lasts, the forward pass returns
    ``[nonces, hidden]``. Does nothing if the layer has another form.
    """
    attention = getattr(getattr(layer, "self_attn", None), "attn", None)
    norm = getattr(layer, "post_attention_layernorm", None)
    known = attention is not None and is_plain_norm(norm) and "residual" in inspect.signature(layer.forward).parameters
    return _shortened(attention, norm, shape) if known else nullcontext()


@contextmanager
def _shortened(attention: nn.Module, norm: nn.Module, shape: BatchShape) -> Iterator[None]:
    def last(tokens: Tensor) -> Tensor:
        return tokens.view(*shape, -1)[:, -1].contiguous()

    def drop_residual(_: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, residual = inputs
        return hidden, last(residual)

    with (
        attention.register_forward_hook(lambda *call: last(call[-1])),
        norm.register_forward_pre_hook(drop_residual),
    ):
        yield
