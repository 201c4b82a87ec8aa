# SPDX-License-Identifier: Apache-2.0
"""Products of tokens with experts whose weights are numbers of 4 bits, packed as vLLM's Marlin kernels read them.

Marlin unpacks the weights again for every 64 tokens. Where an expert has hundreds, they are better unpacked once, and
multiplied as weights of 16 bits are. Both give the same sums, but for their order.

A weight is one of ±0, 0.5, 1, 1.5, 2, 3, 4 and 6, times a power of two that 32 of them along k share (MXFP4 of the OCP
Microscaling Formats 1.0). It is exact in bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

#: Tiles in which weights are stored, and how many share a scale.
TILE_N, TILE_K, GROUP = 64, 16, 32
#: Rows of an expert that are multiplied at a time.
ROWS = 128
#: Of which the columns of products are a multiple, and the numbers along k that are unpacked at a time.
COLUMNS, AT_ONCE = 256, 128
_DEPTH, _WARPS = 64, 8
_STAGES, _STAGES_WEIGHTED = 4, 3
#: How many numbers along k a program unpacks, if k is a multiple.
_SPAN, _UNPACK_WARPS = 1024, 4
#: What makes a number of 4 bits one of 32, whose exponents count from 127 instead of 1.
_BIAS = tl.constexpr(2.0**126)


class PackedLayout(NamedTuple):
    """Where the numbers of a tile are, and their scales.

    ``places``, int32 ``[64, 16]``: the number of row n and column k is in word ``places[n, k] // 8`` of the tile, the
    ``places[n, k] % 8``-th from below. Those of an even k and the next are in one word. ``columns``, int32 ``[64]``:
    the scales of row n are in column ``columns[n]``.
    """

    places: Tensor
    columns: Tensor


class ExpertRows(NamedTuple):
    """Which token an expert takes in which row; rows of an expert begin at a multiple of `ROWS`.

    ``slots`` int32 ``[rows]`` are token times experts of a token, plus which of these it is, or beyond all for a row
    that nobody has; ``owners`` int32 ``[rows / ROWS]`` are the experts; ``used`` int32 ``[1]`` is the number of rows.
    """

    slots: Tensor
    owners: Tensor
    used: Tensor


def unpack(words: Tensor, scales: Tensor, layout: PackedLayout, out: Tensor) -> None:
    """Write the weights of experts into ``out``, bfloat16 ``[experts, n, k]``.

    ``words`` are int32 ``[experts, k / 16, 2 n]``, ``scales`` uint8 ``[experts, k / 32, n]`` are exponents of two plus
    127; n is a multiple of 64, k of 128, all are contiguous.
    """
    experts, n, k = out.shape
    span = _SPAN if k % _SPAN == 0 else AT_ONCE
    sizes = {"N": n, "K": k, "SPAN": span, "AT_ONCE": AT_ONCE, "TILE": TILE_N, "num_warps": _UNPACK_WARPS}
    _unpack[(k // span, n // TILE_N, experts)](words, scales, out, layout.places, layout.columns, **sizes)


def multiply(x: Tensor, weights: Tensor, first: int, rows: ExpertRows, out: Tensor, *, top_k: int) -> None:
    """Multiply the tokens of those experts that ``weights`` has, from number ``first`` on.

    ``x`` is bfloat16 ``[tokens, k]``, ``weights`` ``[experts, n, k]`` and ``out`` ``[rows, n]``, contiguous; n is a
    multiple of 256, k of 64.
    """
    experts, n, k = weights.shape
    sizes = {"N": n, "K": k, "ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": _DEPTH, "TOP_K": top_k}
    tensors = (x, _tiles(weights.view(-1, k), COLUMNS), _tiles(out, ROWS, COLUMNS), *rows)
    grid = (len(rows.owners) * (n // COLUMNS),)
    _multiply[grid](*tensors, first, experts, len(x) * top_k, **sizes, num_warps=_WARPS, num_stages=_STAGES)


def multiply_weighted(x: Tensor, weights: Tensor, first: int, rows: ExpertRows, out: Tensor, factors: Tensor) -> None:
    """Multiply the rows of those experts that ``weights`` has, from number ``first`` on, and each by its factor.

    ``x`` is bfloat16 ``[rows, k]``, ``weights`` ``[experts, n, k]``, ``factors`` float32 ``[slots]`` and ``out``
    bfloat16 ``[slots, n]``, contiguous; n is a multiple of 256, k of 64. Factors and products are rounded to bfloat16.
    """
    experts, n, k = weights.shape
    sizes = {"N": n, "K": k, "ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": _DEPTH}
    tensors = (_tiles(x, ROWS), _tiles(weights.view(-1, k), COLUMNS), out, factors, *rows)
    grid = (len(rows.owners) * (n // COLUMNS),)
    _multiply_weighted[grid](*tensors, first, experts, len(out), **sizes, num_warps=_WARPS, num_stages=_STAGES_WEIGHTED)


def _tiles(matrix: Tensor, rows: int, columns: int = _DEPTH) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit
def _unpack(
    words,
    scales,
    out,
    places,
    columns,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TILE: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    pair = tl.arange(0, AT_ONCE // 2)[None, :]
    place = places + tl.arange(0, TILE)[:, None] * 16 + pair % 8 * 2
    even = tl.load(place)
    odd = tl.load(place + 1)
    column = tl.program_id(1) * TILE + tl.load(columns + tl.arange(0, TILE))[:, None]
    words += expert * (K // 16) * (2 * N) + tl.program_id(1) * (2 * TILE) + pair // 8 * (2 * N) + even // 8
    scales += expert * (K // 32) * N + tl.arange(0, AT_ONCE // 32)[None, :] * N + column
    out += expert * N * K + n.to(tl.int64) * K + tl.arange(0, AT_ONCE)[None, :]
    for step in range(0, SPAN, AT_ONCE):
        k = tl.program_id(0) * SPAN + step
        word = tl.load(words + k // 16 * (2 * N))
        power = (tl.load(scales + k // 32 * N).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        power = tl.broadcast_to(power[:, :, None], [TILE, AT_ONCE // 32, 16]).reshape(TILE, AT_ONCE // 2)
        first = (_number(word >> (even % 8 * 4)) * power).to(tl.bfloat16)
        second = (_number(word >> (odd % 8 * 4)) * power).to(tl.bfloat16)
        tl.store(out + k, tl.join(first, second).reshape(TILE, AT_ONCE))


@triton.jit
def _number(bits):
    """The lowest four bits are a sign, two of exponent and one of mantissa, as in any float; also where it is 0."""
    return (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * _BIAS


@triton.jit(do_not_specialize=["first", "experts", "slots_end"])
def _multiply(
    x,
    weights,
    out,
    slots,
    owners,
    used,
    first,
    experts,
    slots_end,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    blocks: tl.constexpr = N // COLUMNS  # neighbours read the same rows, and weights of the same expert
    row = tl.program_id(0) // blocks * ROWS
    column = tl.program_id(0) % blocks * COLUMNS
    if row >= tl.load(used):
        return
    expert = tl.load(owners + row // ROWS) - first
    if (expert < 0) | (expert >= experts):
        return
    slot = tl.load(slots + row + tl.arange(0, ROWS))
    token = tl.where(slot < slots_end, slot // TOP_K, 0).to(tl.int64)
    x += token[:, None] * K + tl.arange(0, DEPTH)[None, :]
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for k in range(0, K, DEPTH):
        total = tl.dot(tl.load(x + k), weights.load([expert * N + column, k]).T, total)
    out.store([row, column], total.to(tl.bfloat16))


@triton.jit(do_not_specialize=["first", "experts", "slots_end"])
def _multiply_weighted(
    x,
    weights,
    out,
    factors,
    slots,
    owners,
    used,
    first,
    experts,
    slots_end,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    blocks: tl.constexpr = N // COLUMNS
    row = tl.program_id(0) // blocks * ROWS
    column = tl.program_id(0) % blocks * COLUMNS
    if row >= tl.load(used):
        return
    expert = tl.load(owners + row // ROWS) - first
    if (expert < 0) | (expert >= experts):
        return
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for k in range(0, K, DEPTH):
        total = tl.dot(x.load([row, k]), weights.load([expert * N + column, k]).T, total)
    slot = tl.load(slots + row + tl.arange(0, ROWS))
    inside = slot < slots_end
    factor = tl.load(factors + slot, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
    weighted = total.to(tl.bfloat16).to(tl.float32) * factor[:, None]
    place = out + slot.to(tl.int64)[:, None] * N + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(place, weighted.to(tl.bfloat16), mask=inside[:, None])
