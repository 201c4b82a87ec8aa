# SPDX-License-Identifier: Apache-2.0
"""Posts of results to one callback address: tried until the receiver accepts them or refuses them for good."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum, auto
from http import HTTPStatus
from typing import Generic, TypeVar

import aiohttp

from vllm_poc.logs import get_logger
from vllm_poc.server import metrics
from vllm_poc.server.addresses import shown
from vllm_poc.server.settings import Settings
from vllm_poc.wire.callbacks import NOT_ABOUT_CONTENT
from vllm_poc.wire.messages import WireMessage

_log = get_logger(__name__)

_SUCCESS = range(200, 300)
_CLIENT_ERRORS = range(400, 500)
#: Client errors that may pass, so that the payload is sent again.
_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
#: After so many single items refused in a row the receiver is taken to refuse everything.
SEARCH_LIMIT = 64

Item = TypeVar("Item")


class Outcome(Enum):
    """What became of items that were posted together."""

    ACCEPTED = auto()
    #: The receiver refused them, and perhaps only because of some of them.
    REFUSED = auto()
    #: The receiver refused them, and would refuse every part of them.
    HOPELESS = auto()


class Poster(Generic[Item]):
    """Posts items to ``url``; ``payload`` makes the body of some of them."""

    def __init__(
        self,
        url: str,
        payload: Callable[[Sequence[Item]], WireMessage],
        *,
        session: aiohttp.ClientSession,
        settings: Settings,
    ) -> None:
        self.error: str | None = None  # of the last attempt
        self.refusal: str | None = None  # the last one that was final
        self._url = url
        self._shown = shown(url)
        self._payload = payload
        self._session = session
        self._settings = settings
        self._refused_in_a_row = 0

    async def deliver(self, items: Sequence[Item]) -> AsyncIterator[bool]:
        """Post ``items`` in order, in payloads of bounded size; yield for each whether it was accepted.

        A payload that is refused is halved until the bad items are found, so that they alone are lost.
        """
        at_once = self._settings.payload_results
        parts = [items[start : start + at_once] for start in range(0, len(items), at_once)]
        parts.reverse()
        while parts:
            part = parts.pop()
            outcome = await self._post(part)
            if outcome is Outcome.REFUSED and len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
            else:
                for _ in part:
                    yield outcome is Outcome.ACCEPTED

    async def _post(self, items: Sequence[Item]) -> Outcome:
        body = self._payload(items).model_dump_json(exclude_none=True)
        pause = self._settings.retry_first_seconds
        while True:
            status = await self._attempt(body)
            if status in _SUCCESS or (status in _CLIENT_ERRORS and status not in _PASSING):
                return self._judge(status, len(items))
            metrics.CALLBACKS.labels("failed").inc()
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._settings.retry_limit_seconds)

    async def _attempt(self, body: str) -> int:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            self._failed(str(error) or type(error).__name__)
            return 0
        if status not in _SUCCESS:
            self._failed(f"HTTP {status}")
        return status

    def _judge(self, status: int, count: int) -> Outcome:
        if status in _SUCCESS:
            self.error, self._refused_in_a_row = None, 0
            metrics.CALLBACKS.labels("accepted").inc()
            return Outcome.ACCEPTED
        metrics.CALLBACKS.labels("refused").inc()
        self.refusal = self.error
        self._refused_in_a_row += count == 1
        hopeless = status in NOT_ABOUT_CONTENT or self._refused_in_a_row >= SEARCH_LIMIT
        return Outcome.HOPELESS if hopeless else Outcome.REFUSED

    def _failed(self, reason: str) -> None:
        self.error = f"{self._shown}: {reason}"
        _log.warning("callback failed: %s", self.error)
