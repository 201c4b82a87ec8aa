# SPDX-License-Identifier: Apache-2.0
"""One process owns a database: the others stand by.

The owner holds a lock that ends with its process: of a file beside SQLite's, or of a connection to PostgreSQL. The
second can end while the process lives on. So every owner also counts up an epoch in the database, and each of its
commits checks that it is still its own (`poc_gateway.store.database`).
"""

import fcntl
import logging
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import psycopg
from sqlalchemy import Connection, select, update
from sqlalchemy.engine import make_url

from poc_gateway.store import schema
from poc_gateway.store.engine import WAIT_SECONDS, BoundedConnection, DatabaseAway, DatabaseUnavailable, create_engine

_log = logging.getLogger(__name__)

#: Seconds between two looks at the lock, by its owner and by those who stand by.
LOOK_SECONDS = 1.0
#: The lock's key in PostgreSQL; any number that no other program takes.
_KEY = 0x706F_635F_6777
#: A server that cannot reach its client must end the session soon, since the lock ends with it.
_SESSION = (
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
)


class Fence(Protocol):
    """The lock of one database. Its methods wait for files and servers: call them in a thread."""

    def take(self) -> bool:
        """Return whether the lock is ours now. DatabaseAway if the server does not answer, else DatabaseUnavailable."""

    def holds(self) -> bool:
        """Return whether the lock is still ours."""

    def close(self) -> None:
        """Give the lock back."""


def fence_of(url: str) -> Fence:
    """Return the fence of the database at ``url``; ValueError if it is none that we know."""
    create_engine(url).dispose()  # which refuses other databases
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return FileFence(Path(f"{parsed.database}-lock"))
    libpq = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    return SessionFence(libpq)


class FileFence:
    """A lock of a file. It ends with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def take(self) -> bool:  # noqa: D102 - of Fence
        if self._file is not None:
            return True
        try:
            file = self._path.open("ab")
        except OSError as error:
            raise DatabaseUnavailable(f"unable to open database file: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    def holds(self) -> bool:  # noqa: D102 - of Fence
        return self._file is not None

    def close(self) -> None:  # noqa: D102 - of Fence
        if self._file is not None:
            self._file.close()
            self._file = None


class SessionFence:
    """An advisory lock of PostgreSQL, on a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: BoundedConnection | None = None

    def take(self) -> bool:  # noqa: D102 - of Fence
        if self._connection is not None and self.holds():
            return True
        try:
            connection = BoundedConnection.connect(self._url, autocommit=True, connect_timeout=int(WAIT_SECONDS))
            connection.seconds = WAIT_SECONDS
            for setting in _SESSION:
                connection.execute(setting)
            row: Any = connection.execute("SELECT pg_try_advisory_lock(%s)", (_KEY,)).fetchone()
        except psycopg.Error as error:
            raise DatabaseAway(f"the database is away ({str(error).strip()})") from error
        if row[0]:
            self._connection = connection
        else:
            connection.close()
        return bool(row[0])

    def holds(self) -> bool:  # noqa: D102 - of Fence
        if self._connection is None:
            return False
        try:
            self._connection.execute("SELECT 1")
        except psycopg.Error as error:
            _log.warning("the connection that holds the database's lock is lost: %s", str(error).strip())
            self.close()
            return False
        return True

    def close(self) -> None:  # noqa: D102 - of Fence
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


def epoch(connection: Connection) -> int:
    """Return the epoch, which nobody changes until the transaction ends."""
    query = select(schema.fence.c.epoch)
    if connection.dialect.name == "postgresql":
        query = query.with_for_update(read=True)
    return int(connection.execute(query).scalar_one())


def next_epoch(connection: Connection) -> int:
    """Count the epoch up, and return the new one."""
    counted = update(schema.fence).values(epoch=schema.fence.c.epoch + 1).returning(schema.fence.c.epoch)
    return int(connection.execute(counted).scalar_one())
