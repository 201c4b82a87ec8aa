# SPDX-License-Identifier: Apache-2.0
"""Health checks: one question with a short time limit, answered by yes or no."""

import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hack.toolchain.common import UserError, run

QUESTION_LIMIT = 3.0


class Check(Protocol):
    """A question to one part."""

    def healthy(self) -> bool:
        """Whether the part answers as it should."""


@dataclass(frozen=True)
class HttpCheck:
    """Healthy when a GET is answered with a status of success."""

    url: str
    authority: Path | None = None

    def healthy(self) -> bool:
        """Ask the URL; a server's certificate must be signed by the authority."""
        context = ssl.create_default_context(cafile=self.authority) if self.authority else None
        # No proxy, whatever the environment says: the address is this machine's.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        try:
            urllib.request.build_opener(*handlers).open(self.url, timeout=QUESTION_LIMIT).close()
        except OSError:  # of which URLError is a kind
            return False
        return True


@dataclass(frozen=True)
class CommandCheck:
    """Healthy when a command ends well."""

    argv: tuple[str, ...]

    def healthy(self) -> bool:
        """Run the command."""
        try:
            run(self.argv, limit=QUESTION_LIMIT)
        except UserError:
            return False
        return True
