# SPDX-License-Identifier: Apache-2.0
"""What seeds give: uniform and normal numbers, a nonce's inputs, unit vectors and the reflections along them.

A seed is a 32-bit word of the SHA-256 of a text that names round, key, nonce and purpose:

    seed(s) = first four bytes of SHA-256(UTF-8(s)), big-endian

Numbers come from hashing an index: element j of a vector depends on its seed and j alone. Hashes are exact;
log, cos and sin are the device's float32 functions, so devices differ in the last places. Every function of
seeds is batched over seeds of any shape, written ``S`` below.

A reflection is Householder's, ``x <- x - 2 (v . x) v`` along a unit vector v.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

#: Sub-seeds of the stronger generator: the whole digest instead of its first four bytes.
STRONG_SEEDS = 8
_WORD = 0xFFFF_FFFF
#: Elements hashed at a time. Their int64 and float32 temporaries take about 40 bytes each.
CHUNK_ELEMENTS = 1 << 23
#: Where log would meet zero.
_SMALLEST_UNIFORM = 1e-10


def seed(text: str) -> int:
    """Return the seed of ``text``, an unsigned 32-bit integer."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def strong_seeds(text: str) -> tuple[int, ...]:
    """Return the eight unsigned 32-bit integers of the digest of ``text``; the first is `seed`."""
    return struct.unpack(f">{STRONG_SEEDS}I", hashlib.sha256(text.encode()).digest())


def seed_tensor(texts: Iterable[str], device: torch.device) -> Tensor:
    """Return the seeds of ``texts`` as int64 ``[len(texts)]`` on ``device``."""
    return torch.tensor([seed(text) for text in texts], dtype=torch.int64, device=device)


def input_seeds(block_hash: str, public_key: str, nonce: int, *, strong_rng: bool) -> tuple[int, ...]:
    """Return the seed of a nonce's inputs, or its eight sub-seeds for the stronger generator."""
    text = f"{block_hash}_{public_key}_nonce{nonce}"  # no underscore precedes the number here
    return strong_seeds(text) if strong_rng else (seed(text),)


def token_seed(block_hash: str, public_key: str, nonce: int) -> int:
    """Return the seed of a nonce's token ids, for models that choose experts by token id."""
    return seed(f"{block_hash}_{public_key}_nonce{nonce}_input_ids")


def nonce_seeds(block_hash: str, public_key: str, nonce: int, purposes: Sequence[str]) -> list[int]:
    """Return a nonce's seed for each of ``purposes``, such as ``signs`` or ``pick_12``."""
    shared = hashlib.sha256(f"{block_hash}_{public_key}_nonce_{nonce}_".encode())
    seeds = []
    for purpose in purposes:
        digest = shared.copy()
        digest.update(purpose.encode())
        seeds.append(int.from_bytes(digest.digest()[:4], "big"))
    return seeds


def token_ids(seeds: Tensor, seq_len: int, vocabulary: int) -> Tensor:
    """Return the token ids int32 ``S + [seq_len]`` for `token_seed` s: the hash of each position modulo ``vocabulary``.

    ``seeds`` is int64 ``S``.
    """
    return hashes(seeds, seq_len).remainder_(vocabulary).to(torch.int32)


def fill_inputs(out: Tensor, seeds: Tensor) -> None:
    """Write the embeddings of the nonces with these `input_seeds` into ``out``, row-major.

    ``out`` is contiguous ``[batch, seq_len, hidden]`` of any float type; ``seeds`` is int64 ``[batch, 1]``, or
    ``[batch, 8]`` for the stronger generator.
    """
    rows = out.view(len(out), -1)
    if seeds.shape[1] == STRONG_SEEDS:
        fill_from_strong_seeds(rows, seeds)
    else:
        fill_normal(rows, seeds[:, 0])


def fill_from_strong_seeds(rows: Tensor, seeds: Tensor) -> None:
    """Fill ``rows`` ``[batch, n]`` from sub-seeds int64 ``[batch, 8]``.

    With L = ceil(n/8), segment k is the normal vector of length min(L, n - kL) under sub-seed k;
    the segments are concatenated.
    """
    n = rows.shape[-1]
    length = -(-n // STRONG_SEEDS)
    full = n // length
    fill_normal(rows[:, : full * length].unflatten(1, (full, length)), seeds[:, :full])
    if full * length < n:
        fill_normal(rows[:, full * length :], seeds[:, full])


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
        from vllm_poc.kernels.random_normal import fill_normal as fill_in_one_pass  # noqa: PLC0415 - needs a GPU's Triton

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


def layer_vectors(*, block_hash: str, num_layers: int, hidden: int, device: torch.device) -> Tensor:
    """Return float32 ``[num_layers, hidden]``: the unit vector that reflects each decoder layer's output.

    Layer i has the seed text ``{block_hash}_layer_{i}_householder``.
    """
    texts = (f"{block_hash}_layer_{layer}_householder" for layer in range(num_layers))
    return unit_normal(seed_tensor(texts, device), hidden)


def reflect(x: Tensor, v: Tensor) -> Tensor:
    """Return ``x - 2 (v . x) v`` over the last axis, computed in the dtype of ``x``.

    ``x`` is ``[..., hidden]``; ``v`` is a unit vector ``[hidden]``, or one for each row.
    """
    v = v.to(x.dtype)
    return x - 2 * (x * v).sum(dim=-1, keepdim=True) * v


def reflect_chain(x: Tensor, vectors: Tensor) -> Tensor:
    """Reflect row b of ``x`` ``[batch, n]`` along ``vectors[b, 0]``, then ``vectors[b, 1]``, and so on.

    ``vectors`` is ``[batch, count, n]``.
    """
    for v in vectors.unbind(dim=1):
        x = reflect(x, v)
    return x


def normalise(x: Tensor) -> Tensor:
    """Return ``x / (|x| + 1e-8)`` over the last axis as float32."""
    x = x.to(torch.float32)
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)
