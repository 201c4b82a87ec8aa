# SPDX-License-Identifier: Apache-2.0
"""Bounds of connections and of the bodies under way: how many, how large, and how long one may take to arrive.

The server's own protocol waits for a request's header for as long as the client likes, and a process has a limited
number of file descriptors. So a connection whose header does not arrive in time is closed, and so is one whose TLS
handshake does not end. When there are no more descriptors to spare, the one that has waited longest makes room for the
next, and then the one that has rested longest between two requests. Bodies have a bound for their memory and for their
time in the same way.
"""

import asyncio
import logging
import resource
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import Message, Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from poc_gateway.errors import Refusal
from poc_gateway.node_api.chat import ChatPlaces
from poc_gateway.settings import Settings

_log = logging.getLogger(__name__)

#: File descriptors that are kept for the database, receivers and pods.
SPARE_DESCRIPTORS = 256
#: Seconds between two lines of the log about connections that were closed.
_LOG_SECONDS = 60.0


def raise_descriptor_limit() -> int:
    """Let the process have as many file descriptors as it may; return how many connections that leaves room for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return max(most - SPARE_DESCRIPTORS, most // 2)


class Connection(Protocol):
    """What is counted."""

    def give_up(self) -> None:
        """Close it: its request has not come in time, or others need the room."""


@dataclass
class _Peer:
    connections: int = 0
    # Those between two requests, the one that has rested longest first.
    resting: dict[Connection, None] = field(default_factory=dict)


class Connections:
    """The open connections of a server, and its requests for chat, each of which has a connection to a pod besides."""

    def __init__(self, settings: Settings, most: int) -> None:
        self.header_seconds = settings.header_seconds
        self.chats = ChatPlaces(most=most, of_peer=settings.peer_connections)
        self._of_peer = settings.peer_connections
        self._most = most
        self._count = 0
        self._by_peer = defaultdict[str, _Peer](_Peer)
        # Those without a whole header and those between two requests, the one that has waited longest first.
        self._waiting = dict[Connection, None]()
        self._resting = dict[Connection, str]()
        self._logged_at = float("-inf")

    def admit(self, connection: Connection, peer: str) -> bool:
        """Count a new connection, whose header is awaited; return whether it may stay."""
        if self._by_peer[peer].connections >= self._of_peer:
            self._tell(f"{peer} has {self._of_peer} connections (POC_GATEWAY_PEER_CONNECTIONS): others are closed")
            if not _gave_up(self._by_peer[peer].resting):
                return False
        if self._count + self.chats.count >= self._most:
            self._tell(f"there are {self._most} connections: those without a request are closed")
            if not (_gave_up(self._waiting) or _gave_up(self._resting)):
                self._drop_if_unused(peer)
                return False
        self._by_peer[peer].connections += 1
        self._count += 1
        self._waiting[connection] = None
        return True

    def forget(self, connection: Connection, peer: str) -> None:
        """Learn that a connection which was admitted is closed."""
        self.asked(connection)
        self._count -= 1
        self._by_peer[peer].connections -= 1
        self._drop_if_unused(peer)

    def waits(self, connection: Connection) -> None:
        """Learn that the header of the connection's next request has begun to come."""
        self.asked(connection)
        self._waiting[connection] = None

    def rests(self, connection: Connection, peer: str) -> None:
        """Learn that the connection's requests are all answered."""
        self._resting[connection] = peer
        self._by_peer[peer].resting[connection] = None

    def asked(self, connection: Connection) -> None:
        """Learn that the connection neither waits nor rests any more."""
        self._waiting.pop(connection, None)
        peer = self._resting.pop(connection, None)
        if peer is not None:
            del self._by_peer[peer].resting[connection]

    def _drop_if_unused(self, peer: str) -> None:
        if not self._by_peer[peer].connections:
            del self._by_peer[peer]

    def _tell(self, message: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at > _LOG_SECONDS:
            self._logged_at = now
            _log.warning("%s", message)


def _gave_up(candidates: dict[Connection, Any]) -> bool:
    first = next(iter(candidates), None)
    if first is not None:
        first.give_up()
    return first is not None


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, for a connection that is counted and must ask in time. `bounded_by` gives it its table."""

    table: Connections
    #: If a TLS handshake comes first: what to call when it is over. It returns when the connection was made.
    shaken: Callable[[], float] | None = None
    _peer: str | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection at once if there are too many; else wait for its first request."""
        super().connection_made(transport)
        began = self.shaken() if self.shaken is not None else self.loop.time()
        peer = self.client[0] if self.client else ""
        if not self.table.admit(self, peer):
            transport.abort()
            return
        self._peer = peer
        self._await_header(began)

    def data_received(self, data: bytes) -> None:
        """Read on; what comes after an answer is the begin of the next request, or a rest that nobody reads."""
        super().data_received(data)
        if self._timer is None and self._peer is not None and self.cycle is not None and self.cycle.response_complete:
            self.table.waits(self)
            self._await_header(self.loop.time())

    def on_headers_complete(self) -> None:
        """Stop the clock: the request is there."""
        self._stop()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Let others have the room of a connection without another request, if they need it."""
        super().on_response_complete()
        if self._peer is not None and self._timer is None and self.cycle.response_complete:
            self.table.rests(self, self._peer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        self._forget()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close a connection whose request has not come in time, or whose room others need."""
        self._forget()
        if not self.transport.is_closing():
            self.transport.abort()

    def _forget(self) -> None:
        self._stop()
        if self._peer is not None:
            self.table.forget(self, self._peer)
            self._peer = None

    def _await_header(self, began: float) -> None:
        self._timer = self.loop.call_at(began + self.table.header_seconds, self.give_up)

    def _stop(self) -> None:
        self.table.asked(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded_by(table: Connections) -> type[BoundedProtocol]:
    """Return the protocol for a server whose connections are counted in ``table``."""
    return type("CountedProtocol", (BoundedProtocol,), {"table": table})


class Body:
    """One request's body that is under way."""

    def __init__(self, bodies: "Bodies") -> None:
        loop = asyncio.get_running_loop()
        self.begun = loop.time()
        self.taken = 0
        self.whole = False
        self.evicted = False
        self._bodies = bodies
        self._timeout: asyncio.Timeout | None = None

    async def next(self, receive: Receive) -> Message:
        """Return the next message; a Refusal if it does not come in time, or others need the room."""
        if self.whole:
            return await receive()
        try:
            async with asyncio.timeout_at(self.begun + self._bodies.seconds) as self._timeout:
                message = await receive()
        except TimeoutError:
            raise (self._bodies.busy() if self.evicted else self._bodies.slow()) from None
        finally:
            self._timeout = None
        if self.evicted:
            raise self._bodies.busy()
        self.whole = not message.get("more_body", False)
        self._bodies.add(self, len(message.get("body", b"")))
        return message

    def evict(self) -> None:
        """End the body, since others need the room."""
        self.evicted = True
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """The bodies of all requests under way, which may have ``most`` bytes together, and each so many seconds.

    When there is no room for more, the body makes room that has been under way for longest and is not whole: one that
    stalls must not stop those that arrive.
    """

    #: A body that is younger is not slow.
    PATIENCE_SECONDS = 1.0

    def __init__(self, most: int, seconds: float) -> None:
        self.seconds = seconds
        self._most = most
        self._bytes = 0
        self._under_way = dict[Body, None]()

    def begin(self) -> Body:
        """Return a new one, of which nothing has arrived."""
        body = Body(self)
        self._under_way[body] = None
        return body

    def add(self, body: Body, size: int) -> None:
        """Count what has arrived of a body; a Refusal if there is no room for it."""
        body.taken += size
        if body not in self._under_way:  # it was passed on, and takes no room here
            return
        self._bytes += size
        while size and self._bytes > self._most:
            slow = self._slowest(body)
            if slow is None:
                raise self.busy()
            self.end(slow)
            slow.evict()

    def end(self, body: Body) -> None:
        """Give a body's room back."""
        if body in self._under_way:
            del self._under_way[body]
            self._bytes -= body.taken

    def _slowest(self, asking: Body) -> Body | None:
        now = asyncio.get_running_loop().time()
        for body in self._under_way:
            if now - body.begun < self.PATIENCE_SECONDS:
                return None
            if body is not asking and body.taken and not body.whole:
                return body
        return None

    def busy(self) -> Refusal:
        """Return the answer to one that finds no room."""
        detail = f"the bodies of all requests under way exceed {self._most} bytes: send this one again in a moment"
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "Busy", detail, headers={"Retry-After": "1"})

    def slow(self) -> Refusal:
        """Return the answer to one that has not come in time."""
        detail = (
            f"the body did not arrive within {self.seconds:g} s: send less at once or raise POC_GATEWAY_BODY_SECONDS"
        )
        return Refusal(HTTPStatus.REQUEST_TIMEOUT, "RequestTimeout", detail, headers={"Connection": "close"})
