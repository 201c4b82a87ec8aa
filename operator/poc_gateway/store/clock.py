# SPDX-License-Identifier: Apache-2.0
"""Whether the wall clock can be trusted with a deletion.

What is deleted or expires for its age is found by moments of the wall clock. A clock that was set, by hand or by a
machine whose battery failed, makes young rows old. So it is compared with a clock that nobody sets, and with the moment
that an earlier process has written down. After a step nothing happens until it has run evenly for long enough.
"""

import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection, delete, insert, select

from poc_gateway.store import schema
from poc_gateway.store.database import Database

_log = logging.getLogger(__name__)

#: The two clocks may differ by this between two looks: what is smoothed, or a machine that was suspended for a moment.
TOLERANCE_SECONDS = 60.0
#: A gateway that was off for longer cannot tell that from a clock that was set forward.
MOST_AWAY_SECONDS = 86_400.0
#: The clock is written down this often.
WRITE_SECONDS = 60.0
#: A database that is new has nothing that could be deleted by mistake. One that was migrated is not new.
_FOR_EVER = 100 * 365 * 86_400.0


class Clock:
    """The wall clock of this process, and for how long it has run evenly."""

    def __init__(
        self,
        database: Database,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._wall, self._monotonic = wall, monotonic
        self._last: tuple[float, float] | None = None
        self._steady = 0.0
        self._written = float("-inf")

    async def is_steady(self, seconds: float) -> bool:
        """Compare the clocks; return whether no step was seen for so long. DatabaseError if the database fails."""
        wall, monotonic = self._wall(), self._monotonic()
        if self._last is None:
            stepped = await self._begin(wall)
        else:
            before, passed = self._last[0], monotonic - self._last[1]
            stepped = self._step(wall - before - passed, TOLERANCE_SECONDS, -TOLERANCE_SECONDS)
            self._steady = 0.0 if stepped else self._steady + passed
        self._last = wall, monotonic
        if stepped or monotonic - self._written >= WRITE_SECONDS:
            row = {"id": 1, "seen_at": int(wall * 1000), "steady": int(self._steady * 1000)}
            await self._database.write(lambda connection: _write(connection, row))
            self._written = monotonic
        return self._steady >= seconds

    async def _begin(self, wall: float) -> bool:
        """Go on from what was written down; return whether the clock has stepped since."""
        row = await self._database.read(lambda connection: connection.execute(select(schema.clock)).first())
        if row is None:
            self._steady = _FOR_EVER
            return False
        away = wall - row.seen_at / 1000
        stepped = self._step(away, MOST_AWAY_SECONDS, -TOLERANCE_SECONDS)
        self._steady = 0.0 if stepped else row.steady / 1000 + max(away, 0.0)
        return stepped

    def _step(self, seconds: float, most: float, least: float) -> bool:
        if least <= seconds <= most:
            return False
        _log.error(
            "the clock moved by %.0f s: nothing is deleted or expires until it has run evenly for a while; "
            "correct the clock if it is wrong",
            seconds,
        )
        return True


def _write(connection: Connection, row: dict[str, int]) -> None:
    connection.execute(delete(schema.clock))
    connection.execute(insert(schema.clock).values(row))
