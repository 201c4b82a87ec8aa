# SPDX-License-Identifier: Apache-2.0
"""Routers' logits: the product of one whose weights are float32, on units that multiply 16-bit numbers.

A float32 number is the sum of three bfloat16 numbers: 24 bits are three times 8. Their products with bfloat16 inputs
are exact in float32. The units cut off digits of long sums, so those of a few columns are added up outside of them.
Only the order of sums differs from a product in float32, which takes several times as long.

In the decode scheme seeds take the place of that product: logits of all routers at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vllm_poc.kernels.random_normal import hashed

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = tl.constexpr(3)
_BLOCK, _WARPS = 1024, 4
#: Rows, experts and columns that a program multiplies at a time.
_TILE = {"ROWS": 128, "EXPERTS": 128, "COLUMNS": 64, "num_warps": 8, "num_stages": 3}


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in float32 for ``x`` bfloat16 ``[rows, n]`` and ``weight`` float32 ``[experts, n]``.

    The rows of ``x`` may be part of wider ones; ``weight`` is contiguous.
    """
    rows, experts = len(x), len(weight)
    out = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, _TILE["ROWS"]) * triton.cdiv(experts, _TILE["EXPERTS"]),)
    _multiply[grid](x, in_parts(weight), out, rows, x.stride(0), N=x.shape[1], OF=experts, **_TILE)
    return out


def in_parts(weight: Tensor) -> Tensor:
    """Return ``weight``, contiguous float32, as bfloat16 ``[3, *weight.shape]`` that sum to it, the largest first.

    Parts below 1e-38 become zero.
    """
    parts = torch.empty(_PARTS.value, *weight.shape, dtype=torch.bfloat16, device=weight.device)
    count = weight.numel()
    _split[(triton.cdiv(count, _BLOCK),)](weight, parts, count, BLOCK=_BLOCK, num_warps=_WARPS)
    return parts


def seeded_logits(seeds: Tensor, steps: Tensor, *, experts: int, top_k: int, base: int, others: float) -> Tensor:
    """Return float32 ``[routers, nonces, experts]``: `vllm_poc.maths.decode.seeded_logits`.

    ``seeds`` is int64 ``[routers, nonces]``, ``steps`` int64 ``[nonces]``. The chosen experts get ``base`` and more.
    """
    out = torch.empty(*seeds.shape, experts, dtype=torch.float32, device=seeds.device)
    sizes = {"EXPERTS": experts, "TOP_K": top_k, "BASE": base, "OTHERS": others}
    block = triton.next_power_of_2(experts)
    _ladder[(seeds.numel(),)](seeds.contiguous(), steps.contiguous(), out, len(steps), **sizes, BLOCK=block)
    return out


@triton.jit(do_not_specialize=["nonces"])
def _ladder(
    seeds,
    steps,
    out,
    nonces,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BASE: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = hashed(tl.load(steps + row % nonces), tl.load(seeds + row).to(tl.uint32)) % EXPERTS
    expert = tl.arange(0, BLOCK)
    rank = (expert + EXPERTS - start.to(tl.int32)) % EXPERTS
    logits = tl.where(rank < TOP_K, (BASE + TOP_K - rank).to(tl.float32), OTHERS)
    tl.store(out + row.to(tl.int64) * EXPERTS + expert, logits, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["count"])
def _split(weight, parts, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    rest = tl.load(weight + place, mask=inside, other=0.0)
    for part in tl.static_range(_PARTS):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts + part * count + place, rounded, mask=inside)
        rest -= rounded.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x,
    parts,
    out,
    rows,
    stride,
    N: tl.constexpr,
    OF: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks: tl.constexpr = (OF + EXPERTS - 1) // EXPERTS  # neighbours read the same rows
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.program_id(0) % blocks * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, EXPERTS], tl.float32)
    for start in range(0, N, COLUMNS):
        within = start + column < N
        values = tl.load(x + row * stride + start + column[None, :], mask=(row < rows) & within[None, :], other=0.0)
        some = tl.zeros([ROWS, EXPERTS], tl.float32)
        for part in tl.static_range(_PARTS):
            weights = parts + ((2 - part) * OF + expert) * N + start + column[:, None]  # the smallest first
            some = tl.dot(values, tl.load(weights, mask=(expert < OF) & within[:, None], other=0.0), some)
        total += some
    tl.store(out + row * OF + expert, total, mask=(row < rows) & (expert < OF))
