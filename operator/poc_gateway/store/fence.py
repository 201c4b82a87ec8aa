# SPDX-License-Identifier: Apache-2.0
"""One process owns a database.

The owner holds a lock that ends with its process: of a file beside SQLite's, or of a session of PostgreSQL. The second
can end while the process lives on: the server ends a session that it has not heard of for a while, since its process
may hang. So an owner counts up an epoch in the database, and each of its commits checks that it is still its own
(`poc_gateway.store.database`). What no commit can check, such as a post, an owner does only while it has seen its lock
a moment ago, and the next owner waits for as long.
"""

import fcntl
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import psycopg
from sqlalchemy import Connection, select, text, update
from sqlalchemy.engine import make_url

from poc_gateway.store import schema
from poc_gateway.store.engine import (
    APPLICATION,
    WAIT_SECONDS,
    BoundedConnection,
    DatabaseAway,
    DatabaseUnavailable,
    create_engine,
)

_log = logging.getLogger(__name__)

#: Seconds between two looks at the lock, by its owner and by those who stand by.
LOOK_SECONDS = 1.0
#: An owner that saw its lock within this time has it, as far as a post is concerned. The next owner waits for as long
#: before its first one, unless the last has ended in order.
CERTAIN_SECONDS = 3.0
#: A process hangs whose session PostgreSQL has not heard of for so long.
HUNG_SECONDS = 10
#: The lock's key in PostgreSQL; any number that no other program takes.
_KEY = 0x706F_635F_6777
#: A server that cannot reach its client must end the session soon, since the lock ends with it.
_SESSION = (
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
    f"SET idle_session_timeout = {HUNG_SECONDS * 1000}",
    f"SET application_name = '{APPLICATION}-owner'",
)
#: Sessions that wait for their process in the middle of a transaction that writes or locks (`backend_xid`): others wait
#: for what it has locked. The timeouts of PostgreSQL do not end one that was stopped in a COPY.
_END_HUNG = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND "
    "usename = current_user AND application_name = :name AND pid <> pg_backend_pid() AND backend_xid IS NOT NULL "
    "AND wait_event = 'ClientRead' AND state_change < clock_timestamp() - make_interval(secs => :seconds)"
)


class Fence(Protocol):
    """The lock of one database. Its methods wait for files and servers: call them in a thread."""

    def take(self) -> bool:
        """Return whether the lock is ours now. DatabaseAway if the server does not answer, else DatabaseUnavailable."""

    def holds(self) -> bool:
        """Look whether the lock is still ours."""

    @property
    def is_taken(self) -> bool:
        """Whether the lock was ours at the last look."""

    @property
    def is_certain(self) -> bool:
        """Whether the lock is ours, and nobody else does yet what an owner does."""

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

    @property
    def is_taken(self) -> bool:  # noqa: D102 - of Fence
        return self._file is not None

    @property
    def is_certain(self) -> bool:  # noqa: D102 - of Fence
        return self._file is not None

    def close(self) -> None:  # noqa: D102 - of Fence
        if self._file is not None:
            self._file.close()
            self._file = None


class SessionFence:
    """An advisory lock of PostgreSQL, on a connection of its own, which waits for the lock as well."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: BoundedConnection | None = None
        self._is_taken = False
        self._seen = float("-inf")

    def take(self) -> bool:  # noqa: D102 - of Fence
        if self._is_taken and self.holds():
            return True
        try:
            connection = self._connection or self._connected()
            moment = _moment()
            row: Any = connection.execute("SELECT pg_try_advisory_lock(%s)", (_KEY,)).fetchone()
        except psycopg.Error as error:
            self.close()
            raise DatabaseAway(f"the database is away ({str(error).strip()})") from error
        self._is_taken, self._seen = bool(row[0]), moment
        return self._is_taken

    def holds(self) -> bool:  # noqa: D102 - of Fence
        if self._connection is None or not self._is_taken:
            return False
        moment = _moment()
        try:
            self._connection.execute("SELECT 1")
        except psycopg.Error as error:
            _log.warning("the connection that holds the database's lock is lost: %s", str(error).strip())
            self.close()
            return False
        self._seen = moment
        return True

    @property
    def is_taken(self) -> bool:  # noqa: D102 - of Fence
        return self._is_taken

    @property
    def is_certain(self) -> bool:  # noqa: D102 - of Fence
        return self._is_taken and _moment() - self._seen < CERTAIN_SECONDS

    def close(self) -> None:  # noqa: D102 - of Fence
        self._is_taken = False
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _connected(self) -> BoundedConnection:
        self._connection = BoundedConnection.connect(self._url, autocommit=True, connect_timeout=int(WAIT_SECONDS))
        self._connection.seconds = WAIT_SECONDS
        for setting in _SESSION:
            self._connection.execute(setting)
        return self._connection


def epoch(connection: Connection) -> int:
    """Return the epoch, which nobody changes until the transaction ends."""
    query = select(schema.fence.c.epoch)
    if connection.dialect.name == "postgresql":
        query = query.with_for_update(read=True)
    return int(connection.execute(query).scalar_one())


def next_epoch(connection: Connection) -> int:
    """Count the epoch up, and return the new one."""
    values = {"epoch": schema.fence.c.epoch + 1, "given_up": 0}
    counted = update(schema.fence).values(values).returning(schema.fence.c.epoch)
    return int(connection.execute(counted).scalar_one())


def is_given_up(connection: Connection) -> bool:
    """Return whether the last owner has ended in order; that stays so until the transaction ends."""
    return bool(connection.execute(select(schema.fence.c.given_up).with_for_update()).scalar_one())


def give_up(connection: Connection) -> None:
    """Write down that the owner ends in order, and that nothing of it is on its way."""
    connection.execute(update(schema.fence).values(given_up=1))


def end_hung_sessions(connection: Connection) -> None:
    """End the sessions of gateways that hang in a transaction, so that nobody waits for what these have locked."""
    if connection.dialect.name == "postgresql":
        ended = connection.execute(_END_HUNG, {"name": APPLICATION, "seconds": HUNG_SECONDS}).all()
        if ended:
            _log.warning("%d transactions of gateways that hang were ended", len(ended))


def _moment() -> float:
    # Of a clock that goes on while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
