# SPDX-License-Identifier: Apache-2.0
"""What anybody may ask tells nothing of the database but whether it takes writes."""

import logging

import pytest

from poc_gateway.server.health import Health
from poc_gateway.store.database import Database
from tests.support.servers.postgres import postgres


async def test_a_database_that_is_gone_is_told_without_its_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with postgres() as server:
        database = Database.open(server.new_database())
        assert await Health(database).problem() is None
    problem = await Health(database).problem()
    database.close()
    assert problem == "the database cannot be used: the gateway's log says more"
    assert str(server.folder) in caplog.text
