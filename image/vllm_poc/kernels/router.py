# SPDX-License-Identifier: Apache-2.0
"""The product of a router whose weights are float32, on units that multiply 16-bit numbers.

A float32 number is the sum of three bfloat16 numbers: 24 bits are three times 8. Their products with bfloat16 inputs
are exact in float32, so only the order of sums differs from a product in float32, which takes five times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

PARTS = 3
_BLOCK, _WARPS = 1024, 4


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in float32 for ``x`` bfloat16 ``[rows, n]`` and ``weight`` float32 ``[experts, n]``."""
    sums = torch.mm(x, in_parts(weight).flatten(0, 1).T, out_dtype=torch.float32)
    return sums.view(len(x), PARTS, -1).sum(dim=1)


def in_parts(weight: Tensor) -> Tensor:
    """Return ``weight``, contiguous float32, as bfloat16 ``[3, *weight.shape]`` that sum to it, the largest first.

    Parts below 1e-38 become zero.
    """
    parts = torch.empty(PARTS, *weight.shape, dtype=torch.bfloat16, device=weight.device)
    count = weight.numel()
    _split[(triton.cdiv(count, _BLOCK),)](weight, parts, count, BLOCK=_BLOCK, num_warps=_WARPS)
    return parts


@triton.jit(do_not_specialize=["count"])
def _split(weight, parts, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    rest = tl.load(weight + place, mask=inside, other=0.0)
    for part in tl.static_range(3):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts + part * count + place, rounded, mask=inside)
        rest -= rounded.to(tl.float32)
