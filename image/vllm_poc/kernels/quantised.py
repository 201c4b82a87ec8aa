# SPDX-License-Identifier: Apache-2.0
"""Dynamic quantisation to 8 bits with a scale for each group of a row, to the bit as vLLM's kernel in C++ has it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

#: Groups that a program quantises, at most.
_GROUPS, _WARPS = 32, 4


def quantise(x: Tensor, out: Tensor, scales: Tensor, *, epsilon: float, powers_of_two: bool) -> None:
    """Put ``x`` ``[rows, n]`` over ``scales`` ``[rows, groups]`` into ``out``, and the scales into ``scales``.

    ``x`` is float16 or bfloat16 and ``out`` float8_e4m3fn, both contiguous; ``scales`` is float32 of any strides. A
    group is a power of two elements. Its largest magnitude, or ``epsilon`` if that is larger, becomes 448, or less
    where ``powers_of_two`` asks for scales that are rounded up to such.
    """
    rows, groups = scales.shape
    at_once = math.gcd(rows * groups, _GROUPS)  # divides, so that no program has groups behind the last
    numbers = {"COLUMNS": groups, "GROUPS": at_once, "SIZE": x.shape[1] // groups, "POWERS": powers_of_two}
    grid = (rows * groups // at_once,)
    _quantise[grid](x, out, scales, scales.stride(0), scales.stride(1), epsilon, **numbers, num_warps=_WARPS)


@triton.jit
def _quantise(
    x,
    out,
    scales,
    row_stride,
    column_stride,
    epsilon,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    POWERS: tl.constexpr,
):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    place = group.to(tl.int64)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(x + place).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), epsilon), 448.0)
    if POWERS:
        scale = _power_above(tl.maximum(scale, 1e-10))
        values *= tl.div_rn(1.0, scale)[:, None]  # exact, as the quotient would be
    else:
        values = tl.div_rn(values, scale[:, None])
    tl.store(out + place, tl.clamp(values, -448.0, 448.0).to(out.dtype.element_ty))
    tl.store(scales + (group // COLUMNS).to(tl.int64) * row_stride + group % COLUMNS * column_stride, scale)


@triton.jit
def _power_above(x):
    """Return ``exp2(ceil(log2(x)))``: as 448th parts of 16-bit numbers are no closer to a power, no digit is lost."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
