# SPDX-License-Identifier: Apache-2.0
"""One post to a receiver, and what its answer means."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from http import HTTPStatus
from time import time
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from poc_gateway import metrics
from poc_gateway.metrics import FailureKind
from poc_gateway.outbox.guard import AddressGuard, AddressRefused
from poc_gateway.settings import Settings
from poc_gateway.store.schema import one_line
from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.kube.callback_secret import CallbackSecretReader, ReadSecret
from vllm_poc.wire.callbacks import NOT_ABOUT_CONTENT

_log = logging.getLogger(__name__)

#: Most bytes of an answer that are read, and most characters of it that are kept.
ANSWER_BYTES = 4096
REASON_CHARACTERS = 200
#: The receiver, or what stands before it, is in trouble: no other post to this address would fare better.
_RECEIVER_IN_TROUBLE = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.GATEWAY_TIMEOUT,
}
_CLIENT_ERRORS = range(400, 500)


#: Failures before anything is sent.
_NOT_SENT = {"address", "secret"}
#: Seconds between two questions whether something may be posted.
_MAY_POST_SECONDS = 0.1


class Outcome(Enum):
    """What became of a post."""

    ACCEPTED = auto()
    #: The receiver refuses the content, and perhaps only a part of it.
    REFUSED = auto()
    #: To be tried again. Says nothing of other posts: the network's receiver answers 503 to a round whose time is over.
    FAILED = auto()
    #: To be tried again, as everything for this address: it took no answer in time, or says that it is overloaded.
    BUSY = auto()
    #: To be tried again, as everything for this address: there is no connection to it.
    UNREACHABLE = auto()
    #: There was nothing to post any more when its turn came.
    NOTHING = auto()


@dataclass(frozen=True)
class Answer:
    """The outcome, with the reason unless the post was accepted."""

    outcome: Outcome
    reason: str = ""
    #: Seconds that the receiver asks for before the next post, of which it gets as many as our own limit allows.
    retry_after: float = 0.0
    #: Whether the receiver asks for another user or password.
    is_unauthorized: bool = False
    #: Whether the receiver was asked at all: it is not without a Secret, or where its address is not allowed.
    was_sent: bool = True
    #: What the receiver answered, if it answered.
    status: int | None = None
    #: How many artifacts were posted.
    size: int = 0

    @property
    def pauses_address(self) -> bool:
        """Whether everything for the address waits."""
        return self.outcome in {Outcome.BUSY, Outcome.UNREACHABLE}


NOTHING = Answer(Outcome.NOTHING, was_sent=False)

#: Whether this process may post at the moment, since no other one does. Raises if it may not any more.
MayPost = Callable[[], bool]


class _Body(aiohttp.BytesPayload):
    """A body that is held back if the process may not post any more when the connection is made at last."""

    def __init__(self, text: str, may_post: MayPost) -> None:
        super().__init__(text.encode())
        self.is_held_back = True
        self._may_post = may_post

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write the body; OSError, which ends the connection, if that must not be."""
        if not self._may_post():
            raise OSError("another gateway may have taken over what is sent")
        self.is_held_back = False
        await super().write_with_length(writer, content_length)


class Poster:
    """The session that everything is posted through. To be entered inside the event loop.

    A post waits while ``may_post`` returns False, and raises what that raises.
    """

    def __init__(self, settings: Settings, may_post: MayPost = lambda: True) -> None:
        self._may_post = may_post
        self._seconds = settings.forward_seconds
        self._guard = AddressGuard(settings)
        # Without a limit: each round has one post in flight, and slow receivers must not take up all connections.
        connector = aiohttp.TCPConnector(limit=0, socket_factory=self._guard.open_socket)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=settings.forward_seconds),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def turn(self) -> None:
        """Wait until this process may post."""
        while not self._may_post():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(_MAY_POST_SECONDS)

    async def post(self, url: str, body: str, auth: BasicAuth | None = None) -> Answer:
        """Post JSON once, with a user and a password if there are some; every way to fail is an answer."""
        while True:
            await self.turn()
            content = _Body(body, self._may_post)
            answer = await self._post(url, content, auth)
            if not content.is_held_back or self._may_post():
                return answer

    async def _post(self, url: str, content: _Body, auth: BasicAuth | None) -> Answer:
        headers = {"Authorization": auth.header} if auth is not None else {}
        try:
            target = self._guard.url(url)
            request = self._session.post(target, data=content, headers=headers, allow_redirects=False)
            async with request as response:
                answer = _judged(response.status, response.headers, await _text(response, auth))
                return replace(answer, status=response.status)
        except AddressRefused as error:
            return _failed("address", Outcome.FAILED, str(error))
        except TimeoutError:
            return _failed("timeout", Outcome.BUSY, f"no answer within {self._seconds:g} s")
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, AddressRefused):
                return _failed("address", Outcome.FAILED, str(error.os_error))
            # aiohttp tells of TLS also where there is none.
            return _failed("connection", Outcome.UNREACHABLE, str(error).replace(" ssl:default", ""))
        except aiohttp.ClientError as error:
            return _failed("connection", Outcome.UNREACHABLE, str(error) or type(error).__name__)


class SecretPoster:
    """Posts to receivers of rounds, with the user and the password of the round's Secret if it names one.

    The database has the Secret's name alone. A Secret that cannot be had, or that the receiver does not take, is no
    refusal: the post waits for its next try. A Secret that is used is read again about once a minute.

    Without ``read`` none can be read, as where there is no API server.
    """

    def __init__(self, poster: Poster, read: ReadSecret | None) -> None:
        self._poster = poster
        self._read = read
        self._readers: dict[tuple[str, str], CallbackSecretReader] = {}

    async def turn(self) -> None:
        """Wait until this process may post."""
        await self._poster.turn()

    async def post(self, url: str, body: str, *, namespace: str | None, secret: str | None) -> Answer:
        """Post JSON once, or twice if the Secret has changed meanwhile. Every way to fail is an answer."""
        if namespace is None or secret is None:
            return await self._poster.post(url, body)
        if self._read is None:
            reason = f'Secret "{secret}" cannot be read: this gateway has no API server'
            return _failed("secret", Outcome.FAILED, reason)
        return await self._post(url, body, self._reader(self._read, namespace, secret), secret)

    async def _post(self, url: str, body: str, reader: CallbackSecretReader, secret: str) -> Answer:
        auth = await reader.read()
        if isinstance(auth, str):
            return _failed("secret", Outcome.FAILED, auth)
        answer = await self._poster.post(url, body, auth)
        if not answer.is_unauthorized:
            return answer
        changed = await reader.read(anew=True)
        if isinstance(changed, str):
            return _failed("secret", Outcome.FAILED, changed)
        if changed != auth:
            answer = await self._poster.post(url, body, changed)
        return _named(answer, secret)

    def _reader(self, read: ReadSecret, namespace: str, secret: str) -> CallbackSecretReader:
        key = namespace, secret
        if key not in self._readers:
            self._readers[key] = CallbackSecretReader(read, namespace, secret, warn=_log.warning)
        return self._readers[key]


def _named(answer: Answer, secret: str) -> Answer:
    """Return the answer with a reason that says what to change."""
    if not answer.is_unauthorized:
        return answer
    reason = f'HTTP 401: the receiver does not take the user and the password of Secret "{secret}": correct the Secret'
    return replace(answer, reason=reason)


async def _text(response: aiohttp.ClientResponse, auth: BasicAuth | None) -> str:
    """Return the answer's beginning as one line, without ``auth`` if the receiver repeats it.

    The status counts even if the rest of the answer does not arrive.
    """
    body = b""
    try:
        while len(body) < ANSWER_BYTES and (more := await response.content.read(ANSWER_BYTES - len(body))):
            body += more
    except (aiohttp.ClientError, TimeoutError):
        response.close()
    text = body.decode(errors="replace")
    return one_line(auth.removed_from(text) if auth is not None else text)[:REASON_CHARACTERS]


def _judged(status: int, headers: Mapping[str, str], text: str) -> Answer:
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return Answer(Outcome.ACCEPTED)
    reason = f"HTTP {status}: {text}" if text else f"HTTP {status}"
    if status < HTTPStatus.BAD_REQUEST:
        return _failed("http_3xx", Outcome.FAILED, f"HTTP {status}: redirects are not followed, name the final address")
    kind: FailureKind = "http_4xx" if status in _CLIENT_ERRORS else "http_5xx"
    answer = _failed(kind, _outcome(status), reason, _retry_after(headers))
    return replace(answer, is_unauthorized=status == HTTPStatus.UNAUTHORIZED)


def _outcome(status: int) -> Outcome:
    if status in _RECEIVER_IN_TROUBLE:
        return Outcome.BUSY
    if status in _CLIENT_ERRORS and status not in NOT_ABOUT_CONTENT:
        return Outcome.REFUSED
    return Outcome.FAILED


def _failed(kind: FailureKind, outcome: Outcome, reason: str, retry_after: float = 0.0) -> Answer:
    metrics.FAILURES.labels(kind).inc()
    return Answer(outcome, reason, retry_after, was_sent=kind not in _NOT_SENT)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Read Retry-After, seconds or a date; 0 without one, or if it is neither."""
    value = headers.get("Retry-After", "")
    try:
        seconds = float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time()
    except (ValueError, OverflowError):  # of which the second is a year beyond what a date can have
        return 0.0
    return max(seconds, 0.0)
