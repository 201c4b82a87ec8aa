# SPDX-License-Identifier: Apache-2.0
"""What the outbox's tests share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from poc_gateway.store.database import Database
from tests.support.builders.forwarding import Receiver


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(f"sqlite:///{tmp_path / 'gateway.db'}")
    yield opened
    opened.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver().served() as served:
        yield served
