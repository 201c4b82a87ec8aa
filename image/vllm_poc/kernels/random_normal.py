# SPDX-License-Identifier: Apache-2.0
"""Standard normal numbers by hash, Box and Muller, and rounding, in one pass: see `vllm_poc.maths.sampling`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra import libdevice

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def fill_normal(out: Tensor, seeds: Tensor) -> None:
    """Fill ``out`` (``S + [n]``, float32, float16 or bfloat16) as `vllm_poc.maths.sampling.fill_normal` does.

    ``S`` has one or two dimensions; ``seeds`` is int64 ``S``. The numbers of a seed are contiguous in ``out``.
    """
    if out.numel() == 0:
        return
    rows = out.unsqueeze(0) if seeds.ndim == 1 else out
    outer, inner, n = rows.shape
    half = (n + 1) // 2
    grid = (outer * inner * triton.cdiv(half, _BLOCK),)  # its other axes hold 65 535 programs
    _fill[grid](rows, seeds.contiguous(), n, half, inner, rows.stride(0), rows.stride(1), BLOCK=_BLOCK)


@triton.jit
def _rotate_left(words, bits: tl.constexpr):
    return (words << bits) | (words >> (32 - bits))


@triton.jit
def hashed(keys, seed):
    """Return `vllm_poc.maths.sampling.murmur` of keys under a seed of type uint32."""
    mixed = _rotate_left(keys.to(tl.uint32) * 0xCC9E2D51, 15) * 0x1B873593
    words = _rotate_left(seed ^ mixed, 13) * 5 + 0xE6546B64
    words = (words ^ (words >> 16)) * 0x85EBCA6B
    words = (words ^ (words >> 13)) * 0xC2B2AE35
    return words ^ (words >> 16)


@triton.jit
def _uniform(keys, seed):
    return hashed(keys, seed).to(tl.float32) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def _fill(out, seeds, n, half, inner, outer_stride, inner_stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(half, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    seed = tl.load(seeds + row).to(tl.uint32)
    out += (row // inner) * outer_stride + (row % inner) * inner_stride
    keys = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    radius = libdevice.sqrt_rn(libdevice.log(tl.maximum(_uniform(keys, seed), 1e-10)) * -2.0)
    angle = _uniform(keys + half, seed) * 6.283185307179586
    kind = out.dtype.element_ty
    tl.store(out + keys, (radius * libdevice.cos(angle)).to(kind), mask=keys < half)
    tl.store(out + half + keys, (radius * libdevice.sin(angle)).to(kind), mask=half + keys < n)
