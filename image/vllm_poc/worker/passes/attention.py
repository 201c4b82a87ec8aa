# SPDX-License-Identifier: Apache-2.0
"""Attention straight from queries, keys and values: a prefill whose cache nobody reads later needs none.

Where the cache rounds what attention reads, the server's own attention runs, over a scratch cache.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from vllm.v1.attention.backend import AttentionType

from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter
from vllm_poc.worker.model.scratch import BatchShape
from vllm_poc.worker.passes.plain import Patch, patched

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl


#: Names of the type of an FP8 cache that has one scale for each tensor.
_ROUNDED = {"fp8", "fp8_e4m3"}
#: Layers of DeepSeek-V4: attention, and caches of its window, of its index and of what it has yet to compress.
_COMPRESSED = {"DeepseekV4FlashMLAAttention", "DeepseekV4SWACache", "DeepseekV4IndexerCache", "CompressorStateCache"}
#: Axes of a cache of keys or of values: blocks, tokens of a block, heads, columns.
_CACHE_AXES = 4
#: Batch shapes whose plans are kept, beside those that graphs read.
MAX_PLANS = 4


class Prefill(NamedTuple):
    """What a batch of sequences of one length tells attention: ``starts`` int32 ``[nonces + 1]`` of the sequences."""

    starts: Tensor
    seq_len: int


def needs_no_cache(layers: Collection[Attention]) -> bool:
    """Whether all layers are FlashAttention's and would read from the cache what they wrote, unchanged."""
    return bool(layers) and all(_sees_all(layer) and _is_causal(layer) and _is_unchanged(layer) for layer in layers)


def rounds_in_cache(layers: Collection[Attention]) -> bool:
    """Whether all layers are FlashAttention's and some read from an FP8 cache with one scale for each tensor."""
    known = all(_is_causal(layer) and (_is_rounded(layer) or _is_unchanged(layer)) for layer in layers)
    return known and any(_is_rounded(layer) for layer in layers)


def is_compressed(layers: Collection[nn.Module]) -> bool:
    """Whether all layers are those of DeepSeek-V4's attention, over windows and compressed keys."""
    return bool(layers) and {type(layer).__name__ for layer in layers} <= _COMPRESSED


def index_patches(model: nn.Module) -> Iterator[Patch]:
    """Let DeepSeek-V4's index do in a CUDA graph what it does outside of one.

    Where all compressed keys are to be read it ranks none, unless it is captured: vLLM's graphs serve longer sequences
    too, and a pass of PoC has sequences of one length.
    """
    for module in model.modules():
        if type(module).__name__ == "DeepseekV4Indexer":
            yield Patch(module, "forward", partial(_as_if_not_captured, module.forward))


def _as_if_not_captured(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
    with patched([Patch(torch.cuda, "is_current_stream_capturing", lambda: False)]):
        return forward(*args, **options)


class CachedPlans:
    """Plans of the server's own attention for the last few batch shapes.

    A CUDA graph can build none, since that takes numbers from the CPU, and reads one as long as it lives.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._plans = OrderedDict[BatchShape, AttentionPlan]()

    def __getitem__(self, shape: BatchShape) -> AttentionPlan:
        """Return the plan for a batch of this shape."""
        if shape not in self._plans:
            self._plans[shape] = self._adapter.plan(shape)
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(shape)
        return self._plans[shape]

    def kept(self) -> list[AttentionPlan]:
        """Return all plans that are kept."""
        return list(self._plans.values())


def prefill_plan(adapter: ModelAdapter, shape: BatchShape) -> AttentionPlan:
    """Describe a batch to layers that are patched. Without a slot mapping vLLM writes nothing into the cache."""
    starts = torch.arange(0, shape.tokens + 1, shape.seq_len, dtype=torch.int32, device=adapter.device)
    metadata = dict.fromkeys(adapter.attention_layers, Prefill(starts, shape.seq_len))
    return AttentionPlan(shape, adapter.positions(shape), metadata, {})


def prefill_patches(layers: Collection[Attention], seq_len: int) -> Iterator[Patch]:
    """Replace the forward passes of the layers' backend by ones that take a `Prefill` of such sequences."""
    for layer in layers:
        attend = _short(layer.impl) if attends_short(layer.impl, seq_len) else _of_any_length(layer.impl)
        yield Patch(layer.impl, "forward", _Direct(attend))


def cache_patches() -> Iterator[Patch]:
    """Replace vLLM's kernel that writes keys and values into an FP8 cache by one of the same bits."""
    module = sys.modules.get("vllm.v1.attention.backends.flash_attn")
    original = getattr(module, "reshape_and_cache_flash", None)
    if original is not None:
        yield Patch(module, "reshape_and_cache_flash", partial(_store, original))


def attends_short(impl: FlashAttentionImpl, seq_len: int) -> bool:
    """Whether all that a layer does to such sequences is the causal attention of `vllm_poc.kernels.attention`."""
    from vllm_poc.kernels.attention import is_short  # noqa: PLC0415 - needs Triton

    whole = tuple(impl.sliding_window) == (-1, -1) and impl.sinks is None
    linear = not impl.logits_soft_cap and impl.alibi_slopes is None
    return whole and linear and is_short(seq_len, impl.head_size)


#: Puts the attention of queries, keys and values into the output.
_Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Prefill], None]


class _Direct:
    """The forward pass of vLLM's backend, without a cache."""

    def __init__(self, attend: _Attend) -> None:
        self._attend = attend

    def __call__(
        self,
        layer: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Prefill,
        output: Tensor,
        **_: Any,  # noqa: ANN401 - scales of outputs, which FlashAttention has not
    ) -> Tensor:
        self._attend(query, key, value, output, attn_metadata)
        return output


def _short(impl: FlashAttentionImpl) -> _Attend:
    from vllm_poc.kernels.attention import attend_short  # noqa: PLC0415 - needs Triton

    def attend(query: Tensor, key: Tensor, value: Tensor, output: Tensor, prefill: Prefill) -> None:
        attend_short(query, key, value, output, seq_len=prefill.seq_len, scale=impl.scale)

    return attend


def _of_any_length(impl: FlashAttentionImpl) -> _Attend:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func  # noqa: PLC0415 - CUDA alone has it

    def attend(query: Tensor, key: Tensor, value: Tensor, output: Tensor, prefill: Prefill) -> None:
        flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=prefill.starts,
            cu_seqlens_k=prefill.starts,
            max_seqlen_q=prefill.seq_len,
            max_seqlen_k=prefill.seq_len,
            softmax_scale=impl.scale,
            causal=True,
            alibi_slopes=impl.alibi_slopes,
            window_size=list(impl.sliding_window),
            softcap=impl.logits_soft_cap,
            fa_version=impl.vllm_flash_attn_version,
            num_splits=1,  # as many as the sequences are short
            s_aux=impl.sinks,
        )

    return attend


def _store(
    original: Callable[..., None],
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    from vllm_poc.kernels import kv_cache  # noqa: PLC0415 - needs Triton

    tensors, head_dim = (key, value, key_cache, value_cache), key.shape[-1]
    whole = len(key) == len(slots) and key.shape == value.shape and head_dim & (head_dim - 1) == 0
    whole = whole and all(tensor.stride(-1) == 1 for tensor in tensors) and key_cache.ndim == _CACHE_AXES
    if whole and dtype in _ROUNDED and k_scale.numel() == v_scale.numel() == 1:
        kv_cache.store(*tensors, slots, k_scale, v_scale)
    else:
        original(*tensors, slots, dtype, k_scale, v_scale)


def _sees_all(layer: Attention) -> bool:
    # Subclasses have builders of their own, which tell the same implementation of chunks or of other masks.
    return type(layer).__name__ == "Attention"


def _is_causal(layer: Attention) -> bool:
    impl = getattr(layer, "impl", None)
    return type(impl).__name__ == "FlashAttentionImpl" and layer.impl.attn_type == AttentionType.DECODER


def _is_unchanged(layer: Attention) -> bool:
    return layer.impl.kv_cache_dtype in {"auto", "bfloat16", "float16"} and layer.query_quant is None


def _is_rounded(layer: Attention) -> bool:
    return layer.impl.kv_cache_dtype in _ROUNDED and layer._k_scale.numel() == layer._v_scale.numel() == 1
