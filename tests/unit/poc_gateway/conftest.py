# SPDX-License-Identifier: Apache-2.0
"""Every test that uses ``database_url`` runs on each of `ENGINES`; `store.test_conformance` says what one must do."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from poc_gateway.store.database import Database
from tests.support.servers.postgres import PostgresServer, postgres

#: The databases that the gateway supports.
ENGINES = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with postgres() as server:
        yield server


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the newest schema."""
    file = tmp_path_factory.mktemp("template") / "gateway.db"
    Database.open(f"sqlite:///{file}").close()
    return file


@pytest.fixture(scope="session")
def postgres_template(postgres_server: PostgresServer) -> str:
    """The name of a database with the newest schema."""
    url = postgres_server.new_database()
    Database.open(url).close()
    return str(make_url(url).database)


@pytest.fixture(params=ENGINES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database; for a test that uses ``database`` a copy, which spares it the migrations."""
    copied = "database" in request.fixturenames
    if request.param == "sqlite":
        file = tmp_path / "gateway.db"
        if copied:
            shutil.copy(request.getfixturevalue("sqlite_template"), file)
        return f"sqlite:///{file}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_database(template=request.getfixturevalue("postgres_template") if copied else None)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A database with the newest schema, open."""
    database = Database.open(database_url)
    yield database
    database.close()
