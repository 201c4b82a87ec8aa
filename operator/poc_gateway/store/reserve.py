# SPDX-License-Identifier: Apache-2.0
"""How much room the database takes, and what is left to do when the disk is full: all that needs no room, and some.

::

    has room ── a write finds the disk full ──> full: nothing new is stored, the reserve is given to the rest
       ^                                          │
       └── as much is free as the reserve had ────┘

SQLite needs room for a deletion too. So a file beside the database is kept as large as such writes may need, and is
emptied when the disk is full. PostgreSQL keeps its files elsewhere: there a write is tried from time to time.

Deleted rows leave space in the file: `release_free_pages` gives it back to the disk.
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from sqlalchemy import Connection, func, select, text
from sqlalchemy.engine import make_url

from poc_gateway.store import schema

_log = logging.getLogger(__name__)

#: Seconds between two looks for room.
LOOK_SECONDS = 1.0
#: Seconds between two tries to store something where the room cannot be seen.
TRY_SECONDS = 5.0
#: So much must be free beside the reserve before something new is stored, so that it is not full again at once.
_MARGIN_BYTES = 2**20
#: With less than this no transaction fits.
_LITTLE_BYTES = 2**16
#: Pages that one step gives back: 4 MiB, in some milliseconds.
VACUUM_PAGES = 1_000
#: What PostgreSQL takes for an artifact and its key in the index, beside the vector or distance itself.
_ROW_BYTES = 85
_DISTANCE_BYTES = 8


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
    """Whether something new may be stored. Used by several threads. ``folder`` has the database, if it is a file."""

    def __init__(self, reserve: Reserve | None, folder: Path | None = None) -> None:
        self.full = False
        self._reserve = reserve
        self._folder = folder
        self._lock = threading.Lock()
        self._looked = float("-inf")

    @classmethod
    def beside(cls, url: str, size: int) -> "Room":
        """Return the room of a database. It begins without a reserve."""
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite" or parsed.database in {None, "", ":memory:"}:
            return cls(None)
        folder = Path(str(parsed.database)).absolute().parent
        return cls(Reserve(Path(f"{parsed.database}-reserve"), size) if size else None, folder)

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

    @property
    def has_volume(self) -> bool:
        """Whether the database is a file on a volume."""
        return self._folder is not None

    def volume_bytes(self) -> int | None:
        """Return the size of the database's volume; None if it has none, as PostgreSQL, or cannot be asked."""
        disk = self._disk()
        return None if disk is None else disk.f_blocks * disk.f_frsize

    def volume_free_bytes(self) -> int | None:
        """Return what is left of the database's volume; None where its size is None."""
        disk = self._disk()
        return None if disk is None else disk.f_bavail * disk.f_frsize

    def _disk(self) -> os.statvfs_result | None:
        if self._folder is None:
            return None
        try:
            return os.statvfs(self._folder)
        except OSError as error:
            _log.warning("the size of the volume cannot be known: %s", error)
            return None


def result_bytes(value_bytes: int | None) -> int:
    """Return about how many bytes one result takes: a vector or a chain of ``value_bytes``, or a distance."""
    return _ROW_BYTES + (_DISTANCE_BYTES if value_bytes is None else value_bytes)


def size_bytes(connection: Connection) -> int:
    """Return the size of the database, with the space that deleted rows have left."""
    if connection.dialect.name == "sqlite":
        return _pragma(connection, "page_count") * _pragma(connection, "page_size")
    return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())


def used_bytes(connection: Connection) -> int:
    """Return what the rows take, which is less after some are deleted."""
    if connection.dialect.name == "sqlite":
        pages = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
        return pages * _pragma(connection, "page_size")
    # A table of PostgreSQL keeps the space of deleted rows for new ones, so that its size says nothing of its rows.
    slots, rounds = schema.slots, schema.rounds
    value = func.coalesce(rounds.c.max_tokens + 1, schema.BYTES_PER_NUMBER * rounds.c.k_dim, _DISTANCE_BYTES)
    each = _ROW_BYTES + value
    rows = slots.join(rounds, rounds.c.id == slots.c.round_id)
    return int(connection.scalar(select(func.sum(slots.c.stored * each)).select_from(rows)) or 0)


def release_free_pages(connection: Connection) -> bool:
    """Give some of the free space back to the disk; return whether there is more. PostgreSQL does so itself."""
    if connection.dialect.name != "sqlite" or not (before := _pragma(connection, "freelist_count")):
        return False
    # It frees a page whenever it is asked for a row, and has no columns: SQLAlchemy would not ask.
    connection.connection.cursor().execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    # A file that cannot shrink has as much as before, and would for ever.
    return 0 < _pragma(connection, "freelist_count") < before


def cannot_shrink(connection: Connection) -> bool:
    """Whether the file cannot give space back: it had a table before the gateway's first, or comes from a dump."""
    return connection.dialect.name == "sqlite" and not _pragma(connection, "auto_vacuum")


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
