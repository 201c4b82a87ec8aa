# SPDX-License-Identifier: Apache-2.0
"""When the next post may go out: pauses after failures, and a circuit breaker per host.

`Backoff` paces one round or callback by itself; `CircuitBreaker` everything for a host that cannot be reached::

    closed ── the host cannot be reached ──> open: posts wait, one at a time tries
       ^                                       │
       └────────── it answers ─────────────────┘
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from yarl import URL

from poc_gateway import metrics
from poc_gateway.outbox.post import Answer, Outcome
from poc_gateway.settings import Settings

Result = TypeVar("Result")

#: At the gateway's end a post in flight has this long to be answered and written down.
FINISH_SECONDS = 10.0


class Backoff:
    """A pause that doubles with every failure in a row and varies by half; none after a success."""

    def __init__(self, settings: Settings) -> None:
        self.error: str | None = None
        self._first = settings.retry_first_seconds
        self._limit = settings.retry_limit_seconds
        self._pause = 0.0
        self._retry_at = 0.0

    @property
    def seconds_left(self) -> float:
        """How long to wait before the next try."""
        return max(0.0, self._retry_at - asyncio.get_running_loop().time()) if self.error is not None else 0.0

    def failed(self, answer: Answer) -> None:
        """Pause, at least for as long as the receiver asks for."""
        self.error = answer.reason
        self._pause = min(max(self._first, 2 * self._pause), self._limit)
        # Not the same for all: those that failed together would come back together.
        seconds = max(self._pause * random.uniform(0.5, 1.5), answer.retry_after)  # noqa: S311 - no secret
        self._retry_at = asyncio.get_running_loop().time() + seconds

    def succeeded(self) -> None:
        """Go on without a pause."""
        self.error = None
        self._pause = 0.0


class CircuitBreaker:
    """One host. While it cannot be reached, posts to it wait, and one at a time tries whether it is back."""

    def __init__(self, settings: Settings) -> None:
        self.backoff = Backoff(settings)
        self._probe = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the host could not be reached when last tried."""
        return self.backoff.error is not None

    async def call(self, post: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Make the post when it is its turn, and learn from the answer; if cancelled, a post that began is finished."""
        while self.is_open:
            async with self._probe:
                if self.is_open:
                    await asyncio.sleep(self.backoff.seconds_left)
                    return self._learn(await finished(post()), counts=True)
        answer = await finished(post())
        # Of posts that were on their way together only the first failure counts: they tell of one moment.
        return self._learn(answer, counts=not self.is_open)

    def _learn(self, answer: Answer, *, counts: bool) -> Answer:
        if answer.outcome is not Outcome.UNREACHABLE:
            self.backoff.succeeded()
        elif counts:
            self.backoff.failed(answer)
        return answer


class Receivers:
    """The circuit breakers of all hosts that something is sent to at the moment."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Those who send to a host hold its circuit breaker.
        self._circuits: WeakValueDictionary[str, CircuitBreaker] = WeakValueDictionary()
        metrics.OPEN_CIRCUITS.set_function(lambda: sum(circuit.is_open for circuit in self._circuits.values()))

    def circuit(self, url: str) -> CircuitBreaker:
        """Return the circuit breaker of the URL's scheme, host and port."""
        try:
            key = str(URL(url, encoded=True).origin())
        except ValueError:
            key = url  # which the guard will refuse
        circuit = self._circuits.get(key)
        if circuit is None:
            circuit = self._circuits[key] = CircuitBreaker(self._settings)
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
