# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL that hangs: what needs it fails within seconds, and all is well when it goes on."""

import asyncio
import time
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import text

from poc_gateway.store import database as database_module
from poc_gateway.store import engine as engine_module
from poc_gateway.store import migrations
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseAway
from tests.support.builders.deliveries import a_round, artifacts, path
from tests.support.servers.postgres import PostgresServer
from tests.unit.poc_gateway.ingest.conftest import Start

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
#: Of the first request. It waits for a statement, and for a new connection.
FIRST_SECONDS = 30.0


async def test_a_hung_server_fails_all_at_once_and_health_says_so(
    start: Start,
    postgres_server: PostgresServer,
) -> None:
    async with start(a_round()) as gateway:
        assert (await gateway.deliver(artifacts(range(10))))[0] == 200

        async def deliver(nonce: int) -> tuple[int, str | None, float]:
            began = time.monotonic()
            async with gateway.session.post(path(), data=artifacts([nonce])) as answer:
                return answer.status, answer.headers.get("Retry-After"), time.monotonic() - began

        with postgres_server.hung():
            results = await asyncio.gather(*(deliver(nonce) for nonce in range(100, 160)))
            assert {(status, retry) for status, retry, _ in results} == {(503, "5")}
            assert max(seconds for _, _, seconds in results) < FIRST_SECONDS
            assert (await deliver(500))[0] == 503
            fast = [await deliver(nonce) for nonce in range(200, 210)]
            assert sorted(seconds for _, _, seconds in fast)[5] < 2
            status, body = await gateway.get("/readyz")
            assert (status, body["reason"]) == (503, "NotReady")
            began = time.monotonic()
            assert (await gateway.get("/rounds"))[0] == 503
            assert time.monotonic() - began < FIRST_SECONDS
        began = time.monotonic()
        while (await deliver(300))[0] != 200:
            assert time.monotonic() - began < 40
            await asyncio.sleep(0.2)


async def test_what_waits_for_a_server_that_is_away_is_not_tried_one_by_one(
    database: Database, postgres_server: PostgresServer
) -> None:
    await database.write(lambda one: one.execute(text("SELECT 1")) and None)
    with postgres_server.hung():
        began = time.monotonic()
        waiting = [database.write(lambda one: one.execute(text("SELECT 1")) and None) for _ in range(300)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(result) for result in results} == {DatabaseAway}
        assert time.monotonic() - began < FIRST_SECONDS


async def test_a_statement_without_end_is_ended(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(Exception, match="statement timeout"):
        await database.read(lambda one: one.execute(text("SELECT pg_sleep(60)")))
    assert time.monotonic() - began < engine_module.STATEMENT_SECONDS + 20
    assert await database.read(lambda one: one.execute(text("SELECT 1")).scalar()) == 1


def test_a_migration_has_a_deadline_of_its_own(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than any other statement may."""
    head = ScriptDirectory(str(migrations._SCRIPTS)).get_current_head()
    Database.open(database_url).close()
    scripts = tmp_path / "scripts"
    (scripts / "versions").mkdir(parents=True)
    for file in [migrations._SCRIPTS / "env.py", *migrations._SCRIPTS.glob("versions/*.py")]:
        (scripts / file.relative_to(migrations._SCRIPTS)).write_text(file.read_text())
    slow = "op.execute('SELECT pg_sleep(3)')"
    script = f"from alembic import op\nrevision = '9000'\ndown_revision = '{head}'\ndef upgrade(): {slow}\n"
    (scripts / "versions" / "9000_slow.py").write_text(script)
    monkeypatch.setattr(migrations, "_SCRIPTS", scripts)
    monkeypatch.setattr(engine_module, "STATEMENT_SECONDS", 1.0)
    monkeypatch.setattr(database_module, "MIGRATION_SECONDS", 1.0)
    with pytest.raises(Exception, match="statement timeout"):
        Database.open(database_url)
    monkeypatch.setattr(database_module, "MIGRATION_SECONDS", 60.0)
    database = Database.open(database_url)
    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9000"
    database.close()
