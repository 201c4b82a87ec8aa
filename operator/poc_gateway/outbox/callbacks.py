# SPDX-License-Identifier: Apache-2.0
"""Posts the rows of ``callbacks``, verdicts and results of jobs, as they are.

To one address they go out in the order they were written. One that fails does not hold up those behind it: the
network's receiver answers 503 for ever to a verdict that is too late, and the next one is a vote all the same.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection, select, update

from poc_gateway.outbox import metrics
from poc_gateway.outbox.posting import Answer, Outcome, Poster
from poc_gateway.outbox.receiver import Backoff, Circuit
from poc_gateway.outbox.recording import record
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.schema import callbacks

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
_IS_WAITING = callbacks.c.state == "waiting"


def addresses_with_work(connection: Connection) -> Sequence[str]:
    """Return the addresses that callbacks wait for."""
    query = select(callbacks.c.url).where(_IS_WAITING, callbacks.c.url.is_not(None)).distinct()
    return [url for url in connection.scalars(query) if url is not None]


class CallbackSender:
    """Sends the callbacks for one address, until none waits."""

    def __init__(self, url: str, *, poster: Poster, circuit: Circuit, database: Database, settings: Settings) -> None:
        self._url = url
        self._poster = poster
        self._circuit = circuit
        self._database = database
        self._settings = settings
        self._failing: dict[int, Backoff] = {}

    async def run(self) -> None:
        """Send everything there is; DatabaseError if it cannot be read."""
        while waiting := await self._database.read(self._waiting):
            self._failing = {id_: self._failing[id_] for id_ in waiting if id_ in self._failing}
            for id_ in waiting:
                if id_ not in self._failing or not self._failing[id_].seconds_left:
                    await self._send(id_)
            if self._failing:
                await asyncio.sleep(POLL_SECONDS)

    def _waiting(self, connection: Connection) -> Sequence[int]:
        query = select(callbacks.c.id).where(_IS_WAITING, callbacks.c.url == self._url)
        return connection.scalars(query.order_by(callbacks.c.id)).all()

    async def _send(self, id_: int) -> None:
        query = select(callbacks.c.body).where(callbacks.c.id == id_)
        body = await self._database.read(lambda connection: connection.scalar(query))
        if body is None:  # deleted with its round or job
            return
        answer = await self._circuit.call(partial(self._settle, id_, body))
        while answer.outcome is Outcome.UNREACHABLE:  # so would be all others: the order is kept
            answer = await self._circuit.call(partial(self._settle, id_, body))
        if answer.outcome is Outcome.FAILED:
            self._failing.setdefault(id_, Backoff(self._settings)).failed(answer)
            _log.warning("callback %d failed, and is tried again: %s", id_, answer.reason)
        else:
            self._failing.pop(id_, None)

    async def _settle(self, id_: int, body: str) -> Answer:
        """Post the callback and write down what became of it."""
        answer = await self._poster.post(self._url, body)
        if answer.outcome is Outcome.ACCEPTED:
            await record(self._database, lambda connection: _settled(connection, id_, "delivered", None))
            metrics.FORWARDED.labels("callback").inc()
        elif answer.outcome is Outcome.REFUSED:
            await record(self._database, lambda connection: _settled(connection, id_, "dead", answer.reason))
            metrics.DEAD.labels("callback").inc()
            _log.error("callback %d is refused for good: %s", id_, answer.reason)
        return answer


def _settled(connection: Connection, id_: int, state: str, reason: str | None) -> None:
    connection.execute(update(callbacks).where(callbacks.c.id == id_).values(state=state, reason=reason))
