# SPDX-License-Identifier: Apache-2.0
"""One line that updates: what the demo does, or waits for."""

import sys
import time
from collections.abc import Callable

from hack.toolchain.common import UserError

#: Seconds between two lines where the output is not a terminal, unless the text changes.
QUIET_SECONDS = 15.0


class Progress:
    """A line on a terminal; in a log, a new line when the text changes."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._shown = ""
        self._when = 0.0

    def show(self, text: str) -> None:
        """Replace the line by ``text``."""
        if self._terminal:
            sys.stdout.write(f"\r\x1b[2K{text[:160]}")
            sys.stdout.flush()
        elif text != self._shown and time.monotonic() - self._when > QUIET_SECONDS:
            print(text, flush=True)
            self._when = time.monotonic()
        self._shown = text

    def end(self, text: str) -> None:
        """Leave ``text`` as the line's last state."""
        if self._terminal:
            sys.stdout.write("\r\x1b[2K")
        print(text, flush=True)


def follow(what: str, look: Callable[[], tuple[bool, str]], limit: float) -> str:
    """Show what ``look`` tells until it says that it is done; return its last words.

    ``look`` returns whether the thing is done, and what it does or waits for.
    """
    progress, begin = Progress(), time.monotonic()
    while True:
        done, text = look()
        seconds = time.monotonic() - begin
        if done:
            progress.end(f"{what}: {text} ({seconds:.0f} s)")
            return text
        if seconds > limit:
            progress.end(f"{what}: {text}")
            raise UserError(f"{what} did not get ready within {limit:.0f} s; last seen: {text}")
        progress.show(f"{what}: {text} [{seconds:.0f} s]")
        time.sleep(1)
