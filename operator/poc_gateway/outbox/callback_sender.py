# SPDX-License-Identifier: Apache-2.0
"""Sends callbacks, verdicts and results of jobs: those for one address, until none waits.

New ones go out first, in the order they were written, on a lane of their own. One that failed is tried again on
another lane, when its pause is over: the network's receiver answers 503 for ever to a verdict that is too late, and the
next verdict is a vote all the same. A pause is in the callback's row, so that a restart does not forget it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection

from poc_gateway import metrics
from poc_gateway.outbox import callback_ledger
from poc_gateway.outbox.callback_ledger import CallbackWork
from poc_gateway.outbox.pace import CircuitBreaker, pause_seconds
from poc_gateway.outbox.post import NOTHING, Answer, Outcome, SecretPoster
from poc_gateway.outbox.round_sender import record
from poc_gateway.outbox.states import Event
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError

_log = logging.getLogger(__name__)

#: Seconds between two looks for callbacks that nobody has told of.
POLL_SECONDS = 1.0
#: No pause is longer than this many times the limit of the settings.
_LONGEST = 2


class CallbackSender:
    """The two lanes of one address."""

    def __init__(
        self, url: str, *, poster: SecretPoster, circuit: CircuitBreaker, database: Database, settings: Settings
    ) -> None:
        self._url = url
        self._poster = poster
        self._circuit = circuit
        self._database = database
        self._first, self._limit = settings.retry_first_seconds, settings.retry_limit_seconds
        self._news = (asyncio.Event(), asyncio.Event())  # of each lane

    def wake(self) -> None:
        """Look for new callbacks now."""
        for news in self._news:
            news.set()

    async def run(self) -> None:
        """Send everything there is; DatabaseError if it cannot be read."""
        longest_ms = int(_LONGEST * self._limit * 1000)
        to_send = (
            partial(callback_ledger.new_callback, url=self._url),
            partial(callback_ledger.callback_to_retry, url=self._url, longest_ms=longest_ms),
        )
        try:
            async with asyncio.TaskGroup() as group:
                lanes = [group.create_task(self._lane(*lane)) for lane in zip(to_send, self._news, strict=True)]
                # Both lanes write: to know whether all is sent is to ask.
                while await self._database.read(partial(callback_ledger.has_callbacks, url=self._url)):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
                # Both at once: what is written from now on is for another sender.
                for lane in lanes:
                    lane.cancel()
        except ExceptionGroup as errors:
            failed, others = errors.split(DatabaseError)
            if failed is None or others is not None:
                raise
            raise failed.exceptions[0] from None

    async def _lane(self, due: Callable[[Connection], int | None], news: asyncio.Event) -> None:
        while True:
            news.clear()
            # One at a time: what is written meanwhile may come before all that wait.
            if (id_ := await self._database.read(due)) is not None:
                await self._send(id_)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await news.wait()

    async def _send(self, id_: int) -> None:
        while (await self._circuit.call(partial(self._settle, id_))).outcome is Outcome.UNREACHABLE:
            pass  # without a connection none would fare better: the order is kept

    async def _settle(self, id_: int) -> Answer:
        """Post the callback, unless it has ended while it waited for its turn, and write down what became of it."""
        await self._poster.turn()
        work = await self._database.read(partial(callback_ledger.callback_work, id_=id_))
        return await self._post(id_, work) if work is not None else NOTHING

    async def _post(self, id_: int, work: CallbackWork) -> Answer:
        answer = await self._poster.post(self._url, work.body, namespace=work.namespace, secret=work.receiver_secret)
        match answer.outcome:
            case Outcome.ACCEPTED:
                await record(self._database, partial(callback_ledger.callback_ended, id_=id_, event=Event.ACCEPTED))
                metrics.FORWARDED.labels("callback").inc()
            case Outcome.REFUSED:
                refused = partial(callback_ledger.callback_ended, id_=id_, event=Event.REFUSED, reason=answer.reason)
                await record(self._database, refused)
                metrics.DEAD.labels("callback").inc()
                _log.error("callback %d is refused for good: %s", id_, answer.reason)
            case Outcome.FAILED | Outcome.BUSY:
                await self._failed(id_, work, answer)
            case Outcome.UNREACHABLE:
                _log.warning("callback %d waits, since its receiver cannot be reached: %s", id_, answer.reason)
        return answer

    async def _failed(self, id_: int, work: CallbackWork, answer: Answer) -> None:
        seconds = pause_seconds(self._first, self._limit, work.attempts, answer)
        next_try_at = int((time.time() + seconds) * 1000)
        failed = partial(callback_ledger.callback_failed, id_=id_, reason=answer.reason, next_try_at=next_try_at)
        await record(self._database, failed)
        _log.warning("callback %d failed, and is tried again in %.1f s: %s", id_, seconds, answer.reason)
