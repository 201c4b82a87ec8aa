# SPDX-License-Identifier: Apache-2.0
"""Writing down what a receiver has answered: until it is done, since to forget it would be to post again."""

import asyncio
import logging
from collections.abc import Callable

from sqlalchemy import Connection

from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


async def record(database: Database, work: Callable[[Connection], None]) -> None:
    """Write, however often the database fails meanwhile."""
    while True:
        try:
            return await database.write(work)
        except DatabaseError as error:
            _log.warning("a receiver's answer cannot be written down yet: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
