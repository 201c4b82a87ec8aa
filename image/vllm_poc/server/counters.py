# SPDX-License-Identifier: Apache-2.0
"""How far the computation of a round got."""

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from vllm_poc.server.scheduler import Item

#: Status lists the newest valid nonces of a distance round; callbacks carry them all.
LISTED_NONCES = 1_000


@dataclass
class Counters:
    """Progress of a round. Times are seconds of the monotonic clock."""

    next_index: int
    checked: int = 0
    valid: int = 0
    not_finite: int = 0
    sick: int = 0  # nonces not finite since the last slice without any
    newest_valid: deque[Item] = field(default_factory=lambda: deque(maxlen=LISTED_NONCES))
    started: float = field(default_factory=monotonic)
    progressed: float | None = None
    ended: float | None = None

    @property
    def elapsed_seconds(self) -> float:
        """How long the round has run, or ran."""
        return (self.ended or monotonic()) - self.started

    @property
    def rate_per_second(self) -> float:
        """Nonces per second since the start."""
        return self.checked / self.elapsed_seconds if self.checked else 0.0
