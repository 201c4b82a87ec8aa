# SPDX-License-Identifier: Apache-2.0
"""The tokens of pods: each namespace has its own, in a Secret beside its pods, and no pod sees another's.

Whoever may create rounds in a namespace can let the operator send its token to any of its pods, and no more.
With one token for all, a pod of any namespace would learn what guards all others.

All clients of a process change to another token at the same time. Otherwise a pod would answer those that poll and
refuse those that ask, and each refusal counts as a failed attempt.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from poc_operator.clients.errors import PodUnreachable, StoreError, StoreForbidden
from poc_operator.clients.pods.client import CONNECTIONS, PodClient, new_session

log = logging.getLogger(__name__)

#: Seconds after which a token is read again, so that it can be changed.
REFRESH_SECONDS = 60.0

#: Reads the token of a namespace; None if it has none. ValueError if its Secret is unfit, StoreError.
ReadToken = Callable[[str], Awaitable[str | None]]


@dataclass
class _Namespace:
    """What is known of one namespace: its token, if that was ever read, and when it is to be read again."""

    is_read: bool = False
    token: str | None = None
    due: float = 0.0
    warned: str | None = None
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Tokens:
    """The tokens of all namespaces. One per process. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, read_token: ReadToken, clock: Callable[[], float] = time.monotonic) -> None:
        self._read_token = read_token
        self._clock = clock
        self._namespaces: dict[str, _Namespace] = {}

    async def of(self, namespace: str) -> str | None:
        """Return the token of a namespace; None if it has none. PodUnreachable while that is not known."""
        known = self._namespaces.setdefault(namespace, _Namespace())
        if self._is_due(known):
            async with known.reading:
                if self._is_due(known):
                    await self._read(namespace, known)
        if not known.is_read:
            raise PodUnreachable(f'the token of namespace "{namespace}" cannot be read: {known.warned}')
        return known.token

    def _is_due(self, known: _Namespace) -> bool:
        return not known.is_read or self._clock() >= known.due

    async def _read(self, namespace: str, known: _Namespace) -> None:
        """Read the token. While the API server fails, the last one counts; one that is gone or unfit does not."""
        known.due = self._clock() + REFRESH_SECONDS
        why: str | None = None
        try:
            token = await self._read_token(namespace)
        except (StoreForbidden, ValueError) as error:
            token, why = None, str(error)
        except StoreError as error:
            known.due, known.warned = self._clock(), str(error)
            return
        if why is not None and why != known.warned:
            log.warning('namespace "%s": its pods get no token: %s', namespace, why)
        known.is_read, known.token, known.warned = True, token, why


class PodClients:
    """A client for the pods of each namespace; they share their connections. One per process and purpose.

    Without ``tokens`` no pod gets a token.
    """

    def __init__(self, tokens: Tokens | None = None, *, connections: int = CONNECTIONS) -> None:
        self._tokens = tokens
        self._session = new_session(connections)
        self._clients: dict[str, tuple[str | None, PodClient]] = {}  # each with the token that it sends

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def of(self, namespace: str) -> PodClient:
        """Return the client for the pods of a namespace. PodUnreachable while it is not known which token they get."""
        token = await self._tokens.of(namespace) if self._tokens is not None else None
        known = self._clients.get(namespace)
        if known is None or known[0] != token:
            known = self._clients[namespace] = (token, PodClient(token, session=self._session))
        return known[1]
