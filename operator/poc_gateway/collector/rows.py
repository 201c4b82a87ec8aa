# SPDX-License-Identifier: Apache-2.0
"""The insert that everything waits for: on each database in the way that is fastest there."""

from collections.abc import Sequence

import psycopg
from sqlalchemy import Connection

#: slot_id, nonce, vector, distance, received_at
Row = tuple[int, int, bytes | None, float | None, int]

_COLUMNS = "(slot_id, nonce, vector, distance, received_at)"
_TYPES = ("int8", "int4", "bytea", "float8", "int8")


def insert_artifacts(connection: Connection, rows: Sequence[Row]) -> None:
    """Insert rows that are not there yet."""
    if connection.dialect.name == "sqlite":
        # SQLAlchemy's own insert handles each value by itself, which takes twice as long.
        connection.exec_driver_sql(f"INSERT INTO artifacts {_COLUMNS} VALUES (?, ?, ?, ?, ?)", list(rows))  # noqa: S608
        return
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)  # noqa: S101 - `create_engine` made it
    with driver.cursor().copy(f"COPY artifacts {_COLUMNS} FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(_TYPES)
        for row in rows:
            copy.write_row(row)
