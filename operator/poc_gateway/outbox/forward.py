# SPDX-License-Identifier: Apache-2.0
"""The outbox: a task for each round and for each address of callbacks that has something to send.

It also ends what is not to be sent any more. Nobody forwards a round while it is ended: what is on its way to the
receiver is finished first, so that each artifact has one end.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from sqlalchemy import Connection

from poc_gateway import metrics
from poc_gateway.outbox import callback_ledger, endings, ledger, rivals
from poc_gateway.outbox.callback_sender import POLL_SECONDS, CallbackSender
from poc_gateway.outbox.pace import FINISH_SECONDS, Pauses, Receivers, Trouble
from poc_gateway.outbox.post import MayPost, Poster, SecretPoster
from poc_gateway.outbox.round_sender import LINGER_SECONDS, Forwarder
from poc_gateway.outbox.states import Event, State
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError
from poc_gateway.store.retention import Clock
from poc_gateway.store.rounds import KnownRound
from poc_operator.clients.kube.callback_secret import ReadSecret
from poc_operator.observed import Decision

_log = logging.getLogger(__name__)

#: Seconds between two looks for what has expired.
EXPIRY_SECONDS = 10.0
#: What is old by a clock that was set may be young: it must have run evenly for so long before anything expires.
STEADY_SECONDS = 86_400.0
#: Writes down how many items a transaction has changed.
Tally = Callable[[Connection, int], object]


def _untold(_: Connection, __: int) -> None:
    """Count for nobody."""


def _tallied(connection: Connection, work: Callable[[Connection], int], tally: Tally) -> int:
    count = work(connection)
    tally(connection, count)
    return count


class Outbox:
    """One for a database. Everything to be sent is in the database, so it goes on where another one ended."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        clock: Clock | None = None,
        read_secret: ReadSecret | None = None,
        may_post: MayPost = lambda: True,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock or Clock(database)
        self._read_secret = read_secret
        self._may_post = may_post
        self._pauses = Pauses(database)
        self._receivers = Receivers(settings, self._pauses)
        self._woken = asyncio.Event()
        self._forwarders: dict[int, Forwarder] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._senders: dict[str, CallbackSender] = {}
        self._ending = asyncio.Lock()
        self._held: int | None = None

    def wake(self) -> None:
        """Look for work soon: something was stored. To be called from the event loop."""
        self._woken.set()
        for sender in self._senders.values():
            sender.wake()

    def forwarder(self, round_id: int) -> Forwarder | None:
        """Return what forwards the round at the moment; None if nothing is left to send."""
        return self._forwarders.get(round_id)

    async def trouble(self, known: KnownRound) -> Trouble:
        """Return what keeps the round from being forwarded; nothing if nothing is left to send."""
        forwarder = self.forwarder(known.id)
        return forwarder.trouble if forwarder is not None else Trouble(None, 0.0)

    # Each of these may take many transactions. ``tally`` is called with the count of each, in that transaction.

    async def abandon(self, known: KnownRound, reason: str, tally: Tally = _untold) -> int:
        """Give up everything of a round that was not delivered; return how many artifacts and callbacks that is."""
        callbacks = partial(callback_ledger.abandon_callbacks, round_id=known.id, reason=reason)
        told = await self._database.write(partial(_tallied, work=callbacks, tally=tally))
        return told + await self._end(known.id, Event.ABANDONED, reason, tally=tally)

    async def replay(self, known: KnownRound, state: State, tally: Tally = _untold) -> int:
        """Send everything of a round again that has ended in ``state``; return how many artifacts that is."""
        async with self._halted(known.id):
            return await self._all(partial(endings.replay_some, round_id=known.id, state=state), tally)

    async def decide(self, known: KnownRound, decisions: Sequence[Decision], tally: Tally = _untold) -> int:
        """Write down which results are honest, of nonces with several; return how many decisions were new."""
        decide = partial(rivals.decide, known=known, decisions=decisions)
        async with self._halted(known.id):
            return await self._database.write(partial(_tallied, work=decide, tally=tally))

    async def expire(self) -> None:
        """End what was not accepted in time; nothing, unless the clock can be trusted."""
        seconds = self._settings.delivery_seconds
        if not seconds or not await self._clock.is_steady(STEADY_SECONDS):
            return
        since = ledger.now() - seconds * 1000
        reason = f"not accepted within {seconds} s after the end of its stage"
        for round_id in await self._database.read(partial(endings.rounds_overdue, since=since)):
            count = await self._end(round_id, Event.EXPIRED, reason, since)
            metrics.EXPIRED.labels("artifact").inc(count)
            _log.error("%d artifacts of round %d expired: %s", count, round_id, reason)
        while count := await self._database.write(
            partial(callback_ledger.expire_callbacks, since=since, reason=reason)
        ):
            metrics.EXPIRED.labels("callback").inc(count)
            _log.error("%d callbacks expired: %s", count, reason)

    async def run(self) -> None:
        """Send until cancelled; then posts in flight are finished, for which the database must still be open."""
        await self._load()
        async with Poster(self._settings, self._may_post) as poster, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_always())
            posts = SecretPoster(poster, self._read_secret)
            while True:
                try:
                    await self._start_senders(tasks, posts)
                except DatabaseError as error:
                    _log.warning("what is to be forwarded cannot be read yet: %s", error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._woken.wait()
                    await asyncio.sleep(LINGER_SECONDS)
                self._woken.clear()

    async def _load(self) -> None:
        while True:
            try:
                return await self._pauses.load()
            except DatabaseError as error:
                _log.warning("the pauses of receivers cannot be read yet: %s", error)
                await asyncio.sleep(POLL_SECONDS)

    async def _expire_always(self) -> None:
        while True:
            try:
                await self.expire()
            except DatabaseError as error:
                _log.warning("what has expired cannot be ended yet: %s", error)
            await asyncio.sleep(EXPIRY_SECONDS)

    async def _end(
        self, round_id: int, event: Event, reason: str, since: int | None = None, tally: Tally = _untold
    ) -> int:
        some = partial(endings.end_some, round_id=round_id, event=event, reason=reason, since=since)
        async with self._halted(round_id):
            return await self._all(some, tally)

    async def _all(self, some: Callable[[Connection], int], tally: Tally) -> int:
        """Do some of it at a time until nothing is left; return how many were changed."""
        total = 0
        while count := await self._database.write(partial(_tallied, work=some, tally=tally)):
            total += count
        return total

    @contextlib.asynccontextmanager
    async def _halted(self, round_id: int) -> AsyncIterator[None]:
        """Let nobody forward the round meanwhile; what is on its way is finished first."""
        async with self._ending:
            self._held = round_id
            try:
                if (task := self._tasks.get(round_id)) is not None:
                    # To cut the post off would be to make it again, perhaps each time.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._settings.forward_seconds + FINISH_SECONDS):
                            await self._forwarders[round_id].halt()
                    task.cancel()
                    await asyncio.wait([task])
                yield
            finally:
                self._held = None
                self.wake()

    async def _start_senders(self, tasks: asyncio.TaskGroup, poster: SecretPoster) -> None:
        for url in await self._database.read(callback_ledger.addresses_with_callbacks):
            if url not in self._senders:
                self._senders[url] = CallbackSender(
                    url,
                    poster=poster,
                    circuit=self._receivers.circuit(url),
                    database=self._database,
                    settings=self._settings,
                )
                sending = tasks.create_task(_logged(self._senders[url].run))
                sending.add_done_callback(partial(self._sent, url))
        for round_id in await self._database.read(ledger.rounds_with_work):
            if round_id not in self._forwarders:
                await self._start_forwarder(tasks, poster, round_id)

    async def _start_forwarder(self, tasks: asyncio.TaskGroup, poster: SecretPoster, round_id: int) -> None:
        terms = await self._database.read(partial(ledger.terms, round_id=round_id))
        if terms is None or terms.receiver is None or round_id == self._held:  # deleted meanwhile, or being ended
            return
        forwarder = self._forwarders[round_id] = Forwarder(
            round_id,
            terms,
            receiver=terms.receiver,
            poster=poster,
            receivers=self._receivers,
            pauses=self._pauses,
            database=self._database,
            settings=self._settings,
        )
        self._tasks[round_id] = tasks.create_task(_logged(forwarder.run))
        self._tasks[round_id].add_done_callback(partial(self._stopped, round_id))

    # Callbacks of the tasks, since one that is cancelled before its first step runs nothing of its own.
    def _sent(self, url: str, _: asyncio.Task[None]) -> None:
        del self._senders[url]

    def _stopped(self, round_id: int, _: asyncio.Task[None]) -> None:
        del self._forwarders[round_id], self._tasks[round_id]


async def _logged(run: Callable[[], Awaitable[None]]) -> None:
    # One round's fault must not end the others': it is found again at the next poll.
    try:
        await run()
    except DatabaseError as error:
        _log.warning("what is to be forwarded cannot be read yet: %s", error)
    except Exception:
        _log.exception("forwarding failed, and is tried again")
