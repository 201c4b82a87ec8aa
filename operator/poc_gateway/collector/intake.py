# SPDX-License-Identifier: Apache-2.0
"""Deliveries on their way to the database: what arrives during one commit is stored together in the next."""

import asyncio
import time
from collections import deque

from poc_gateway.collector.messages import Delivery
from poc_gateway.collector.storing import Outcome, store
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError, DatabaseUnavailable

#: Artifacts of one commit, unless a single delivery has more: so few that the first need not wait long.
COMMIT_ARTIFACTS = 4_096
#: Most artifacts that wait: some seconds' worth, in memory as much as a hundred megabytes.
MOST_WAITING = 250_000

_Waiting = tuple[Delivery, "asyncio.Future[Outcome | None]"]


class Intake:
    """One per process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting = deque[_Waiting]()
        self._artifacts = 0
        self._task: asyncio.Task[None] | None = None

    async def store(self, delivery: Delivery) -> Outcome | None:
        """Store a delivery and return what became of it once it is durable; None if its round was deleted meanwhile.

        DatabaseError if the database fails or is far behind; then nothing is stored.
        """
        if self._artifacts > MOST_WAITING:
            raise DatabaseUnavailable(f"the database is behind: {self._artifacts} artifacts wait")
        done: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, done))
        self._artifacts += len(delivery.found)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await done

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._commit(self._next())
        finally:
            self._task = None

    def _next(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        artifacts = len(batch[0][0].found)
        while self._waiting and artifacts + len(self._waiting[0][0].found) <= COMMIT_ARTIFACTS:
            batch.append(self._waiting.popleft())
            artifacts += len(batch[-1][0].found)
        self._artifacts -= artifacts
        return batch

    async def _commit(self, batch: list[_Waiting]) -> None:
        deliveries = [delivery for delivery, _ in batch]
        now = time.time_ns() // 1_000_000
        try:
            outcomes = await self._database.write(lambda connection: store(connection, deliveries, now))
        except Exception as error:
            if len(batch) == 1 or isinstance(error, DatabaseError):
                _fail(batch, error)
                return
            # One of them took the others along: each by itself.
            for one in batch:
                await self._commit([one])
            return
        for (_, done), outcome in zip(batch, outcomes, strict=True):
            if not done.done():
                done.set_result(outcome)


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for _, done in batch:
        if not done.done():
            done.set_exception(error)
