# SPDX-License-Identifier: Apache-2.0
"""TLS of the network's port: the certificate and its key, read anew when their files change.

A Secret that is mounted changes in place when its certificate is renewed. Connections that stand keep the certificate
that they began with.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Self

_log = logging.getLogger(__name__)

#: Pause between two looks at the files.
LOOK_SECONDS = 10.0


class Certificate:
    """A certificate chain and its key. ValueError if they cannot be used."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._stamps()
        self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

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

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
