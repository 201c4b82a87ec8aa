# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with the database.

DatabaseError
 ├── DatabaseFull         its disk or its limit is full: nothing was stored
 └── DatabaseUnavailable  it does not answer, or is locked by another process: try again later
"""

import sqlite3

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout


class DatabaseError(Exception):
    """A read or a write failed, and has changed nothing."""


class DatabaseFull(DatabaseError):  # noqa: N818 - reads as a state
    """There is no room for more."""


class DatabaseUnavailable(DatabaseError):  # noqa: N818
    """The database cannot be used at the moment."""


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
