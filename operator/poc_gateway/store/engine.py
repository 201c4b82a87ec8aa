# SPDX-License-Identifier: Apache-2.0
"""The connection to SQLite or PostgreSQL, with the settings that make a commit durable, and what can go wrong with it.

DatabaseError
 ├── DatabaseFull         its disk or its limit is full: nothing was stored
 └── DatabaseUnavailable  it is locked by another process, or refuses: try again later
      └── DatabaseAway    it does not answer: neither would it to anything else
"""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import sqlalchemy
from psycopg.abc import PQGen
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

Result = TypeVar("Result")

#: Seconds that a connection waits for a database that is locked, or to be made.
WAIT_SECONDS = 5.0
#: Seconds that one statement of PostgreSQL may take; everything that runs beside deliveries is far quicker.
STATEMENT_SECONDS = 8.0
#: Pages of 4 KiB that each connection keeps: 16 MiB.
_CACHE_KIB = 16 * 1024
#: What sessions of PostgreSQL are called, so that those of a process that hangs can be found.
APPLICATION = "poc-gateway"
#: So that a PostgreSQL whose machine is gone is noticed, also by connections that are not in use.
_POSTGRESQL: dict[str, Any] = {
    "connect_timeout": int(WAIT_SECONDS),
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 8_000,
}
#: Deadlocks, transactions that cannot be put in an order, and rows that another transaction made or deleted meanwhile.
_CONFLICTS = frozenset({"40P01", "40001", "23505", "23503"})
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    f"cache_size=-{_CACHE_KIB}",
    f"busy_timeout={int(WAIT_SECONDS * 1000)}",
)


class DatabaseError(Exception):
    """A read or a write failed, and has changed nothing."""


class DatabaseFull(DatabaseError):  # noqa: N818 - reads as a state
    """There is no room for more."""


class DatabaseUnavailable(DatabaseError):  # noqa: N818
    """The database cannot be used at the moment."""


class DatabaseAway(DatabaseUnavailable):
    """There is no connection to the database, or it has not answered in time."""


def create_engine(url: str, *, statement_seconds: float = STATEMENT_SECONDS) -> Engine:
    """Return an engine for ``sqlite:///PATH`` or ``postgresql://USER:PASSWORD@HOST/NAME``; ValueError for others.

    A statement of PostgreSQL that takes longer than ``statement_seconds`` fails, also if it waits for another's lock.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # whose texts have parts of the URL, which may be of its password
        raise ValueError("database is not a URL: use sqlite:////PATH or postgresql://USER:PASSWORD@HOST/NAME") from None
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed)
    if parsed.get_backend_name() == "postgresql":
        return _postgresql(parsed.set(drivername="postgresql+psycopg"), statement_seconds)
    raise ValueError(f"database is of {parsed.get_backend_name()}: only sqlite and postgresql are supported")


def is_missing(url: str) -> bool:
    """Whether the URL names a file of SQLite that is not there: to connect would make it."""
    parsed = make_url(url)
    return parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).is_file()


def is_shared(url: str) -> bool:
    """Return whether several processes may use the database at ``url`` at once; ValueError if it is none we know."""
    engine = create_engine(url)
    engine.dispose()
    return engine.dialect.name == "postgresql"


def _postgresql(url: sqlalchemy.URL, seconds: float) -> Engine:
    arguments = _POSTGRESQL | {
        "options": f"-c statement_timeout={int(seconds * 1000)}",
        "application_name": APPLICATION,
    }
    engine = sqlalchemy.create_engine(url, pool_pre_ping=True, pool_size=8, connect_args=arguments)

    @event.listens_for(engine, "do_connect")
    def connect(_: object, __: object, names: list[Any], values: dict[str, Any]) -> psycopg.Connection[Any]:
        connection = BoundedConnection.connect(*names, **values)
        # A server that was stopped, or whose machine hangs, cannot end a statement itself.
        connection.seconds = seconds + 1
        return connection

    return engine


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that gives its server up when that has not answered for ``seconds``."""

    seconds = STATEMENT_SECONDS

    def wait(self, gen: PQGen[Result], *arguments: Any, **named: Any) -> Result:  # noqa: ANN401 - as the driver has it
        """Wait for the server; OperationalError, and the connection is closed, if that takes too long."""
        return super().wait(_bounded(gen, self.seconds, self.close), *arguments, **named)


def _bounded(gen: PQGen[Result], seconds: float, give_up: Callable[[], None]) -> PQGen[Result]:
    """Pass ``gen`` through. The driver resumes it ten times a second while nothing arrives."""
    deadline = time.monotonic() + seconds
    ready: Any = None
    while True:
        try:
            state = gen.send(ready)
        except StopIteration as end:
            result: Result = end.value
            return result
        ready = yield state
        if time.monotonic() > deadline:
            give_up()
            raise psycopg.OperationalError(f"no answer within {seconds:.0f} s")


def _sqlite(url: sqlalchemy.URL) -> Engine:
    # Transactions are ours: the driver's own begin too late, and keep a read from seeing one state.
    arguments = {"isolation_level": None, "check_same_thread": False}
    engine = sqlalchemy.create_engine(url, connect_args=arguments, pool_size=8)

    @event.listens_for(engine, "connect")
    def set_up(connection: sqlite3.Connection, _: object) -> None:
        # Before the first table is made: afterwards only a VACUUM could change it. To set it again is a write, which
        # would fail the writer's transaction if that has only read so far.
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:  # noqa: ANN401 - SQLAlchemy's Connection
        connection.exec_driver_sql("BEGIN")

    return engine


def translated(error: Exception) -> Exception:
    """Return our error for the driver's where a caller can do something about it, else ``error`` itself."""
    if isinstance(error, PoolTimeout):
        return DatabaseUnavailable("every connection to the database is in use")
    # COPY is the driver's own, whose errors SQLAlchemy does not see.
    cause = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(cause, sqlite3.Error | psycopg.Error):
        return error
    text = str(cause).strip()
    if isinstance(cause, psycopg.errors.DiskFull) or _is_full_sqlite(cause):
        return DatabaseFull(f"the database's disk is full ({text}): free space or lower the retention")
    if isinstance(cause, psycopg.OperationalError) and _is_away(cause):
        return DatabaseAway(f"the database is away ({text})")
    if isinstance(cause, sqlite3.OperationalError | psycopg.OperationalError | psycopg.errors.ReadOnlySqlTransaction):
        return DatabaseUnavailable(f"the database cannot be used ({text})")
    return error


def is_conflict(error: Exception) -> bool:
    """Return whether a write of another process to the same PostgreSQL came in between: tried again, it fits."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, psycopg.Error) and cause.sqlstate in _CONFLICTS


def _is_full_sqlite(cause: object) -> bool:
    # Errors of the driver's own have no code.
    code = getattr(cause, "sqlite_errorcode", None)
    return isinstance(cause, sqlite3.OperationalError) and code == sqlite3.SQLITE_FULL


def _is_away(cause: psycopg.OperationalError) -> bool:
    # Without a code it is the driver's own. 08 are errors of the connection, 57P those of a server that ends or begins.
    return cause.sqlstate is None or cause.sqlstate.startswith(("08", "57P"))
