# SPDX-License-Identifier: Apache-2.0
"""The connection to SQLite or PostgreSQL, with the settings that make a commit durable."""

import sqlite3
from typing import Any

import sqlalchemy
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

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
