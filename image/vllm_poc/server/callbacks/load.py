# SPDX-License-Identifier: Apache-2.0
"""How much waits for delivery. It is bounded in results, and in bytes: a long vector is a result of many kilobytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_poc.server.settings import Settings

#: Bytes that a number takes in memory.
_NUMBER_BYTES = 32


@dataclass(frozen=True)
class Load:
    """Results, and about how many bytes of memory they take."""

    results: int = 0
    bytes: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.results + other.results, self.bytes + other.bytes)

    def __sub__(self, other: "Load") -> "Load":
        return Load(self.results - other.results, self.bytes - other.bytes)

    def is_full(self, settings: Settings) -> bool:
        """Whether more has to wait."""
        return self.results >= settings.pending_results or self.bytes >= settings.pending_bytes


def load_of(items: Sequence[object]) -> Load:
    """Return the load of results or verdicts; of nothing it has one result, since the place in a queue counts too."""
    return Load(max(1, len(items)), sum(_bytes_of(item) for item in items))


def _bytes_of(item: object) -> int:
    if isinstance(item, tuple):  # the nonce, and a distance or the vector in base64
        _, value = item
        return len(value) if isinstance(value, str) else _NUMBER_BYTES
    return sum(_NUMBER_BYTES * len(field) for field in vars(item).values() if isinstance(field, list))
