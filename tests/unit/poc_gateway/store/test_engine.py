# SPDX-License-Identifier: Apache-2.0
"""Connections that are opened beside a write, and the tables that they find."""

from pathlib import Path
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, insert, select

from poc_gateway.store import schema
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


async def test_the_migrations_make_the_schema(database: Database) -> None:
    def differences(connection: Connection) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection), schema.metadata))

    assert await database.read(differences) == []
