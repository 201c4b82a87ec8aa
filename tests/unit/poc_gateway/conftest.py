# SPDX-License-Identifier: Apache-2.0
"""Every test that uses ``database_url`` runs on each of `ENGINES`; `store.test_conformance` says what one must do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from poc_gateway.store.database import Database
from tests.support.servers.postgres import PostgresServer, postgres

#: The databases that the gateway supports.
ENGINES = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with postgres() as server:
        yield server


@pytest.fixture(params=ENGINES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/gateway.db"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_database()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database.open(database_url)
    yield database
    database.close()
