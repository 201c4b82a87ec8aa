# SPDX-License-Identifier: Apache-2.0
"""How much disk space the database takes, and giving back what deleted rows took."""

from sqlalchemy import Connection, func, select, text

from poc_gateway.store import schema

#: Pages that one step gives back: 4 MiB, in some milliseconds.
VACUUM_PAGES = 1_000
#: What PostgreSQL takes for an artifact and its key in the index, beside the vector or distance itself.
_ROW_BYTES = 85
_DISTANCE_BYTES = 8


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
    each = _ROW_BYTES + func.coalesce(2 * rounds.c.k_dim, _DISTANCE_BYTES)
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
