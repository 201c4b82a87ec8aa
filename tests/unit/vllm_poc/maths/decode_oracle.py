# SPDX-License-Identifier: Apache-2.0
"""The decode scheme's formulas once more in plain Python and double precision, for one nonce at a time."""

import hashlib
import math
from collections.abc import Sequence

WORD = 2**32


def text_seed(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def _rotated(word: int, bits: int) -> int:
    return (word << bits) % WORD + (word >> (32 - bits))


def murmur(key: int, seed: int) -> int:
    mixed = _rotated(key * 0xCC9E2D51 % WORD, 15) * 0x1B873593 % WORD
    state = (_rotated(seed ^ mixed, 13) * 5 + 0xE6546B64) % WORD
    state = (state ^ (state // 2**16)) * 0x85EBCA6B % WORD
    state = (state ^ (state // 2**13)) * 0xC2B2AE35 % WORD
    return state ^ (state // 2**16)


def step_seed(base: int, previous: int, step: int, salt: int) -> int:
    return murmur((previous % WORD * 0x9E3779B1 + step * 0x85EBCA77 + salt) % WORD, base)


def picks_in_hash_order(seed: int, hidden: int) -> list[int]:
    return sorted(range(hidden), key=lambda index: murmur(index, seed))[:256]


def unit(vector: Sequence[float]) -> list[float]:
    length = math.sqrt(math.fsum(value * value for value in vector)) + 1e-8
    return [value / length for value in vector]


def scores(hidden_state: Sequence[float], picks: Sequence[int], codebook: Sequence[Sequence[float]]) -> list[float]:
    whole = unit(hidden_state)
    query = unit([whole[index] for index in picks])
    return [math.fsum(a * b for a, b in zip(query, point, strict=True)) for point in codebook]


def route_logits(start: int, experts: int, top_k: int) -> list[int]:
    logits = [-10_000] * experts
    for rank in range(top_k):
        logits[(start + rank) % experts] = 100 + top_k - rank
    return logits
