# SPDX-License-Identifier: Apache-2.0
"""When a planned status is written: at once, unless only counters moved since it was written a moment ago.

A write for every look at every round would be most of the API server's work. What is held back is lost with the
process, and the next one asks the pods anyway.
"""

from collections.abc import Callable

from poc_operator.model.round import Round
from poc_operator.model.status import RoundStatus
from poc_operator.store.rounds import RoundStore

#: Seconds between two writes of a status in which only counters moved.
COUNTERS_SECONDS = 5.0


class StatusRecorder:
    """Writes the status of one round. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, store: RoundStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._written = float("-inf")
        # The status that was held back, with the stored one that it is to replace.
        self._held: tuple[RoundStatus, RoundStatus] | None = None

    def newest(self, stored: Round) -> Round:
        """Return the round with the status that was held back, unless somebody has written another one since."""
        if self._held is None or self._held[0] != stored.status:
            return stored
        return stored.model_copy(update={"status": self._held[1]})

    async def record(self, stored: Round, status: RoundStatus) -> None:
        """Write the status, or hold it back. Errors as from `RoundStore.write_status`."""
        if status == stored.status:
            self._held = None
            return
        fresh = self._clock() - self._written < COUNTERS_SECONDS
        if fresh and status.without_counters() == stored.status.without_counters():
            self._held = stored.status, status
            return
        await self._store.write_status(stored, status)
        self._written, self._held = self._clock(), None
