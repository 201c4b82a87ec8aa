# SPDX-License-Identifier: Apache-2.0
"""Dynamic quantisation to 8 bits with a scale for each group of a row.

For finite numbers it has the bits of vLLM's kernel in C++.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

#: Groups that a program quantises.
_GROUPS, _WARPS = 32, 4


def quantise(x: Tensor, out: Tensor, scales: Tensor, *, epsilon: float, powers_of_two: bool) -> None:
    """Put ``x`` ``[rows, n]`` over ``scales`` ``[rows, groups]`` into ``out``, and the scales into ``scales``.

    ``x`` is float16 or bfloat16 and ``out`` float8_e4m3fn, both contiguous; ``scales`` is float32 of any strides. A
    group is a power of two elements. Its largest magnitude, or ``epsilon`` if that is larger, becomes 448, or less
    where ``powers_of_two`` asks for scales that are rounded up to such.
    """
    rows, groups = scales.shape
    numbers = {"COLUMNS": groups, "GROUPS": _GROUPS, "SIZE": x.shape[1] // groups, "POWERS": powers_of_two}
    sizes = (rows * groups, scales.stride(0), scales.stride(1))
    grid = (triton.cdiv(rows * groups, _GROUPS),)
    _quantise[grid](x, out, scales, *sizes, epsilon, **numbers, num_warps=_WARPS)


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
