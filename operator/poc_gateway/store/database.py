# SPDX-License-Identifier: Apache-2.0
"""Reads and writes. All writes go through one thread, which commits those that wait together in one go.

A write is durable when `Database.write` returns: SQLite syncs its log at every commit, and so does PostgreSQL.
One process owns the database, so a write may read first and rely on what it read.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from sqlalchemy import Connection, Engine

from poc_gateway.store.disk_space import cannot_shrink
from poc_gateway.store.engine import DatabaseUnavailable, create_engine, translated
from poc_gateway.store.migrations import migrate

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Work = Callable[[Connection], Result]

#: Most writes of one commit: enough that syncing costs little, few enough that the first does not wait long.
COMMIT_WRITES = 256
#: Seconds that a write waits for its turn.
TURN_SECONDS = 30.0
#: Most writes that wait for theirs.
MOST_WAITING = 1_024
_READERS = 4
_CANNOT_SHRINK = (
    "the database file does not shrink when rounds are deleted, though their room is used again: to change that, "
    "stop the gateway and run PRAGMA auto_vacuum=INCREMENTAL; VACUUM on the file"
)


@dataclass
class _Write(Generic[Result]):
    work: Work[Result]
    done: "Future[Result]"

    def begin(self) -> bool:
        """Whether the caller still waits; from now on it cannot give up."""
        return self.done.set_running_or_notify_cancel()

    def attempt(self, connection: Connection) -> Callable[[], None]:
        """Do the work; return what tells the caller of its result, to be called after the commit."""
        result = self.work(connection)
        return lambda: self.done.set_result(result)

    def fail(self, error: Exception) -> None:
        self.done.set_exception(translated(error))


class Database:
    """One per process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: queue.SimpleQueue[_Write[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._writer = threading.Thread(target=self._run, name="database-writer", daemon=True)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="database-reader")

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the database at ``url``, bring its schema up to date, and begin to write.

        DatabaseError if it cannot be used, ValueError if the URL is of no database that we know.
        """
        engine = create_engine(url)
        try:
            migrate(engine)
            with engine.connect() as connection:
                if cannot_shrink(connection):
                    _log.warning(_CANNOT_SHRINK)
        except Exception as error:
            engine.dispose()
            raise translated(error) from error
        database = cls(engine)
        database._writer.start()
        return database

    async def write(self, work: Work[Result]) -> Result:
        """Run ``work`` in a transaction and return its result once it is durable.

        ``work`` may run twice, the first time in a transaction that is rolled back: it must do nothing but use its
        connection. Its own exceptions are raised; DatabaseError if the database fails, or is so slow that the write has
        not begun after `TURN_SECONDS`. Once it has begun its outcome is waited for, since it may well succeed.
        """
        if self._closed:
            raise DatabaseUnavailable("the gateway is ending")
        if self._waiting.qsize() >= MOST_WAITING:
            raise DatabaseUnavailable(f"the database is behind: {MOST_WAITING} writes wait")
        done: Future[Result] = Future()
        self._waiting.put(_Write(work, done))
        answer = asyncio.wrap_future(done)
        try:
            await asyncio.wait({answer}, timeout=TURN_SECONDS)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if not answer.done() and done.cancel():
            raise DatabaseUnavailable(f"the database took no write for {TURN_SECONDS:.0f} s")
        return await answer

    async def read(self, work: Work[Result]) -> Result:
        """Run ``work`` beside the writes and return its result; DatabaseError if the database fails."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def close(self) -> None:
        """Finish the writes that wait, then close."""
        self._closed = True
        self._waiting.put(None)
        self._writer.join()
        self._readers.shutdown()
        self.engine.dispose()

    def _read(self, work: Work[Result]) -> Result:
        try:
            with self.engine.connect() as connection:
                return work(connection)
        except Exception as error:
            raise translated(error) from error

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            writes, last = self._those_that_wait(first)
            self._commit([write for write in writes if write.begin()])
            if last:
                return

    def _those_that_wait(self, first: _Write[Any]) -> tuple[list[_Write[Any]], bool]:
        writes = [first]
        while len(writes) < COMMIT_WRITES:
            try:
                write = self._waiting.get_nowait()
            except queue.Empty:
                break
            if write is None:
                return writes, True
            writes.append(write)
        return writes, False

    def _commit(self, writes: list[_Write[Any]]) -> None:
        try:
            with self.engine.begin() as connection:
                answers = [write.attempt(connection) for write in writes]
        except Exception as error:
            if len(writes) == 1:
                writes[0].fail(error)
                return
            # One of them failed and took the others along: each by itself.
            for write in writes:
                self._commit([write])
            return
        for answer in answers:
            answer()
