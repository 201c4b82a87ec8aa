# SPDX-License-Identifier: Apache-2.0
"""Rows that a warp keeps in registers, and their sums in the order of PyTorch's, so that not even a last bit differs.

There, a warp takes a step of 128 elements at a time, four in each lane. A lane adds what it gets to four sums, step by
step, and then these one after the other; the lanes add theirs by halves. (PyTorch divides rows of 8192 elements and
more among warps, in another order.) Here, a row is cut into tiles of ``[steps, 128]``. Triton gives four neighbours in
a step to each lane, so that a lane has all steps of its elements.

All of a row is asked for before anything is waited for. That keeps the memory busy, and needs it but once. What does
not fit into registers, from some 6000 elements on, the compiler keeps in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

_STEP = tl.constexpr(128)
#: Elements of a step in a lane.
EACH = tl.constexpr(4)
#: Steps in a tile, at most. Triton's time to compile grows with the cube of the number of tiles.
_STEPS = 8
#: A product and a sum stay two operations, each of which rounds.
EXACT = {"enable_fp_fusion": False}


def launch(n: int) -> dict[str, Any]:
    """Return how to launch a program for each row of ``n`` elements."""
    steps = math.gcd(triton.cdiv(n, _STEP.value), _STEPS)  # divides, lest a tile lies behind the row
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
def no_sums():
    """Return where `added` begins."""
    return tl.zeros([_STEP], tl.float32)


@triton.jit
def added(sums, values):
    """Return the sums of the elements of a step, continued step by step with a tile."""
    first = (tl.arange(0, values.shape[0]) == 0)[:, None]
    return tl.sum(tl.where(first, sums[None, :] + values, values), 0)


@triton.jit
def total(sums):
    """Return the sum of a row."""
    return tl.sum(tl.sum(tl.reshape(sums, [_STEP // EACH, EACH]), 1), 0)


@triton.jit
def twice_along(left, right, vector, column, N: tl.constexpr, kind: tl.constexpr):
    """Return twice the products of two rows with a vector."""
    products = no_sums()
    others = no_sums()
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
