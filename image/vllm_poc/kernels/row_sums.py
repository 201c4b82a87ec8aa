# SPDX-License-Identifier: Apache-2.0
"""Rows that a warp keeps in registers, and their sums in the order of PyTorch's, so that not even a last bit differs.

There, a warp takes 16 bytes in each lane at a time: a step of 128 elements of 32 bits, or of 256 of 16 bits. A lane
adds what it gets to four or eight sums, step by step, and then these one after the other; the lanes add theirs by
halves. (PyTorch has another order for fewer than 16 rows, and divides rows of 8192 elements and more among warps.)
Here, a row is cut into tiles of ``[steps, 256]``. Triton gives four neighbours in each half of a step to each lane, so
that a lane has all steps of its elements.

All of a row is asked for before anything is waited for. That keeps the memory busy, and needs it but once. What does
not fit into registers, from some 6000 elements on, the compiler keeps in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

_LANES = tl.constexpr(32)
#: Elements in a lane that lie side by side: PyTorch's step for 32 bits.
EACH = tl.constexpr(4)
_STEP = tl.constexpr(256)
#: Steps in a tile, at most. Triton's time to compile grows with the square of the number of tiles.
_STEPS = 4
#: A product and a sum stay two operations, each of which rounds.
EXACT = {"enable_fp_fusion": False}


def launch(n: int) -> dict[str, Any]:
    """Return how to launch a program for each row of ``n`` elements."""
    steps = math.gcd(triton.cdiv(n, _STEP.value), _STEPS)  # a divisor, so that no tile lies behind the row
    return {"N": n, "STEPS": steps, "num_warps": 1, **EXACT}


@triton.jit
def rounded(x, kind: tl.constexpr):
    """Return float32 numbers rounded as if they had been written to memory."""
    return x.to(kind).to(tl.float32)


@triton.jit
def columns(STEPS: tl.constexpr):
    """Return the first tile's places in a row."""
    column = tl.arange(0, STEPS)[:, None] * _STEP + tl.arange(0, _STEP)[None, :]
    return tl.max_contiguous(column, [1, EACH])


@triton.jit
def load(row, column, tile: tl.constexpr, N: tl.constexpr, AGAIN: tl.constexpr = False):
    """Return a tile of a row, with zeros behind its end. ``AGAIN``: of one that was loaded before."""
    # Triton would make one of two equal loads, and hold the result in registers between.
    policy: tl.constexpr = "evict_last" if AGAIN else ""
    start: tl.constexpr = tile * column.shape[0] * _STEP
    if start + column.shape[0] * _STEP <= N:
        values = tl.load(row + column + start, eviction_policy=policy)
    else:
        values = tl.load(row + column + start, mask=column < N - start, other=0.0, eviction_policy=policy)
    return values


@triton.jit
def store(row, column, tile: tl.constexpr, N: tl.constexpr, values):
    """Write a tile of a row."""
    start: tl.constexpr = tile * column.shape[0] * _STEP
    values = values.to(row.dtype.element_ty)
    if start + column.shape[0] * _STEP <= N:
        tl.store(row + column + start, values)
    else:
        tl.store(row + column + start, values, mask=column < N - start)


@triton.jit
def held(row, column, N: tl.constexpr):
    """Return all tiles of a row."""
    width: tl.constexpr = column.shape[0] * _STEP
    tiles = tl.tuple(())
    for tile in tl.static_range((N + width - 1) // width):
        tiles = tiles + (load(row, column, tile, N),)  # noqa: RUF005 - not in Triton
    return tiles


@triton.jit
def no_sums(BITS: tl.constexpr):
    """Return where `added` begins with elements of so many bits."""
    return tl.zeros([_LANES * (128 // BITS)], tl.float32)


@triton.jit
def added(sums, values):
    """Return the sums of the elements of a step, continued step by step with a tile."""
    step: tl.constexpr = sums.shape[0]
    values = tl.reshape(values, [values.shape[0] * values.shape[1] // step, step])
    first = (tl.arange(0, values.shape[0]) == 0)[:, None]
    return tl.sum(tl.where(first, sums[None, :] + values, values), 0)


@triton.jit
def total(sums):
    """Return the sum of a row."""
    if sums.shape[0] == _LANES * EACH:
        lanes = tl.sum(tl.reshape(sums, [_LANES, EACH]), 1)
    else:  # half of what a lane adds lies in its neighbour
        lanes = _one_after_the_other(tl.reshape(sums, [_LANES, 2, 2, 2]))
    return tl.sum(lanes, 0)


@triton.jit
def _one_after_the_other(x):
    """Return the sums over the three last axes, each of 2, element by element."""
    even, odd = tl.split(x)
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7


@triton.jit
def twice_along(left, right, vector, column, N: tl.constexpr, kind: tl.constexpr):
    """Return twice the products of two rows with a vector."""
    bits: tl.constexpr = kind.primitive_bitwidth
    products = no_sums(bits)
    others = no_sums(bits)
    for tile in tl.static_range(len(left)):
        along = rounded(load(vector, column, tile, N), kind)
        products = added(products, rounded(left[tile].to(tl.float32) * along, kind))
        others = added(others, rounded(right[tile].to(tl.float32) * along, kind))
    return 2.0 * rounded(total(products), kind), 2.0 * rounded(total(others), kind)


@triton.jit
def along_again(vector, column, tile: tl.constexpr, N: tl.constexpr, kind: tl.constexpr):
    """Return a tile of a vector that `twice_along` has read before."""
    return rounded(load(vector, column, tile, N, AGAIN=True), kind)


@triton.jit
def reflected(values, twice, along, kind: tl.constexpr):
    """Return a tile less its share along the vector."""
    return rounded(values.to(tl.float32) - rounded(twice * along, kind), kind)
