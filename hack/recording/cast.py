# SPDX-License-Identifier: Apache-2.0
"""Recordings of a terminal in asciinema's format, version 2: https://docs.asciinema.org/manual/asciicast/v2/."""

import codecs
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hack.toolchain.common import UserError

#: What stands before a command.
PROMPT = "\x1b[1;32m$\x1b[0m "
#: Seconds for a letter that is typed, before a command begins, and after it has ended.
TYPE_SECONDS, ENTER_SECONDS, REST_SECONDS = 0.035, 0.4, 2.5
_VERSION, _BYTES = 2, 65_536


@dataclass
class Cast:
    """What a terminal of so many columns and rows got: texts, each with its second since the beginning, as 1.234."""

    columns: int
    rows: int
    title: str
    events: list[tuple[float, str]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.events[-1][0] if self.events else 0.0

    def write(self, path: Path) -> None:
        """Write it as asciinema reads it."""
        header = {"version": _VERSION, "width": self.columns, "height": self.rows, "title": self.title}
        lines = [header, *([at, "o", text] for at, text in self.events)]
        path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))


def read(path: Path) -> Cast:
    """Return the recording in a file; UserError if there is none of this format."""
    try:
        header, *events = [json.loads(line) for line in path.read_text().splitlines() if line]
        if header["version"] != _VERSION:
            raise UserError(f"{path} has version {header['version']} of asciinema's format: record it in version 2.")
        output = [(float(at), str(text)) for at, kind, text in events if kind == "o"]
        return Cast(int(header["width"]), int(header["height"]), str(header.get("title", "")), output)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no recording of asciinema's format ({error!r}): record it again.") from error


class Recorder:
    """Types commands and runs them in a terminal, and keeps what comes out of it and when."""

    def __init__(self, cast: Cast, environment: Mapping[str, str], folder: Path) -> None:
        self.cast = cast
        self._environment = {**environment, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PAGER": "cat"}
        self._folder = folder
        self._began = time.monotonic()

    def run(self, command: str, limit: float) -> None:
        """Type a command and run it. UserError if it fails, or runs for longer than ``limit`` seconds."""
        self._put(PROMPT)
        for letter in command:
            time.sleep(TYPE_SECONDS)
            self._put(letter)
        time.sleep(ENTER_SECONDS)
        self._put("\r\n")
        before = len(self.cast.events)
        code = self._run(["bash", "-c", command], limit)
        if code != 0:
            told = "".join(text for _, text in self.cast.events[before:])
            raise UserError(f"{command} ended with exit status {code}: mend it, then record again. It said:\n{told}")
        time.sleep(REST_SECONDS)

    def _put(self, text: str) -> None:
        # As the file has it, so that a picture is the same whether it is drawn from this or from the file.
        self.cast.events.append((round(time.monotonic() - self._began, 3), text))

    def _run(self, argv: Sequence[str], limit: float) -> int:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self.cast.rows, self.cast.columns, 0, 0))
        try:
            with subprocess.Popen(
                argv,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=dict(self._environment),
                cwd=self._folder,
                start_new_session=True,
            ) as process:
                os.close(theirs)
                try:
                    for text in _texts(ours, time.monotonic() + limit):
                        self._put(text)
                except TimeoutError:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise UserError(f"{argv[-1]} runs for more than {limit:.0f} s: record a shorter one.") from None
            return process.returncode
        finally:
            os.close(ours)


def _texts(terminal: int, until: float) -> Iterator[str]:
    """Return what programs write to a terminal until the last of them has ended. TimeoutError if that is too late."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a letter may come in two parts
    while True:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError
        try:
            found = os.read(terminal, _BYTES)
        except OSError:  # Linux says so when nobody has the other end any more
            return
        if not found:
            return
        yield decoder.decode(found)
