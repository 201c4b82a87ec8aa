# SPDX-License-Identifier: Apache-2.0
"""Finds what waits to be sent, and keeps one task for each round and each callback address that has something."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from poc_gateway.outbox import ledger
from poc_gateway.outbox.callbacks import CallbackSender, addresses_with_work
from poc_gateway.outbox.forwarder import LINGER_SECONDS, Forwarder
from poc_gateway.outbox.posting import Poster
from poc_gateway.outbox.receiver import Receivers
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0


class Outbox:
    """One per process. Everything to be sent is in the database, so it goes on where another one ended."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._receivers = Receivers(settings)
        self._woken = asyncio.Event()
        self._forwarders: dict[int, Forwarder] = {}
        self._senders: dict[str, CallbackSender] = {}

    def wake(self) -> None:
        """Look for work soon: something was stored. To be called from the event loop."""
        self._woken.set()

    def forwarder(self, round_id: int) -> Forwarder | None:
        """Return what forwards the round at the moment; None if nothing is left to send."""
        return self._forwarders.get(round_id)

    async def run(self) -> None:
        """Send until cancelled; then posts in flight are finished, for which the database must still be open."""
        async with Poster(self._settings) as poster, asyncio.TaskGroup() as tasks:
            while True:
                try:
                    await self._look(tasks, poster)
                except DatabaseError as error:
                    _log.warning("what is to be forwarded cannot be read yet: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), POLL_SECONDS)
                    await asyncio.sleep(LINGER_SECONDS)
                self._woken.clear()

    async def _look(self, tasks: asyncio.TaskGroup, poster: Poster) -> None:
        for round_id in await self._database.read(ledger.rounds_with_work):
            if round_id not in self._forwarders:
                await self._start_round(tasks, poster, round_id)
        for url in await self._database.read(addresses_with_work):
            if url not in self._senders:
                self._senders[url] = CallbackSender(
                    url,
                    poster=poster,
                    circuit=self._receivers.circuit(url),
                    database=self._database,
                    settings=self._settings,
                )
                tasks.create_task(_logged(self._senders[url].run, partial(self._senders.pop, url)))

    async def _start_round(self, tasks: asyncio.TaskGroup, poster: Poster, round_id: int) -> None:
        terms = await self._database.read(partial(ledger.terms, round_id=round_id))
        if terms is None or terms.receiver is None:  # deleted meanwhile
            return
        self._forwarders[round_id] = Forwarder(
            round_id,
            terms,
            receiver=terms.receiver,
            poster=poster,
            circuit=self._receivers.circuit(terms.receiver),
            database=self._database,
            settings=self._settings,
        )
        tasks.create_task(_logged(self._forwarders[round_id].run, partial(self._forwarders.pop, round_id)))


async def _logged(run: Callable[[], Awaitable[None]], ended: Callable[[], object]) -> None:
    # One round's fault must not end the others': it is found again at the next look.
    try:
        await run()
    except DatabaseError as error:
        _log.warning("what is to be forwarded cannot be read yet: %s", error)
    except Exception:
        _log.exception("forwarding failed, and is tried again")
    finally:
        ended()
