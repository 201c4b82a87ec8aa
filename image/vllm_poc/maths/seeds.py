# SPDX-License-Identifier: Apache-2.0
"""Seeds: 32-bit words from the SHA-256 of a text that names round, key, nonce and purpose.

seed(s) = first four bytes of SHA-256(UTF-8(s)), big-endian
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

#: Sub-seeds of the stronger generator: the whole digest instead of its first four bytes.
STRONG_SEEDS = 8


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


def nonce_seeds(block_hash: str, public_key: str, nonce: int, purposes: Sequence[str]) -> list[int]:
    """Return a nonce's seed for each of ``purposes``, such as ``signs`` or ``pick_12``."""
    shared = hashlib.sha256(f"{block_hash}_{public_key}_nonce_{nonce}_".encode())
    seeds = []
    for purpose in purposes:
        digest = shared.copy()
        digest.update(purpose.encode())
        seeds.append(int.from_bytes(digest.digest()[:4], "big"))
    return seeds
