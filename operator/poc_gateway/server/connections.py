# SPDX-License-Identifier: Apache-2.0
"""Bounds of connections: how many one peer may have, how many all, and how long one may be without a request.

The server's own protocol waits for a request's header for as long as the client likes, and a process has a limited
number of file descriptors. So a connection whose header does not arrive in time is closed; and when there are no more
descriptors to spare, the one that has waited longest makes room for the next.
"""

import asyncio
import logging
import resource
from collections import Counter

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


class Connections:
    """The open connections of a server."""

    def __init__(self, settings: Settings, most: int) -> None:
        self.header_seconds = settings.header_seconds
        self._of_peer = settings.peer_connections
        self._most = most
        self._by_peer = Counter[str]()
        # Those without a whole header, the one that has waited longest first.
        self._waiting = dict[BoundedProtocol, None]()
        self._logged_at = float("-inf")

    def admit(self, connection: "BoundedProtocol", peer: str) -> bool:
        """Count a new connection; return whether it may stay."""
        if self._by_peer[peer] >= self._of_peer:
            self._tell(f"{peer} has {self._of_peer} connections (POC_GATEWAY_PEER_CONNECTIONS): others are closed")
            return False
        if self._by_peer.total() >= self._most:
            self._tell(f"there are {self._most} connections: those without a request are closed")
            if not self._waiting:
                return False
            next(iter(self._waiting)).give_up()
        self._by_peer[peer] += 1
        return True

    def forget(self, connection: "BoundedProtocol", peer: str) -> None:
        """Learn that a connection which was admitted is closed."""
        self._waiting.pop(connection, None)
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]

    def waits(self, connection: "BoundedProtocol") -> None:
        """Learn that the header of the connection's next request is still to come."""
        self._waiting[connection] = None

    def asked(self, connection: "BoundedProtocol") -> None:
        """Learn that it has come."""
        self._waiting.pop(connection, None)

    def _tell(self, message: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at > _LOG_SECONDS:
            self._logged_at = now
            _log.warning("%s", message)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, for a connection that is counted and must ask in time. `bounded_by` gives it its table."""

    table: Connections
    _peer: str | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection at once if there are too many; else wait for its first request."""
        super().connection_made(transport)
        peer = self.client[0] if self.client else ""
        if not self.table.admit(self, peer):
            transport.abort()
            return
        self._peer = peer
        self._await_header()

    def data_received(self, data: bytes) -> None:
        """Read on; what comes after an answer is the begin of the next request, or a rest that nobody reads."""
        super().data_received(data)
        if self._timer is None and self._peer is not None and self.cycle is not None and self.cycle.response_complete:
            self._await_header()

    def on_headers_complete(self) -> None:
        """Stop the clock: the request is there."""
        self._stop()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        self._stop()
        if self._peer is not None:
            self.table.forget(self, self._peer)
            self._peer = None
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close a connection whose request has not come in time."""
        self._stop()
        if self._peer is not None:
            self.table.forget(self, self._peer)
            self._peer = None
        if not self.transport.is_closing():
            self.transport.abort()

    def _await_header(self) -> None:
        self.table.waits(self)
        self._timer = self.loop.call_later(self.table.header_seconds, self.give_up)

    def _stop(self) -> None:
        self.table.asked(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded_by(table: Connections) -> type[BoundedProtocol]:
    """Return the protocol for a server whose connections are counted in ``table``."""
    return type("CountedProtocol", (BoundedProtocol,), {"table": table})
