# SPDX-License-Identifier: Apache-2.0
"""TLS of the network's port: the certificate and its key, read anew when their files change, and handshakes.

A Secret that is mounted changes in place when its certificate is renewed. Connections that stand keep the certificate
that they began with.

A server of asyncio's shows a TLS connection only when its handshake is over, and waits for that for a minute. So
connections are accepted here: they are counted from then on, and the deadline of a request's header includes the
handshake.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Self

from poc_gateway.metrics import CERTIFICATE_EXPIRATION
from poc_gateway.server.connections import BoundedProtocol, Connections

_log = logging.getLogger(__name__)

#: Pause between two looks at the files.
LOOK_SECONDS = 10.0
#: Connections that are accepted in one go, before others are served.
_AT_ONCE = 100
#: Pause after no connection could be accepted, for want of file descriptors.
_ACCEPT_SECONDS = 0.1


class Certificate:
    """A certificate chain and its key, as the network's port serves them. ValueError if they cannot be used."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._stamps()
        self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        #: When the certificate in use expires; None if that cannot be read.
        self.expires: datetime | None = None
        self._tell()

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None) -> Self | None:
        """Return the certificate of the settings; None without one."""
        return cls(certificate, key) if certificate is not None and key is not None else None

    async def watch(self) -> None:
        """Take over changed files until cancelled; what cannot be used is logged, and the old certificate stays."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            stamps = self._stamps()
            if stamps == self._seen:
                continue
            try:
                # A key that does not belong to its certificate would spoil the context that is in use.
                self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
                self._load(self.context)
            except ValueError as error:
                _log.warning("the renewed certificate cannot be used, and the old one stays: %s", error)
                continue
            self._seen = stamps
            self._tell()
            _log.info("the certificate of the network's port was renewed")

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        certificate, key = self._files
        try:
            # Without a function for the password OpenSSL would ask at the terminal.
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (OSError, ValueError) as error:
            what = f"POC_GATEWAY_TLS_CERT={certificate} with POC_GATEWAY_TLS_KEY={key}"
            raise ValueError(
                f"{what}: {error}; both must be PEM files, and the key that of the certificate, unencrypted"
            ) from None
        return context

    def _tell(self) -> None:
        """Read when the certificate that was just loaded expires; it is served even if that cannot be read."""
        try:
            self.expires = _expires(self._files[0])
        except (OSError, ValueError) as error:
            self.expires = None
            _log.warning("nobody can tell when the certificate of the network's port expires: %s", error)
        if self.expires is None:
            CERTIFICATE_EXPIRATION.clear()
        else:
            CERTIFICATE_EXPIRATION.labels("network").set(self.expires.timestamp())

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _expires(file: Path) -> datetime:
    """Return when the first certificate of a chain expires, which is the server's own; ValueError if it is odd."""
    from cryptography import x509  # noqa: PLC0415 - a gateway without TLS starts sooner

    try:
        return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except x509.InvalidVersion as error:  # no ValueError, and OpenSSL serves such a certificate
        raise ValueError(str(error)) from error


class TlsListener:
    """Accepts connections at ``listener``, and hands each to a new protocol when its handshake is over."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        table: Connections,
        protocol: Callable[[], BoundedProtocol],
    ) -> None:
        self._listener = listener
        self._context = context
        self._table = table
        self._protocol = protocol
        self._handshakes = set[_Handshake]()
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more, and end all handshakes."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for handshake in list(self._handshakes):
            handshake.give_up()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*[handshake.task for handshake in self._handshakes], return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                _log.warning("no connection can be accepted: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(_ACCEPT_SECONDS, self._accept_again)
                return
            connection.setblocking(False)
            handshake = _Handshake(connection, address[0], self._table)
            if self._table.admit(handshake, handshake.peer):
                handshake.begin(self._protocol(), self._context)
                self._handshakes.add(handshake)
                handshake.task.add_done_callback(partial(self._ended, handshake))
            else:
                connection.close()

    def _ended(self, handshake: "_Handshake", _: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)


class _Handshake:
    """A connection until its handshake is over."""

    task: asyncio.Task[None]

    def __init__(self, connection: socket.socket, peer: str, table: Connections) -> None:
        self.peer = peer
        self._connection = connection
        self._table = table
        self._began = asyncio.get_running_loop().time()
        self._counts = True

    def begin(self, protocol: BoundedProtocol, context: ssl.SSLContext) -> None:
        """Shake hands; then the connection is the protocol's."""
        protocol.shaken = self._over
        self.task = asyncio.create_task(self._run(protocol, context))

    def give_up(self) -> None:
        """Close the connection, since others need the room or the server ends."""
        self._over()
        self.task.cancel()

    async def _run(self, protocol: BoundedProtocol, context: ssl.SSLContext) -> None:
        loop, seconds = asyncio.get_running_loop(), self._table.header_seconds
        try:
            # What goes wrong here is the peer's affair, as what it sends later.
            with suppress(OSError):
                await loop.connect_accepted_socket(
                    lambda: protocol, self._connection, ssl=context, ssl_handshake_timeout=seconds
                )
        finally:
            self._over()

    def _over(self) -> float:
        """Count the connection no more, and return when it was made."""
        if self._counts:
            self._counts = False
            self._table.forget(self, self.peer)
        return self._began
