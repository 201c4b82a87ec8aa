# SPDX-License-Identifier: Apache-2.0
"""Elementwise work between the matrix products of a decoder layer. All but `norm` and `gated` work in place.

Sums run through a row in the order of PyTorch's reductions, so that not even their last bit differs: a warp takes 128
elements at a time, four in each lane.
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
_ONE_WARP = {**_EXACT, "num_warps": 1}
_GATED_BLOCK = 1024
#: Heads that a program rotates.
_HEADS = 4


def reflect(x: Tensor, vector: Tensor) -> None:
    """Reflect the rows of ``x`` ``[rows, n]`` along ``vector`` ``[n]``: `vllm_poc.maths.reflections.reflect`."""
    rows, n = x.shape
    _reflect_rows[(rows,)](x, vector, n, x.stride(0), **_ONE_WARP)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the root mean square norm of the rows of ``x`` ``[rows, n]``, by ``weight`` ``[n]``."""
    rows, n = x.shape
    out = torch.empty_like(x)
    _norm_rows[(rows,)](x, out, weight, n, x.stride(0), out.stride(0), epsilon, **_ONE_WARP)
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, vector: Tensor | None = None) -> None:
    """Add ``x`` ``[rows, n]`` to ``residual``, and put the norm of the sum into ``x``.

    With a ``vector`` ``[n]`` both are reflected along it first.
    """
    rows, n = x.shape
    along = weight if vector is None else vector
    sizes = (n, x.stride(0), residual.stride(0), epsilon)
    _add_norm_rows[(rows,)](x, residual, weight, along, *sizes, REFLECT=vector is not None, **_ONE_WARP)


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
    ``[max_position, head_dim]`` with the cosines in its first half, the weights ``[head_dim]``; head_dim is a power
    of two, at least 8.
    """
    tokens, width = qkv.shape
    head_dim = q_weight.numel()
    heads = (width // head_dim + q_heads) // 2  # there are as many keys as values
    grid = (tokens, triton.cdiv(heads, _HEADS))
    tensors = (qkv, positions, cos_sin, q_weight, k_weight)
    sizes = (qkv.stride(0), q_heads, heads, epsilon)
    _norm_rotate[grid](*tensors, *sizes, HEADS=_HEADS, HALF=head_dim // 2, **_ONE_WARP)


@triton.jit
def _rounded(x, kind: tl.constexpr):
    return x.to(kind).to(tl.float32)


@triton.jit
def _step(start):
    return start + tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _load(row, columns, n):
    return tl.load(row + columns, mask=columns < n, other=0.0).to(tl.float32)


@triton.jit
def _sum(parts):
    return tl.sum(tl.sum(parts, 1), 0)


@triton.jit
def _twice_along(row, vector, n, kind: tl.constexpr):
    products = tl.zeros([32, 4], tl.float32)
    for start in range(0, n, 128):
        along = _rounded(_load(vector, _step(start), n), kind)
        products += _rounded(_load(row, _step(start), n) * along, kind)
    return 2.0 * _rounded(_sum(products), kind)


@triton.jit
def _reflected(values, twice, vector, columns, n, kind: tl.constexpr):
    along = _rounded(_load(vector, columns, n), kind)
    return _rounded(values - _rounded(twice * along, kind), kind)


@triton.jit
def _reflect_rows(x, vector, n, stride):
    kind = x.dtype.element_ty
    x += tl.program_id(0).to(tl.int64) * stride
    twice = _twice_along(x, vector, n, kind)
    for start in range(0, n, 128):
        columns = _step(start)
        values = _reflected(_load(x, columns, n), twice, vector, columns, n, kind)
        tl.store(x + columns, values.to(kind), mask=columns < n)


@triton.jit
def _norm_rows(x, out, weight, n, stride, out_stride, epsilon):
    kind = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    squares = tl.zeros([32, 4], tl.float32)
    for start in range(0, n, 128):
        values = _load(x, _step(start), n)
        squares += values * values
    scale = libdevice.rsqrt(_sum(squares) / n + epsilon)
    for start in range(0, n, 128):
        columns = _step(start)
        normed = _rounded(_load(x, columns, n) * scale, kind) * _load(weight, columns, n)
        tl.store(out + row * out_stride + columns, normed.to(kind), mask=columns < n)


@triton.jit
def _total(x, residual, vector, columns, n, twice_x, twice_residual, kind: tl.constexpr, REFLECT: tl.constexpr):
    values = _load(x, columns, n)
    others = _load(residual, columns, n)
    if REFLECT:
        values = _reflected(values, twice_x, vector, columns, n, kind)
        others = _reflected(others, twice_residual, vector, columns, n, kind)
    return values + others


@triton.jit
def _add_norm_rows(x, residual, weight, vector, n, stride, residual_stride, epsilon, REFLECT: tl.constexpr):
    kind = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    residual += row * residual_stride
    twice_x = 0.0
    twice_residual = 0.0
    if REFLECT:
        twice_x = _twice_along(x, vector, n, kind)
        twice_residual = _twice_along(residual, vector, n, kind)
    squares = tl.zeros([32, 4], tl.float32)
    for start in range(0, n, 128):
        total = _total(x, residual, vector, _step(start), n, twice_x, twice_residual, kind, REFLECT)
        squares += total * total
    scale = libdevice.rsqrt(_sum(squares) / n + epsilon)
    for start in range(0, n, 128):
        columns = _step(start)
        total = _total(x, residual, vector, columns, n, twice_x, twice_residual, kind, REFLECT)
        normed = _rounded(total * scale, kind) * _load(weight, columns, n)  # of the sum before it is rounded
        tl.store(residual + columns, total.to(kind), mask=columns < n)
        tl.store(x + columns, normed.to(kind), mask=columns < n)


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
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None, None]
    column = tl.arange(0, HALF // 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    inside = (head < heads) & (column < HALF)
    place = qkv + token * stride + head * (2 * HALF) + column
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(low * low, 2) + tl.sum(high * high, 2)
    scale = libdevice.rsqrt(tl.sum(squares, 1) / (2 * HALF) + epsilon)[:, None, None]
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
