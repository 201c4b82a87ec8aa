# SPDX-License-Identifier: Apache-2.0
"""The connection to SQLite or PostgreSQL, with the settings that make a commit durable, and what can go wrong with it.

DatabaseError
 ├── DatabaseFull         its disk or its limit is full: nothing was stored
 └── DatabaseUnavailable  it does not answer, or is locked by another process: try again later
"""

import sqlite3
from typing import Any

import psycopg
import sqlalchemy
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

#: Seconds that a connection waits for a database that is locked or does not answer.
WAIT_SECONDS = 5.0
#: Pages of 4 KiB that each connection keeps: 16 MiB.
_CACHE_KIB = 16 * 1024
#: So that a PostgreSQL that is gone, or busy for ever, is noticed: a write that waits for it holds up all others.
_POSTGRESQL = {
    "connect_timeout": int(WAIT_SECONDS),
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "options": "-c statement_timeout=30000",
}
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


def create_engine(url: str) -> Engine:
    """Return an engine for ``sqlite:///PATH`` or ``postgresql://USER:PASSWORD@HOST/NAME``; ValueError for others."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # whose texts have parts of the URL, which may be of its password
        raise ValueError("database is not a URL: use sqlite:////PATH or postgresql://USER:PASSWORD@HOST/NAME") from None
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed)
    if parsed.get_backend_name() == "postgresql":
        psycopg_url = parsed.set(drivername="postgresql+psycopg")
        return sqlalchemy.create_engine(psycopg_url, pool_pre_ping=True, pool_size=8, connect_args=_POSTGRESQL)
    raise ValueError(f"database is of {parsed.get_backend_name()}: only sqlite and postgresql are supported")


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
    if isinstance(cause, sqlite3.OperationalError | psycopg.OperationalError | psycopg.errors.ReadOnlySqlTransaction):
        return DatabaseUnavailable(f"the database cannot be used ({text})")
    return error


def _is_full_sqlite(cause: object) -> bool:
    return isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode == sqlite3.SQLITE_FULL
