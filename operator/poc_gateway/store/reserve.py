# SPDX-License-Identifier: Apache-2.0
"""What is left to do when the disk is full: everything that takes no room, and room for that.

::

    has room ── a write finds the disk full ──> full: nothing new is stored, the reserve is given to the rest
       ^                                          │
       └── as much is free as the reserve had ────┘

SQLite needs room for a deletion too. So a file beside the database is kept as large as such writes may need, and is
emptied when the disk is full. PostgreSQL keeps its files elsewhere: there a write is tried from time to time.
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from sqlalchemy.engine import make_url

_log = logging.getLogger(__name__)

#: Seconds between two looks for room.
LOOK_SECONDS = 1.0
#: Seconds between two tries to store something where the room cannot be seen.
TRY_SECONDS = 5.0
#: So much must be free beside the reserve before something new is stored, so that it is not full again at once.
_MARGIN_BYTES = 2**20
#: With less than this no transaction fits.
_LITTLE_BYTES = 2**16


class Reserve:
    """A file that takes ``size`` bytes, so that they can be given back."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    def fill(self) -> bool:
        """Take the room; return whether there is enough, also for what is to be stored then."""
        try:
            if self._missing() + _MARGIN_BYTES > self.free():
                return False
            with self._path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError as error:
            _log.warning("the reserve %s cannot be made: %s", self._path, error)
            self.release()
            return False
        return True

    def release(self) -> bool:
        """Give the room back; return whether there was any."""
        with contextlib.suppress(OSError):
            had = self._path.stat().st_blocks > 0
            os.truncate(self._path, 0)
            return had
        return False

    def _missing(self) -> int:
        try:
            return max(0, self._size - self._path.stat().st_blocks * 512)
        except FileNotFoundError:
            return self._size

    def free(self) -> int:
        """Return the bytes that are left of the disk."""
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize


class Room:
    """Whether something new may be stored. Used by several threads."""

    def __init__(self, reserve: Reserve | None) -> None:
        self.full = False
        self._reserve = reserve
        self._lock = threading.Lock()
        self._looked = float("-inf")

    @classmethod
    def beside(cls, url: str, size: int) -> "Room":
        """Return the room of a database. It begins without a reserve."""
        parsed = make_url(url)
        of_file = parsed.get_backend_name() == "sqlite" and parsed.database not in {None, "", ":memory:"} and size
        return cls(Reserve(Path(f"{parsed.database}-reserve"), size) if of_file else None)

    def begin(self) -> None:
        """Take the reserve; the disk is full if it cannot be had."""
        if self._reserve is not None and not self._reserve.fill():
            self.ran_out()

    def ran_out(self) -> bool:
        """Learn that the disk is full; return whether there is more room now for what must go on."""
        with self._lock:
            if not self.full:
                _log.error("the disk is full: nothing new is stored until there is room; forwarding and deleting go on")
            self.full = True
            self._looked = time.monotonic()
            return self._reserve is not None and self._reserve.release()

    def nothing_left(self) -> bool:
        """Return whether the disk is full and nobody has noticed: not every failure of SQLite says why."""
        if self._reserve is None or self.full:
            return False
        try:
            return self._reserve.free() < _LITTLE_BYTES
        except OSError as error:  # the volume is gone, say: that is another failure, which SQLite tells of
            _log.warning("the room on the disk cannot be known: %s", error)
            return False

    def admits(self) -> bool:
        """Return whether something new may be stored, or may be tried."""
        if not self.full:
            return True
        with self._lock:
            pause = TRY_SECONDS if self._reserve is None else LOOK_SECONDS
            if time.monotonic() - self._looked < pause:
                return not self.full
            self._looked = time.monotonic()
            if self._reserve is None:
                return True
            if self._reserve.fill():
                self._found()
            return not self.full

    def stored(self) -> None:
        """Learn that something new was stored."""
        if self.full and self._reserve is None:
            with self._lock:
                self._found()

    def _found(self) -> None:
        self.full = False
        _log.info("the disk has room again")
