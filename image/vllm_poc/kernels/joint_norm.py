# SPDX-License-Identifier: Apache-2.0
"""A norm over all heads of a token at once, as MiniMax-M2 has it, and the rotation of a part of each head.

The heads may be spread over several ranks: each takes the mean of its own squares, and the ranks add up these means
between the two kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vllm_poc.kernels import row_sums

if TYPE_CHECKING:
    from torch import Tensor

#: Elements that a program adds up at a time, as vLLM's kernel does: the order decides the last bit.
_BLOCK, _WARPS = 1024, 4
#: Heads that a program rotates.
_HEADS, _HEADS_WARPS = 16, 2


def mean_squares(qkv: Tensor, *, q_size: int, kv_size: int) -> Tensor:
    """Return the means of the squares of queries and keys in ``qkv`` ``[tokens, q_size + 2 kv_size]``.

    They are float32 ``[tokens, 2]``.
    """
    means = torch.empty(len(qkv), 2, dtype=torch.float32, device=qkv.device)
    sizes = {"Q_SIZE": q_size, "KV_SIZE": kv_size, "BLOCK": _BLOCK}
    _mean_squares[(len(qkv),)](qkv, means, qkv.stride(0), **sizes, num_warps=_WARPS)
    return means


def norm_and_rotate(
    qkv: Tensor,
    means: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    ranks: int,
    head_dim: int,
    epsilon: float,
) -> None:
    """Norm queries and keys in ``qkv`` by the sums of ``ranks`` `mean_squares`, and rotate the heads' first columns.

    ``positions`` is int64 ``[tokens]``, ``cos_sin`` ``[max_position, rotated]`` with the cosines in its first half
    (Neox style), the weights are ``[q_size]`` and ``[kv_size]``. Half of ``rotated``, and head_dim without these
    columns, are powers of two; the latter may be 0.
    """
    q_heads, kv_heads = len(q_weight) // head_dim, len(k_weight) // head_dim
    heads, rotated = q_heads + kv_heads, cos_sin.shape[1]
    count = len(qkv) * heads
    numbers = {"RANKS": ranks, "Q_HEADS": q_heads, "HEADS": heads, "AT_ONCE": _HEADS}
    numbers |= {"HALF": rotated // 2, "REST": head_dim - rotated}
    tensors = (qkv, means, positions, cos_sin, q_weight, k_weight)
    grid = (triton.cdiv(count, _HEADS),)
    _norm_rotate[grid](*tensors, count, qkv.stride(0), epsilon, **numbers, num_warps=_HEADS_WARPS, **row_sums.EXACT)


@triton.jit
def _mean_squares(qkv, means, stride, Q_SIZE: tl.constexpr, KV_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    queries = qkv + token.to(tl.int64) * stride
    tl.store(means + 2 * token, _squares(queries, Q_SIZE, BLOCK) / Q_SIZE)
    tl.store(means + 2 * token + 1, _squares(queries + Q_SIZE, KV_SIZE, BLOCK) / KV_SIZE)


@triton.jit
def _squares(row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    total = 0.0
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(row + column, mask=column < SIZE, other=0.0).to(tl.float32)
        total += tl.sum(values * values, axis=0)
    return total


@triton.jit(do_not_specialize=["count"])
def _norm_rotate(
    qkv,
    means,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    count,
    stride,
    epsilon,
    RANKS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    kind = qkv.dtype.element_ty
    size: tl.constexpr = 2 * HALF + REST
    index = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    inside = index < count
    token = (index // HEADS).to(tl.int64)
    head = index % HEADS
    is_key = head >= Q_HEADS
    scale = tl.rsqrt(tl.load(means + 2 * token + is_key.to(tl.int64), mask=inside, other=1.0) / RANKS + epsilon)
    place = qkv + token * stride + head * size
    weight = tl.where(is_key, k_weight, q_weight) + tl.where(is_key, head - Q_HEADS, head) * size
    column = tl.arange(0, HALF)[None, :]
    low = _normed(place + column, weight + column, scale, inside)
    high = _normed(place + HALF + column, weight + HALF + column, scale, inside)
    turn = cos_sin + tl.load(positions + token, mask=inside, other=0) * (2 * HALF) + column
    cos = row_sums.rounded(tl.load(turn), kind)
    sin = row_sums.rounded(tl.load(turn + HALF), kind)
    first = row_sums.rounded(low * cos, kind) - row_sums.rounded(high * sin, kind)
    second = row_sums.rounded(high * cos, kind) + row_sums.rounded(low * sin, kind)
    tl.store(place + column, first.to(kind), mask=inside)
    tl.store(place + HALF + column, second.to(kind), mask=inside)
    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        tl.store(place + column, _normed(place + column, weight + column, scale, inside).to(kind), mask=inside)


@triton.jit
def _normed(place, weight, scale, inside):
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
    weights = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    return row_sums.rounded(values * weights, place.dtype.element_ty)
