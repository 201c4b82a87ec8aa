# SPDX-License-Identifier: Apache-2.0
"""Connections that are opened beside a write."""

from pathlib import Path

from sqlalchemy import Connection, insert, select

from poc_gateway.store.database import Database
from poc_gateway.store.schema import jobs


async def test_a_new_connection_does_not_fail_a_write_that_has_read(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'gateway.db'}")

    def read_then_write(connection: Connection) -> None:
        connection.execute(select(jobs.c.id)).all()
        with database.engine.connect() as first, database.engine.connect() as second:
            assert first.exec_driver_sql("PRAGMA auto_vacuum").scalar() == 2
            assert second.execute(select(jobs.c.id)).all() == []
        connection.execute(insert(jobs).values(id="a", request="{}", state="queued", created_at=0))

    try:
        await database.write(read_then_write)
    finally:
        database.close()
