# SPDX-License-Identifier: Apache-2.0
"""Owning a PostgreSQL that several gateways use: one of them forwards, decides and deletes, and all of them serve.

::

    stands for it ── the lock is free ──> owner ── it is lost, or another has it ──> stands for it

What the owner does, it writes by a `Database` of its own, whose commits fail once another process owns the database.
What all processes write, deliveries above all, goes by another one: row locks keep that in order.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib import import_module
from typing import Any

from poc_gateway.node_api.job_store import fail_foreign_jobs
from poc_gateway.node_api.service import NodeApi
from poc_gateway.outbox.commands import Commands
from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.standby import opened, taken, until_lost
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseError
from poc_gateway.store.fence import CERTAIN_SECONDS, Fence, end_hung_sessions, fence_of, give_up
from poc_gateway.store.retention import Clock, Retention
from poc_gateway.store.rounds import Rounds
from poc_operator.clients.kube.callback_secret import ReadSecret

_log = logging.getLogger(__name__)

#: Pause after the database could not be owned, so that another process may try.
RETRY_SECONDS = 3.0
#: A request for an ML node that the owner does not know waits for so long, since another owner may know it; and the
#: seconds between two looks for them.
FOREIGN_SECONDS, FOREIGN_LOOK_SECONDS = 600.0, 60.0
#: Seconds between two looks for sessions that hang.
HUNG_LOOK_SECONDS = 5.0
#: What archives rounds, and the bucket that it writes to: imported when they are needed.
ARCHIVE_MODULE, BUCKET_MODULE = "poc_gateway.query.archive", "poc_gateway.query.bucket"
_SERVES = "another gateway owns the database, and forwards: this one serves, and takes over when that has ended"


class Owner:
    """Stands for the owner of a database, and does what an owner does. One per process."""

    def __init__(
        self,
        settings: Settings,
        *,
        commands: Commands,
        rounds: Rounds,
        ml_nodes: Sequence[NodeApi] = (),
        read_secret: ReadSecret | None = None,
    ) -> None:
        self._settings = settings
        self._url = settings.database.get_secret_value()
        self._commands = commands
        self._rounds = rounds
        self._ml_nodes = ml_nodes
        self._read_secret = read_secret
        #: Whether this process owns the database at the moment. May be asked by another thread.
        self.owns = False

    async def run(self) -> None:
        """Own the database whenever no other process does, until cancelled."""
        fence = fence_of(self._url)
        try:
            while True:
                await taken(fence, lambda _: None, reason=_SERVES)
                try:
                    await self._own(fence)
                except FenceLost as error:
                    _log.warning("%s", error)
                except DatabaseError as error:
                    _log.warning("the database cannot be owned, which is tried again: %s", error)
                    # Another process may be able to, such as one of a newer release.
                    await asyncio.to_thread(fence.close)
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            fence.close()

    async def _own(self, fence: Fence) -> None:
        async with AsyncExitStack() as stack:
            database = await opened(partial(Database.open, self._url, fenced=True))
            stack.push_async_callback(asyncio.to_thread, database.close)
            _log.info("this gateway owns the database: it forwards")
            tenure = _Tenure(self._settings, fence, database, self._rounds, self._read_secret)
            self.owns = True
            try:
                await until_lost(
                    fence,
                    database,
                    tenure.forward,
                    tenure.retention.run,
                    *archiving(database, self._settings),
                    tenure.end_hung,
                    partial(self._commands.obey, database, tenure.outbox),
                    *computing(database, self._ml_nodes, tenure.clock),
                )
            finally:
                self.owns = False
                with suppress(DatabaseError):
                    await database.write(give_up)


def archiving(database: Database, settings: Settings) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """Return what archives rounds in the process that owns the database; nothing without an archive."""
    if settings.archive_bucket is None:
        return []
    return [partial(_archive, database, settings)]


async def _archive(database: Database, settings: Settings) -> None:
    # A gateway without an archive starts sooner without what that needs. To import it takes half a second, and nothing
    # else would go on meanwhile.
    module = await asyncio.to_thread(import_module, ARCHIVE_MODULE)
    await module.Archive(database, settings).run()


class _Tenure:
    """What an owner needs for as long as it owns the database."""

    def __init__(
        self, settings: Settings, fence: Fence, database: Database, rounds: Rounds, read_secret: ReadSecret | None
    ) -> None:
        self._fence = fence
        self._database = database
        self.clock = Clock(database)
        self.outbox = Outbox(database, settings, self.clock, read_secret, self._may_post)
        self.retention = Retention(database, settings, rounds.forget, self.clock)

    async def forward(self) -> None:
        """Forward, when it is certain that the owner before does not any more."""
        if not self._database.was_given_up:
            await asyncio.sleep(CERTAIN_SECONDS)
        await self.outbox.run()

    async def end_hung(self) -> None:
        """End what hangs in other processes, since deliveries wait for it."""
        while True:
            await asyncio.sleep(HUNG_LOOK_SECONDS)
            try:
                await self._database.write(end_hung_sessions)
            except DatabaseError as error:
                _log.warning("sessions that hang cannot be looked for: %s", error)

    def _may_post(self) -> bool:
        if self._database.fence_is_lost or not self._fence.is_taken:
            raise FenceLost("the database's lock is lost: this gateway sends nothing")
        return self._fence.is_certain


def computing(
    database: Database, ml_nodes: Sequence[NodeApi], clock: Clock
) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """Return what computes the jobs that are queued for the ML nodes, and fails those that nobody would compute.

    Each is a work of its own: in a group of tasks a lost fence would be an ExceptionGroup, which nobody expects.
    """
    if not ml_nodes:
        return []
    names = [node.ml_node.name for node in ml_nodes]
    computed = [partial(node.jobs.run_queued, clock) for node in ml_nodes]
    return [*computed, partial(_fail_foreign_jobs, database, names)]


async def _fail_foreign_jobs(database: Database, names: Sequence[str]) -> None:
    """Look for jobs of ML nodes that are not listed, once a minute.

    While the gateways are replaced one by one, those that are new may list an ML node that the owner does not know. The
    next owner does, so what is queued for it waits.
    """
    fail = partial(fail_foreign_jobs, ml_nodes=names, after_seconds=FOREIGN_SECONDS)
    while True:
        try:
            lost = await database.write(fail)
        except FenceLost:
            raise
        except DatabaseError as error:
            _log.warning("requests for ML nodes that are not listed cannot be looked for: %s", error)
        else:
            if lost:
                _log.warning("%d requests for named nonces have failed: their ML nodes are not listed any more", lost)
        await asyncio.sleep(FOREIGN_LOOK_SECONDS)
