# SPDX-License-Identifier: Apache-2.0
"""Keys and values into a paged KV cache of 8-bit numbers: at the memory's rate, with the bits of vLLM's C++ kernel.

Which cache that is, chat's or PoC's own, is decided in `vllm_poc.worker.model.scratch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

#: Heads that a program writes.
_HEADS, _WARPS = 32, 4


def store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, k_scale: Tensor, v_scale: Tensor
) -> None:
    """Put ``key`` and ``value`` over their scales into the ``slots``, int64 ``[tokens]``, of their caches.

    Keys and values are 16-bit ``[tokens, heads, head_dim]``, the caches 8-bit
    ``[blocks, block_size, heads, head_dim]`` of type e4m3, the scales one float32 each. All are of any strides, except
    that the columns of a head lie side by side; head_dim is a power of two. A slot below 0 is left out.
    """
    tokens, heads, head_dim = key.shape
    caches = [cache.view(torch.float8_e4m3fn) for cache in (key_cache, value_cache)]
    strides = [stride for tensor in (key, value) for stride in tensor.stride()[:2]]
    strides += [stride for cache in caches for stride in cache.stride()[:3]]
    sizes = {"BLOCK": key_cache.shape[1], "HEADS": heads, "HEAD_DIM": head_dim, "AT_ONCE": _HEADS}
    grid = (triton.cdiv(tokens * heads, _HEADS),)
    tensors = (key, value, *caches, slots, k_scale, v_scale)
    _store[grid](*tensors, tokens * heads, *strides, **sizes, num_warps=_WARPS)


@triton.jit(do_not_specialize=["count"])
def _store(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    k_scale,
    v_scale,
    count,
    key_token,
    key_head,
    value_token,
    value_head,
    key_block,
    key_slot,
    key_cache_head,
    value_block,
    value_slot,
    value_cache_head,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    index = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    token = (index // HEADS).to(tl.int64)
    head = index % HEADS
    slot = tl.load(slots + token, mask=inside, other=-1)
    inside = (inside & (slot >= 0))[:, None]
    block = slot // BLOCK
    place = slot % BLOCK
    column = tl.arange(0, HEAD_DIM)[None, :]
    keys = tl.load(key + (token * key_token + head * key_head)[:, None] + column, mask=inside, other=0.0)
    values = tl.load(value + (token * value_token + head * value_head)[:, None] + column, mask=inside, other=0.0)
    key_cache += (block * key_block + place * key_slot + head * key_cache_head)[:, None] + column
    value_cache += (block * value_block + place * value_slot + head * value_cache_head)[:, None] + column
    # The conversion takes what is too large as 448, and leaves NaN.
    kind: tl.constexpr = key_cache.dtype.element_ty
    tl.store(key_cache, tl.div_rn(keys.to(tl.float32), tl.load(k_scale)).to(kind), mask=inside)
    tl.store(value_cache, tl.div_rn(values.to(tl.float32), tl.load(v_scale)).to(kind), mask=inside)
