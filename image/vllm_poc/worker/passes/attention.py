# SPDX-License-Identifier: Apache-2.0
"""Attention straight from queries, keys and values: a prefill whose cache nobody reads later needs none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType

from vllm_poc.worker.model.adapter import AttentionPlan, BatchShape, ModelAdapter
from vllm_poc.worker.passes.operations import Patch

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl


class Prefill(NamedTuple):
    """What a batch of sequences of one length tells attention: ``starts`` int32 ``[nonces + 1]`` of the sequences."""

    starts: Tensor
    seq_len: int


def needs_no_cache(layers: Collection[Attention]) -> bool:
    """Whether all layers are FlashAttention's and would read from the cache what they wrote, unchanged."""
    return bool(layers) and all(_is_plain(layer) for layer in layers)


def prefill_plan(adapter: ModelAdapter, shape: BatchShape) -> AttentionPlan:
    """Describe a batch to layers that are patched. Without a slot mapping vLLM writes nothing into the cache."""
    starts = torch.arange(0, shape.tokens + 1, shape.seq_len, dtype=torch.int32, device=adapter.device)
    metadata = dict.fromkeys(adapter.attention_layers, Prefill(starts, shape.seq_len))
    return AttentionPlan(shape, shape.positions(adapter.device), metadata, {})


def prefill_patches(layers: Collection[Attention], seq_len: int) -> Iterator[Patch]:
    """Replace the forward passes of the layers' backend by ones that take a `Prefill` of such sequences."""
    for layer in layers:
        attend = _short(layer.impl) if attends_short(layer.impl, seq_len) else _of_any_length(layer.impl)
        yield Patch(layer.impl, "forward", _Direct(attend))


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


def _is_plain(layer: Attention) -> bool:
    impl = layer.impl
    plain = type(impl).__name__ == "FlashAttentionImpl" and impl.attn_type == AttentionType.DECODER
    return plain and impl.kv_cache_dtype in ("auto", "bfloat16", "float16") and layer.query_quant is None
