# SPDX-License-Identifier: Apache-2.0
"""When the next post may go out: pauses after failures, and a circuit breaker per address.

`Backoff` paces one round by itself; `CircuitBreaker` everything for an address, a host and a path, that cannot be
reached or is overloaded::

    closed ── it cannot be reached, or is overloaded ──> open: posts wait, one at a time tries
       ^                                                   │
       └─────────────── any other answer ──────────────────┘

Pauses are written down, so that a restart does not begin anew with a receiver that asked for rest. They are bounded by
our own limit, whatever a receiver asks for and however the clock was set meanwhile.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy import Connection, delete, insert, select
from yarl import URL

from poc_gateway import metrics
from poc_gateway.outbox.post import Answer
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError
from poc_gateway.store.schema import backoffs

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: At the gateway's end a post in flight has this long to be answered and written down.
FINISH_SECONDS = 10.0
#: A pause varies by half, so that what failed together does not come back together.
_SPREAD = (0.5, 1.5)


@dataclass(frozen=True)
class Pause:
    """A pause as it is written down: failures in a row, the end in milliseconds since 1970, and the last reason."""

    failures: int
    retry_at: int
    reason: str


class Trouble(NamedTuple):
    """Why something was not accepted when last sent, None if it was, and the seconds until the next try."""

    error: str | None
    seconds_left: float


class Pauses:
    """The pauses of all scopes in the database. `load` before the first is asked for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, Pause] = {}

    async def load(self) -> None:
        """Read what an earlier process has written down; DatabaseError if that fails."""
        rows = await self._database.read(lambda connection: connection.execute(select(backoffs)).all())
        self._known = {row.scope: Pause(row.failures, row.retry_at, row.reason) for row in rows}

    def find(self, scope: str) -> Pause | None:
        """Return the pause of a scope, which may be over."""
        return self._known.get(scope)

    async def keep(self, scope: str, pause: Pause | None) -> None:
        """Write a pause down, or that there is none any more. A database that fails costs the memory of it alone."""
        if pause is None and scope not in self._known:
            return
        self._known = {name: one for name, one in self._known.items() if name != scope}
        if pause is not None:
            self._known[scope] = pause
        try:
            await self._database.write(lambda connection: _keep(connection, scope, pause))
        except DatabaseError as error:
            _log.warning("a pause cannot be written down, and a restart would forget it: %s", error)


def _keep(connection: Connection, scope: str, pause: Pause | None) -> None:
    connection.execute(delete(backoffs).where(backoffs.c.scope == scope))
    if pause is not None:
        connection.execute(insert(backoffs).values(scope=scope, **vars(pause)))


def scope_of(round_id: int) -> str:
    """Return the scope of a round's pauses."""
    return f"round:{round_id}"


def address_of(url: str) -> str:
    """Return the URL's scheme, host, port and path, without what may be a secret: the scope of an address's pauses."""
    try:
        return str(URL(url, encoded=True).with_user(None).with_query(None).with_fragment(None))
    except ValueError:
        return url  # which the guard will refuse


def public_url(url: str) -> str:
    """Return a receiver's URL without what may be a secret, for people."""
    try:
        return str(URL(url, encoded=True).with_user(None).with_query(None))
    except ValueError:
        return "not a URL"


def trouble_of(connection: Connection, scopes: Sequence[str]) -> Trouble:
    """Return what is written down of the scopes; of several reasons that whose pause ends last, as the newest does."""
    found = {row.scope: row for row in connection.execute(select(backoffs).where(backoffs.c.scope.in_(scopes)))}
    pauses = [found[scope] for scope in scopes if scope in found]
    if not pauses:
        return Trouble(None, 0.0)
    last = max(pauses, key=lambda one: int(one.retry_at))
    return Trouble(last.reason, max(0.0, last.retry_at / 1000 - time.time()))


def newest_error(all_of: Sequence["Backoff"]) -> str | None:
    """Return the reason of the last failure of all of them; None if none has failed."""
    failed = [one for one in all_of if one.error is not None]
    return max(failed, key=lambda one: one.failed_at).error if failed else None


class Backoff:
    """A pause that doubles with every failure in a row and varies by half; none after a success."""

    def __init__(self, settings: Settings, scope: str = "", pauses: Pauses | None = None) -> None:
        self.error: str | None = None
        #: When it failed last, in seconds since 1970. Of what was written down it is the end of the pause, or now.
        self.failed_at = 0.0
        self._first = settings.retry_first_seconds
        self._limit = settings.retry_limit_seconds
        self._scope = scope
        self._pauses = pauses
        self._failures = 0
        self._retry_at = 0.0
        if pauses is not None and (known := pauses.find(scope)) is not None:
            self.error, self._failures = known.reason, known.failures
            self.failed_at = min(known.retry_at / 1000, time.time())
            left = known.retry_at / 1000 - time.time()
            self._retry_at = asyncio.get_running_loop().time() + min(max(left, 0.0), self._limit * _SPREAD[1])

    @property
    def seconds_left(self) -> float:
        """How long to wait before the next try."""
        return max(0.0, self._retry_at - asyncio.get_running_loop().time()) if self.error is not None else 0.0

    async def failed(self, answer: Answer) -> None:
        """Pause, at least for as long as the receiver asks for, up to our own limit."""
        self.error, self.failed_at = answer.reason, time.time()
        seconds = pause_seconds(self._first, self._limit, self._failures, answer)
        self._failures += 1
        self._retry_at = asyncio.get_running_loop().time() + seconds
        if self._pauses is not None:
            retry_at = int((time.time() + seconds) * 1000)
            await self._pauses.keep(self._scope, Pause(self._failures, retry_at, answer.reason))

    async def succeeded(self) -> None:
        """Go on without a pause."""
        self.error = None
        self._failures = 0
        if self._pauses is not None:
            await self._pauses.keep(self._scope, None)


def pause_seconds(first: float, limit: float, failures: int, answer: Answer) -> float:
    """Return the pause after one more failure than ``failures`` in a row."""
    # 2.0 ** 1024 is an overflow, and no pause doubles so often before it meets its limit.
    pause = min(first * 2.0 ** min(failures, 64), limit)
    # Not the same for all: those that failed together would come back together.
    return max(pause * random.uniform(*_SPREAD), min(answer.retry_after, limit))  # noqa: S311 - no secret


class CircuitBreaker:
    """One address. While it is in trouble, posts to it wait, and one at a time tries whether it is back."""

    def __init__(self, settings: Settings, address: str = "", pauses: Pauses | None = None) -> None:
        self.backoff = Backoff(settings, address, pauses)
        self._probe = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the address was in trouble when last tried."""
        return self.backoff.error is not None

    async def call(self, post: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Make the post when it is its turn, and learn from the answer; if cancelled, a post that began is finished."""
        while self.is_open:
            async with self._probe:
                if self.is_open:
                    await asyncio.sleep(self.backoff.seconds_left)
                    return await self._learn(await finished(post()), counts=True)
        answer = await finished(post())
        # Of posts that were on their way together only the first failure counts: they tell of one moment.
        return await self._learn(answer, counts=not self.is_open)

    async def _learn(self, answer: Answer, *, counts: bool) -> Answer:
        if not answer.was_sent:
            return answer
        if not answer.pauses_address:
            await self.backoff.succeeded()
        elif counts:
            await self.backoff.failed(answer)
        return answer


class Receivers:
    """The circuit breakers of all addresses that something is sent to at the moment."""

    def __init__(self, settings: Settings, pauses: Pauses) -> None:
        self._settings = settings
        self._pauses = pauses
        # Those who send to an address hold its circuit breaker.
        self._circuits: WeakValueDictionary[str, CircuitBreaker] = WeakValueDictionary()
        metrics.OPEN_CIRCUITS.set_function(lambda: sum(circuit.is_open for circuit in self._circuits.values()))

    def circuit(self, url: str) -> CircuitBreaker:
        """Return the circuit breaker of the URL's scheme, host, port and path."""
        key = address_of(url)
        circuit = self._circuits.get(key)
        if circuit is None:
            circuit = self._circuits[key] = CircuitBreaker(self._settings, key, self._pauses)
        return circuit


async def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Await ``work``, and if cancelled meanwhile, give it FINISH_SECONDS before it is cancelled too."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=FINISH_SECONDS)
        task.cancel()
        raise
