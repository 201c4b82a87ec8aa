# SPDX-License-Identifier: Apache-2.0
"""Seeds: 32-bit words from the SHA-256 of a text that names round, key, nonce and purpose.

seed(s) = first four bytes of SHA-256(UTF-8(s)), big-endian
"""

import hashlib
import struct
from collections.abc import Iterable

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


def strong_seed_tensor(texts: Iterable[str], device: torch.device) -> Tensor:
    """Return the sub-seeds of ``texts`` as int64 ``[len(texts), 8]`` on ``device``."""
    return torch.tensor([strong_seeds(text) for text in texts], dtype=torch.int64, device=device)


def input_text(block_hash: str, public_key: str, nonce: int) -> str:
    """Return the text whose seed gives a nonce's inputs. No underscore precedes the number here."""
    return f"{block_hash}_{public_key}_nonce{nonce}"


def nonce_text(block_hash: str, public_key: str, nonce: int, purpose: str) -> str:
    """Return the text whose seed gives a nonce's ``purpose``, such as ``signs`` or ``pick_12``."""
    return f"{block_hash}_{public_key}_nonce_{nonce}_{purpose}"
