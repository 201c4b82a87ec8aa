# SPDX-License-Identifier: Apache-2.0
"""Elementwise work between the matrix products of a decoder layer. All but `norm` and `gated` work in place.

The unfused operations, whose every result is rounded, are named by each function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

if TYPE_CHECKING:
    from torch import Tensor

#: A product and a sum stay two operations, each of which rounds.
_EXACT = {"enable_fp_fusion": False}
#: Elements of a row that a warp holds.
_PER_WARP = 512
_GATED_BLOCK = 1024
#: Heads that a program rotates.
_HEADS = 8


def reflect(x: Tensor, vector: Tensor) -> None:
    """Reflect the rows of ``x`` ``[rows, n]`` along ``vector`` ``[n]``: `vllm_poc.maths.reflections.reflect`."""
    rows, n = x.shape
    _reflect_rows[(rows,)](x, vector, n, x.stride(0), **_block(n))


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the root mean square norm of the rows of ``x`` ``[rows, n]``, by ``weight`` ``[n]``."""
    rows, n = x.shape
    out = torch.empty_like(x)
    _norm_rows[(rows,)](x, out, weight, n, x.stride(0), out.stride(0), epsilon, **_block(n))
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, vector: Tensor | None = None) -> None:
    """Add ``x`` ``[rows, n]`` to ``residual``, and put the norm of the sum into ``x``.

    With a ``vector`` ``[n]`` both are reflected along it first.
    """
    rows, n = x.shape
    along = weight if vector is None else vector
    strides = (x.stride(0), residual.stride(0))
    _add_norm_rows[(rows,)](x, residual, weight, along, n, *strides, epsilon, REFLECT=vector is not None, **_block(n))


def gated(x: Tensor) -> Tensor:
    """Return ``silu(x[:, :n]) * x[:, n:]`` of ``x`` ``[rows, 2 n]``."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, n)
    _gated_rows[(rows, triton.cdiv(n, _GATED_BLOCK))](x, out, n, x.stride(0), BLOCK=_GATED_BLOCK, **_EXACT)
    return out


def norm_and_rotate(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, q_weight: Tensor, k_weight: Tensor, *, q_heads: int, epsilon: float
) -> None:
    """Norm the queries and keys in ``qkv`` by head and rotate them by position (Neox style, whole heads).

    ``qkv`` is ``[tokens, (q_heads + 2 * kv_heads) * head_dim]``, ``positions`` int64 ``[tokens]``, ``cos_sin``
    ``[max_position, head_dim]`` with the cosines in its first half, the weights ``[head_dim]``.
    """
    tokens, width = qkv.shape
    head_dim = q_weight.numel()
    heads = (width // head_dim + q_heads) // 2  # there are as many keys as values
    grid = (tokens, triton.cdiv(heads, _HEADS))
    tensors = (qkv, positions, cos_sin, q_weight, k_weight)
    sizes = (qkv.stride(0), q_heads, heads, epsilon)
    _norm_rotate[grid](*tensors, *sizes, HEADS=_HEADS, HALF=head_dim // 2, num_warps=2, **_EXACT)


def _block(n: int) -> dict[str, int]:
    block = triton.next_power_of_2(n)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // _PER_WARP)), **_EXACT}


@triton.jit
def _rounded(x, kind: tl.constexpr):
    return x.to(kind).to(tl.float32)


@triton.jit
def _reflected(x, along, kind: tl.constexpr):
    length = _rounded(tl.sum(_rounded(x * along, kind)), kind)
    return _rounded(x - _rounded(2.0 * length * along, kind), kind)


@triton.jit
def _normed(x, weight, n, epsilon, kind: tl.constexpr):
    scale = libdevice.rsqrt(tl.sum(x * x) / n + epsilon)
    return _rounded(x * scale, kind) * weight


@triton.jit
def _reflect_rows(x, vector, n, stride, BLOCK: tl.constexpr):
    kind = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    x += tl.program_id(0).to(tl.int64) * stride + columns
    along = _rounded(tl.load(vector + columns, mask=inside, other=0.0), kind)
    values = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    tl.store(x, _reflected(values, along, kind).to(kind), mask=inside)


@triton.jit
def _norm_rows(x, out, weight, n, stride, out_stride, epsilon, BLOCK: tl.constexpr):
    kind = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, _normed(values, by, n, epsilon, kind).to(kind), mask=inside)


@triton.jit
def _add_norm_rows(
    x, residual, weight, vector, n, stride, residual_stride, epsilon, REFLECT: tl.constexpr, BLOCK: tl.constexpr
):
    kind = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    x += row * stride + columns
    residual += row * residual_stride + columns
    values = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    if REFLECT:
        along = _rounded(tl.load(vector + columns, mask=inside, other=0.0), kind)
        values = _reflected(values, along, kind)
        others = _reflected(others, along, kind)
    total = values + others  # not rounded for the norm
    tl.store(residual, total.to(kind), mask=inside)
    by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x, _normed(total, by, n, epsilon, kind).to(kind), mask=inside)


@triton.jit
def _gated_rows(x, out, n, stride, BLOCK: tl.constexpr):
    kind = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    x += row * stride + columns
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + n, mask=inside, other=0.0).to(tl.float32)
    opened = _rounded(gate / (1.0 + libdevice.exp(-gate)), kind)
    tl.store(out + row * n + columns, (opened * up).to(kind), mask=inside)


@triton.jit
def _norm_rotate(
    qkv,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    stride,
    q_heads,
    heads,
    epsilon,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    kind = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < HALF)
    place = qkv + token * stride + head * (2 * HALF) + column
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = libdevice.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + epsilon)[:, None]
    low = _weighted(low * scale, q_weight + column, k_weight + column, head < q_heads, kind)
    high = _weighted(high * scale, q_weight + HALF + column, k_weight + HALF + column, head < q_heads, kind)
    turn = cos_sin + tl.load(positions + token) * (2 * HALF) + column
    cos = _rounded(tl.load(turn), kind)
    sin = _rounded(tl.load(turn + HALF), kind)
    tl.store(place, (_rounded(low * cos, kind) - _rounded(high * sin, kind)).to(kind), mask=inside)
    tl.store(place + HALF, (_rounded(high * cos, kind) + _rounded(low * sin, kind)).to(kind), mask=inside)


@triton.jit
def _weighted(values, q_weight, k_weight, of_query, kind: tl.constexpr):
    weight = tl.where(of_query, tl.load(q_weight).to(tl.float32), tl.load(k_weight).to(tl.float32))
    return _rounded(_rounded(values, kind) * weight, kind)
