# SPDX-License-Identifier: Apache-2.0
"""Reads and writes. All writes go through one thread, which commits those that wait together in one go.

A write is durable when `Database.write` returns: SQLite syncs its log at every commit, and so does PostgreSQL.
A write may read first. With SQLite it may rely on what it read, since one process owns the file
(`poc_gateway.store.fence`). Several processes write to one PostgreSQL: there a write locks the rows that it relies on,
first those of the slots (`poc_gateway.outbox.ledger`), and one that another came before is tried again.

A database that does not answer fails everything that waits for it at once. From then on one at a time tries whether it
is back, and all others fail without waiting.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from sqlalchemy import Connection, Engine

from poc_gateway.metrics import COMMIT_SECONDS
from poc_gateway.store.engine import (
    DatabaseAway,
    DatabaseFull,
    DatabaseUnavailable,
    create_engine,
    is_conflict,
    is_missing,
    translated,
)
from poc_gateway.store.fence import end_hung_sessions, epoch, is_given_up, next_epoch
from poc_gateway.store.migrations import is_newest, migrate
from poc_gateway.store.reserve import Room, cannot_shrink

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Work = Callable[[Connection], Result]

#: Most writes of one commit: enough that syncing costs little, few enough that the first does not wait long.
COMMIT_WRITES = 256
#: Seconds that a write, or a read, waits for its turn.
TURN_SECONDS = 30.0
#: A database that did not answer is tried again after so long.
AWAY_SECONDS = 1.0
#: Seconds that all migrations together may take, while nothing else uses the database.
MIGRATION_SECONDS = 3_600.0
#: Most times that a write is tried which others come before.
CONFLICTS = 5
#: Most writes that wait for theirs.
MOST_WAITING = 1_024
_READERS = 4
_FULL = "the database's disk is full: free space or lower the retention"
_CANNOT_SHRINK = (
    "the database file does not shrink when rounds are deleted, though their room is used again: to change that, "
    "stop the gateway and run PRAGMA auto_vacuum=INCREMENTAL; VACUUM on the file"
)


@dataclass
class _Write(Generic[Result]):
    work: Work[Result]
    done: "Future[Result]"
    #: Whether it stores something new, which a full disk has no room for.
    grows: bool
    #: The slot that it locks first, if it locks one alone.
    slot_id: int

    def begin(self) -> bool:
        """Whether the caller still waits; from now on it cannot give up."""
        return self.done.set_running_or_notify_cancel()

    def attempt(self, connection: Connection) -> Callable[[], None]:
        """Do the work; return what tells the caller of its result, to be called after the commit."""
        result = self.work(connection)
        return lambda: self.done.set_result(result)

    def fail(self, error: Exception) -> None:
        self.done.set_exception(translated(error))


class FenceLost(DatabaseUnavailable):
    """Another process owns the database now."""


class _Availability:
    """Whether the database answers. Used by several threads."""

    def __init__(self) -> None:
        self._error: DatabaseAway | None = None
        self._retry_at = 0.0
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise the last error, unless it is time for a try: then for one alone."""
        with self._lock:
            if self._error is None:
                return
            if time.monotonic() < self._retry_at:
                raise DatabaseAway(str(self._error))
            self._retry_at = time.monotonic() + AWAY_SECONDS + TURN_SECONDS

    def learn(self, error: Exception | None) -> None:
        """Learn from what a read or a write came to."""
        if error is None and self._error is None:
            return
        with self._lock:
            self._error = error if isinstance(error, DatabaseAway) else None
            self._retry_at = time.monotonic() + AWAY_SECONDS


class Database:
    """One per process."""

    def __init__(self, engine: Engine, room: Room | None = None) -> None:
        self.engine = engine
        self.room = room or Room(None)
        self._availability = _Availability()
        self._epoch: int | None = None
        #: Whether a write found that another process has owned the database since. This one can only end.
        self.fence_is_lost = False
        #: Whether who owned the database before has ended in order.
        self.was_given_up = True
        self._waiting: queue.SimpleQueue[_Write[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._writer = threading.Thread(target=self._run, name="database-writer", daemon=True)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="database-reader")

    @classmethod
    def open(cls, url: str, *, reserve_bytes: int = 0, fenced: bool = False) -> Self:
        """Open the database at ``url``, bring its schema up to date, and begin to write.

        With ``reserve_bytes`` that much of the disk is kept for when it is full. With ``fenced`` the process owns the
        database from now on: the caller holds its fence, and nobody who owned it before can write any more.
        DatabaseError if it cannot be used, ValueError if the URL is of no database that we know.
        """
        engine, room = create_engine(url), Room.beside(url, reserve_bytes)
        try:
            _migrate(url)
            with engine.connect() as connection:
                if cannot_shrink(connection):
                    _log.warning(_CANNOT_SHRINK)
            database = cls(engine, room)
            if fenced:
                with engine.begin() as connection:
                    end_hung_sessions(connection)
                    database.was_given_up = is_given_up(connection)
                    database._epoch = next_epoch(connection)
        except Exception as error:
            engine.dispose()
            raise translated(error) from error
        room.begin()
        database._writer.start()
        return database

    @classmethod
    def beside(cls, url: str) -> Self:
        """Open the database at ``url`` for reads alone, also while another process owns it.

        DatabaseError if it is not there, or its schema is that of another release.
        """
        engine = create_engine(url)
        if is_missing(url):
            raise DatabaseUnavailable("there is no database: set POC_GATEWAY_DATABASE as the gateway has it")
        try:
            with engine.connect() as connection:
                if not is_newest(connection):
                    raise DatabaseUnavailable("the database has another schema: use the release of its gateway")
        except Exception as error:
            engine.dispose()
            raise translated(error) from error
        database = cls(engine)
        database._closed = True
        return database

    async def take_over(self) -> None:
        """Own the database again after the fence was lost and taken anew; FenceLost if another has owned it since."""
        await self.write(lambda _: None)  # for which the epoch must be ours

    async def write(self, work: Work[Result], *, grows: bool = False, slot_id: int = 0) -> Result:
        """Run ``work`` in a transaction and return its result once it is durable.

        ``grows`` is for what stores something new: on a full disk it fails with DatabaseFull, so that the rest goes on.
        ``slot_id`` is for what changes one slot: in one commit such writes run in the order in which slots are locked.

        ``work`` may run several times, all but the last in transactions that are rolled back: it must do nothing but
        use its connection. Its own exceptions are raised; DatabaseError if the database fails, or is so slow that the
        write has not begun after `TURN_SECONDS`. Once it has begun its outcome is waited for: it may well succeed.
        """
        if self._closed:
            raise DatabaseUnavailable("the gateway is ending")
        if self._waiting.qsize() >= MOST_WAITING:
            raise DatabaseUnavailable(f"the database is behind: {MOST_WAITING} writes wait")
        if grows and self.room.full and not await asyncio.to_thread(self.room.admits):
            raise DatabaseFull(_FULL)
        done: Future[Result] = Future()
        self._waiting.put(_Write(work, done, grows, slot_id))
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
        reading = self._readers.submit(self._read, work)
        answer = asyncio.wrap_future(reading)
        try:
            await asyncio.wait({answer}, timeout=TURN_SECONDS)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if not answer.done() and reading.cancel():
            raise DatabaseUnavailable(f"the database took no read for {TURN_SECONDS:.0f} s")
        return await answer

    @property
    def waiting(self) -> int:
        """How many writes wait for their turn."""
        return self._waiting.qsize()

    def close(self) -> None:
        """Finish the writes that wait, then close."""
        self._closed = True
        self._waiting.put(None)
        if self._writer.is_alive():
            self._writer.join()
        self._readers.shutdown()
        self.engine.dispose()

    def _read(self, work: Work[Result]) -> Result:
        self._availability.check()
        try:
            with self.engine.connect() as connection:
                result = work(connection)
        except Exception as error:
            problem = translated(error)
            self._availability.learn(problem)
            raise problem from error
        self._availability.learn(None)
        return result

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

    def _commit(self, writes: list[_Write[Any]], tries: int = 1) -> None:
        if not writes:
            return
        try:
            self._availability.check()
        except DatabaseAway as error:
            self._failed(writes, error)
            return
        begun = time.perf_counter()
        try:
            answers = self._attempt(writes)
        except Exception as error:
            problem = translated(error)
            self._availability.learn(problem)
            if is_conflict(error) and tries < CONFLICTS:
                # Each by itself: what one write locks, it locks in an order that all keep.
                for write in writes:
                    self._commit([write], tries + 1)
            else:
                self._failed(writes, problem)
            return
        COMMIT_SECONDS.observe(time.perf_counter() - begun)
        self._availability.learn(None)
        if any(write.grows for write in writes):
            self.room.stored()
        for answer in answers:
            answer()

    def _attempt(self, writes: list[_Write[Any]]) -> list[Callable[[], None]]:
        with self.engine.begin() as connection:
            if self._epoch is not None and epoch(connection) != self._epoch:
                self.fence_is_lost = True
                raise FenceLost("another gateway owns the database now: this one stands by")
            return [write.attempt(connection) for write in sorted(writes, key=lambda one: one.slot_id)]

    def _failed(self, writes: list[_Write[Any]], error: Exception) -> None:
        is_full = isinstance(error, DatabaseFull) or self.room.nothing_left()
        if is_full and self.room.ran_out():
            # What must go on has room now. The others would only take it.
            for write in writes:
                if write.grows:
                    write.fail(DatabaseFull(_FULL))
            self._commit([write for write in writes if not write.grows])
        elif len(writes) == 1 or isinstance(error, DatabaseUnavailable):
            for write in writes:
                write.fail(error)
        else:
            # One of them failed and took the others along: each by itself.
            for write in writes:
                self._commit([write])


def _migrate(url: str) -> None:
    """Bring the schema up to date on a connection of its own: what changes a large table takes its time."""
    engine = create_engine(url, statement_seconds=MIGRATION_SECONDS)
    try:
        migrate(engine)
    finally:
        engine.dispose()
