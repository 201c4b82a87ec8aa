# SPDX-License-Identifier: Apache-2.0
"""Whether the gateway can store: what the kubelet asks, and the network's client."""

import asyncio
import time
from http import HTTPStatus

from fastapi import APIRouter
from sqlalchemy import text

from poc_gateway.errors import Refusal, documented
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError

#: A write that changes nothing may take this long, behind those that wait.
WRITE_SECONDS = 2.0
#: An answer is given again for this long, so that many probes cost one write.
CACHE_SECONDS = 1.0
#: The schema's revision, which is always there: a full disk or a database that may only be read shows in the commit.
_WRITE = text("UPDATE alembic_version SET version_num = version_num")


class Health:
    """Asks the database whether it takes writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = asyncio.Lock()
        self._problem: str | None = None
        self._asked = float("-inf")

    async def problem(self) -> str | None:
        """Return why nothing can be stored; None if all is well."""
        async with self._lock:
            if time.monotonic() - self._asked > CACHE_SECONDS:
                self._problem = await self._ask()
                self._asked = time.monotonic()
        return self._problem

    async def _ask(self) -> str | None:
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._database.write(lambda connection: connection.execute(_WRITE))
        except TimeoutError:
            return f"the database took no write within {WRITE_SECONDS:.0f} s"
        except DatabaseError as error:
            return str(error)
        return None


def router(database: Database) -> APIRouter:
    """Return the routes, which need no token."""
    routes, health = APIRouter(responses=documented(503)), Health(database)

    @routes.get("/health")
    @routes.get("/readyz")
    async def ready() -> dict[str, str]:
        """Answer 200 if what is delivered now can be stored."""
        problem = await health.problem()
        if problem is not None:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NotReady", problem, headers={"Retry-After": "1"})
        return {"status": "OK"}

    return routes
