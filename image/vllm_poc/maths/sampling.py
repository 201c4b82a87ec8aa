# SPDX-License-Identifier: Apache-2.0
"""Random numbers by hashing an index: element j of a vector depends on its seed and j alone.

Hashes are exact; log, cos and sin are the device's float32 functions, so devices differ in the
last places. Every function is batched over seeds of any shape, written ``S`` below.
"""

import math

import torch
from torch import Tensor

_WORD = 0xFFFF_FFFF
#: Elements hashed at a time. Their int64 and float32 temporaries take about 40 bytes each.
CHUNK_ELEMENTS = 1 << 23
#: Where log would meet zero.
_SMALLEST_UNIFORM = 1e-10


def murmur(seeds: Tensor, keys: Tensor) -> Tensor:
    """Return MurmurHash3-x86-32 of one-word keys, without the xor of the length.

    ``seeds`` int64 ``S``, ``keys`` int64 ``[n]``, both in 0..2^32-1. Returns int64 ``S + [n]`` in
    0..2^32-1. For a fixed seed the map is one-to-one, so hashes never tie.
    """
    # int64 products wrap modulo 2^64, which leaves the low 32 bits right.
    mixed = _rotate_left((keys * 0xCC9E2D51) & _WORD, 15)
    mixed = (mixed * 0x1B873593) & _WORD
    hashes = _rotate_left(seeds.unsqueeze(-1) ^ mixed, 13)
    hashes.mul_(5).add_(0xE6546B64).bitwise_and_(_WORD)
    return _avalanche(hashes)


def _rotate_left(words: Tensor, bits: int) -> Tensor:
    high = (words << bits).bitwise_and_(_WORD)
    return high.bitwise_or_(words >> (32 - bits))


def _avalanche(hashes: Tensor) -> Tensor:
    hashes.bitwise_xor_(hashes >> 16).mul_(0x85EBCA6B).bitwise_and_(_WORD)
    hashes.bitwise_xor_(hashes >> 13).mul_(0xC2B2AE35).bitwise_and_(_WORD)
    return hashes.bitwise_xor_(hashes >> 16)


def hashes(seeds: Tensor, n: int) -> Tensor:
    """Return the hashes of the indices 0..n-1: int64 ``S + [n]``."""
    return murmur(seeds, torch.arange(n, device=seeds.device))


def uniform(seeds: Tensor, n: int) -> Tensor:
    """Return float32 ``S + [n]``: u_j = float32(hash(j)) / 2^32. Rounding can give exactly 1."""
    return _to_unit_interval(hashes(seeds, n))


def normal(seeds: Tensor, n: int) -> Tensor:
    """Return float32 ``S + [n]`` of standard normal numbers; see `fill_normal`."""
    out = torch.empty((*seeds.shape, n), dtype=torch.float32, device=seeds.device)
    fill_normal(out, seeds)
    return out


def unit_normal(seeds: Tensor, n: int) -> Tensor:
    """Return float32 ``S + [n]``: the normal vector over its length."""
    vectors = normal(seeds, n)
    return vectors.div_(vectors.norm(dim=-1, keepdim=True))


def fill_normal(out: Tensor, seeds: Tensor) -> None:
    """Fill ``out`` (``S + [n]``, any float type) with standard normal numbers by Box and Muller.

    With p = ceil(n/2), u the uniforms of 2p indices, a = max(u[:p], 1e-10) and b = u[p:], the
    vector is ``concat(sqrt(-2 ln a) cos(2 pi b), sqrt(-2 ln a) sin(2 pi b))`` cut to n. So vectors
    of different length are not prefixes of each other.
    """
    if out.is_cuda:
        from vllm_poc.kernels.normal import fill_normal as fill_in_one_pass  # noqa: PLC0415 - needs a GPU's Triton

        fill_in_one_pass(out, seeds)
    else:
        fill_stepwise(out, seeds)


def fill_stepwise(out: Tensor, seeds: Tensor) -> None:
    """Do the same by PyTorch's operations, on any device."""
    half = (out.shape[-1] + 1) // 2
    step = max(1, CHUNK_ELEMENTS // (2 * max(1, seeds.numel())))
    for start in range(0, half, step):
        _fill_pairs(out, seeds, start, min(start + step, half), half)


def _fill_pairs(out: Tensor, seeds: Tensor, start: int, stop: int, half: int) -> None:
    keys = torch.arange(start, stop, device=seeds.device)
    radius = _to_unit_interval(murmur(seeds, keys)).clamp_(min=_SMALLEST_UNIFORM)
    radius = radius.log_().mul_(-2.0).sqrt_()
    angle = _to_unit_interval(murmur(seeds, keys + half)).mul_(2.0 * math.pi)
    out[..., start:stop] = radius * angle.cos()
    sines = out[..., half + start : half + stop]  # one short at the end of an odd length
    sines.copy_(radius.mul_(angle.sin_())[..., : sines.shape[-1]])


def _to_unit_interval(words: Tensor) -> Tensor:
    return words.to(torch.float32).mul_(2.0**-32)
