# SPDX-License-Identifier: Apache-2.0
"""Elementwise work between the matrix products of a decoder layer, and the quantisation of their inputs.

All but `norm`, `gated` and `quantise` work in place.

The memory is the limit: each element is read once, and many loads are under way at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_poc.kernels import row_sums

if TYPE_CHECKING:
    from torch import Tensor

_GATED_BLOCK, _GATED_WARPS = 1024, 4
#: Heads that a program rotates.
_HEADS, _HEADS_WARPS = 16, 2
#: Groups that a program quantises.
_GROUPS, _GROUPS_WARPS = 32, 4


def reflect(x: Tensor, vector: Tensor) -> None:
    """Reflect the rows of ``x`` ``[rows, n]`` along ``vector`` ``[n]``: `vllm_poc.maths.sampling.reflect`."""
    tokens, n = x.shape
    _reflect_rows[(tokens,)](x, vector, x.stride(0), **row_sums.launch(n))


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the root mean square norm of the rows of ``x`` ``[rows, n]``, by ``weight`` ``[n]``."""
    tokens, n = x.shape
    out = torch.empty_like(x)
    _norm_rows[(tokens,)](x, out, weight, x.stride(0), out.stride(0), epsilon, **row_sums.launch(n))
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, vector: Tensor | None = None) -> None:
    """Add ``x`` ``[rows, n]`` to ``residual``, and put the norm of the sum into ``x``.

    With a ``vector`` ``[n]`` both are reflected along it first.
    """
    tokens, n = x.shape
    tensors = (x, residual, weight, weight if vector is None else vector)
    sizes = (x.stride(0), residual.stride(0), epsilon)
    _add_norm_rows[(tokens,)](*tensors, *sizes, REFLECT=vector is not None, **row_sums.launch(n))


def gated(x: Tensor) -> Tensor:
    """Return ``silu(x[:, :n]) * x[:, n:]`` of ``x`` ``[rows, 2 n]``."""
    tokens, n = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, n)
    grid = (tokens * triton.cdiv(n, _GATED_BLOCK),)
    _gated_rows[grid](x, out, x.stride(0), N=n, BLOCK=_GATED_BLOCK, num_warps=_GATED_WARPS, **row_sums.EXACT)
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
    numbers = {"Q_HEADS": q_heads, "HEADS": heads, "AT_ONCE": _HEADS, "HALF": head_dim // 2}
    tensors = (qkv, positions, cos_sin, q_weight, k_weight)
    grid = (triton.cdiv(tokens * heads, _HEADS),)
    sizes = (tokens * heads, qkv.stride(0), epsilon)
    _norm_rotate[grid](*tensors, *sizes, **numbers, num_warps=_HEADS_WARPS, **row_sums.EXACT)


def quantise(x: Tensor, out: Tensor, scales: Tensor, *, epsilon: float, powers_of_two: bool) -> None:
    """Put ``x`` ``[rows, n]`` over ``scales`` ``[rows, groups]`` into ``out``, and the scales into ``scales``.

    ``x`` is float16 or bfloat16 and ``out`` float8_e4m3fn, both contiguous; ``scales`` is float32 of any strides. A
    group is a power of two elements. Its largest magnitude, or ``epsilon`` if that is larger, becomes 448, or less
    where ``powers_of_two`` asks for scales that are rounded up to such. For finite numbers the bits are those of
    vLLM's kernel in C++.
    """
    tokens, groups = scales.shape
    numbers = {"COLUMNS": groups, "GROUPS": _GROUPS, "SIZE": x.shape[1] // groups, "POWERS": powers_of_two}
    sizes = (tokens * groups, scales.stride(0), scales.stride(1))
    grid = (triton.cdiv(tokens * groups, _GROUPS),)
    _quantise[grid](x, out, scales, *sizes, epsilon, **numbers, num_warps=_GROUPS_WARPS)


@triton.jit
def _reflect_rows(x, vector, stride, N: tl.constexpr, STEPS: tl.constexpr):
    kind = x.dtype.element_ty
    column = row_sums.columns(STEPS)
    x += tl.program_id(0).to(tl.int64) * stride
    values = row_sums.held(x, column, N)
    twice, _ = row_sums.twice_along(values, values, vector, column, N, kind)
    for tile in tl.static_range(len(values)):
        along = row_sums.along_again(vector, column, tile, N, kind)
        row_sums.store(x, column, tile, N, row_sums.reflected(values[tile], twice, along, kind))


@triton.jit
def _norm_rows(x, out, weight, stride, out_stride, epsilon, N: tl.constexpr, STEPS: tl.constexpr):
    kind = x.dtype.element_ty
    column = row_sums.columns(STEPS)
    row = tl.program_id(0).to(tl.int64)
    values = row_sums.held(x + row * stride, column, N)
    squares = row_sums.no_sums(32)
    for tile in tl.static_range(len(values)):
        squares = row_sums.added(squares, values[tile].to(tl.float32) * values[tile].to(tl.float32))
    scale = _scale(squares, epsilon, N)
    for tile in tl.static_range(len(values)):
        normed = row_sums.rounded(values[tile].to(tl.float32) * scale, kind)
        weights = row_sums.load(weight, column, tile, N).to(tl.float32)
        row_sums.store(out + row * out_stride, column, tile, N, normed * weights)


@triton.jit
def _add_norm_rows(
    x,
    residual,
    weight,
    vector,
    stride,
    residual_stride,
    epsilon,
    REFLECT: tl.constexpr,
    N: tl.constexpr,
    STEPS: tl.constexpr,
):
    kind = x.dtype.element_ty
    column = row_sums.columns(STEPS)
    x += tl.program_id(0).to(tl.int64) * stride
    residual += tl.program_id(0).to(tl.int64) * residual_stride
    left = row_sums.held(x, column, N)
    right = row_sums.held(residual, column, N)
    if REFLECT:
        twice_left, twice_right = row_sums.twice_along(left, right, vector, column, N, kind)
    squares = row_sums.no_sums(32)
    totals = tl.tuple(())
    for tile in tl.static_range(len(left)):
        if REFLECT:
            along = row_sums.along_again(vector, column, tile, N, kind)
            total = row_sums.reflected(left[tile], twice_left, along, kind)
            total += row_sums.reflected(right[tile], twice_right, along, kind)
        else:
            total = left[tile].to(tl.float32) + right[tile].to(tl.float32)
        squares = row_sums.added(squares, total * total)
        totals = totals + (total,)  # noqa: RUF005 - not in Triton
    scale = _scale(squares, epsilon, N)
    for tile in tl.static_range(len(totals)):
        normed = row_sums.rounded(totals[tile] * scale, kind)  # of the sum before it is rounded
        weights = row_sums.load(weight, column, tile, N).to(tl.float32)
        row_sums.store(residual, column, tile, N, totals[tile])
        row_sums.store(x, column, tile, N, normed * weights)


@triton.jit
def _scale(squares, epsilon, N: tl.constexpr):
    return libdevice.rsqrt(row_sums.total(squares) * (1.0 / N) + epsilon)


@triton.jit
def _gated_rows(x, out, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    kind = x.dtype.element_ty
    blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    x += row * stride + columns
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + N, mask=inside, other=0.0).to(tl.float32)
    opened = row_sums.rounded(gate / (1.0 + libdevice.exp(-gate)), kind)
    tl.store(out + row * N + columns, (opened * up).to(kind), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _norm_rotate(
    qkv,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    count,
    stride,
    epsilon,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HALF: tl.constexpr,
):
    kind = qkv.dtype.element_ty
    index = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    inside = index < count
    token = (index // HEADS).to(tl.int64)
    head = index % HEADS
    column = tl.arange(0, HALF)[None, :]
    place = qkv + token * stride + head * (2 * HALF) + column
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = cos_sin + tl.load(positions + token, mask=inside, other=0) * (2 * HALF) + column
    cos = row_sums.rounded(tl.load(turn), kind)
    sin = row_sums.rounded(tl.load(turn + HALF), kind)
    weight = tl.where(head < Q_HEADS, q_weight, k_weight) + column
    # The lanes of the two halves are what a warp adds first.
    squares = tl.sum(_lanes(low * low) + _lanes(high * high), 1)
    scale = libdevice.rsqrt(tl.sum(squares, 1) * (0.5 / HALF) + epsilon)[:, None]
    low = row_sums.rounded(row_sums.rounded(low * scale, kind) * tl.load(weight).to(tl.float32), kind)
    high = row_sums.rounded(row_sums.rounded(high * scale, kind) * tl.load(weight + HALF).to(tl.float32), kind)
    tl.store(place, (row_sums.rounded(low * cos, kind) - row_sums.rounded(high * sin, kind)).to(kind), mask=inside)
    tl.store(
        place + HALF, (row_sums.rounded(high * cos, kind) + row_sums.rounded(low * sin, kind)).to(kind), mask=inside
    )


@triton.jit
def _lanes(values):
    """Return the sum of each four elements: ``[rows, threads, lanes that a thread stands for]``."""
    lanes: tl.constexpr = 1 if values.shape[1] == row_sums.EACH else 2
    return tl.sum(
        tl.reshape(values, [values.shape[0], values.shape[1] // (lanes * row_sums.EACH), lanes, row_sums.EACH]), 3
    )


# One program for any number of rows, or a batch of a new size would wait for the compiler.
@triton.jit(do_not_specialize=["count", "row_stride", "column_stride"])
def _quantise(
    x,
    out,
    scales,
    count,
    row_stride,
    column_stride,
    epsilon,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    POWERS: tl.constexpr,
):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    place = group.to(tl.int64)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(x + place, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), epsilon), 448.0)
    if POWERS:
        scale = _power_above(tl.maximum(scale, 1e-10))
        values *= tl.div_rn(1.0, scale)[:, None]  # exact, as the quotient would be
    else:
        values = tl.div_rn(values, scale[:, None])
    tl.store(out + place, tl.clamp(values, -448.0, 448.0).to(out.dtype.element_ty), mask=inside[:, None])
    scales += (group // COLUMNS).to(tl.int64) * row_stride + group % COLUMNS * column_stride
    tl.store(scales, scale, mask=inside)


@triton.jit
def _power_above(x):
    """Return ``exp2(ceil(log2(x)))``: as 448th parts of 16-bit numbers are no closer to a power, no digit is lost."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
