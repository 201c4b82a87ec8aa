# SPDX-License-Identifier: Apache-2.0
"""The stages under way: a bar for each on a terminal, plain lines elsewhere.

The bars stand below everything that was printed, and are drawn anew twice a second. No mode of the terminal is changed
and the cursor stays visible, so a program that is killed leaves nothing to repair. Where there is no terminal, a line
now and then says what goes on, so that nobody takes a long stage for one that hangs.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil

#: Seconds between two drawings of the bars.
DRAW_SECONDS = 0.5
#: Where the output is not a terminal, nothing is printed for so many seconds at most while a stage is under way.
QUIET_SECONDS = 30.0
_CELLS = 20
_TITLE = 36
#: A time left is said in minutes above the first of these, in tens of seconds above the second, and below in words.
_MINUTES_ABOVE, _SECONDS_ABOVE = 90, 10
#: What writing says when nobody has the other end any more: of a terminal, of a pipe.
_GONE = (errno.EIO, errno.EPIPE)


@dataclass(eq=False)
class Bar:
    """A stage as the board shows it. ``expected`` is in seconds; None: nobody knows how long it takes."""

    title: str
    expected: float | None = None
    detail: str = ""
    begun: float = field(default_factory=time.monotonic)
    #: Whether a line has told of its start, where there is no terminal.
    announced: bool = False

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self.begun

    def line(self, width: int) -> str:
        """Return the bar as one line of at most ``width`` characters."""
        bar = f"{self.title[:_TITLE]} [{self._cells()}] {self._clock}"
        parts = (bar, time_left(self.elapsed, self.expected), self.detail)
        return "  ".join(filter(None, map(printable, parts)))[:width]

    @property
    def words(self) -> str:
        """The same in words, for a log."""
        parts = (self._clock, time_left(self.elapsed, self.expected), self.detail)
        return f"{self.title} ({', '.join(filter(None, map(printable, parts)))})"

    @property
    def _clock(self) -> str:
        minutes, seconds = divmod(int(self.elapsed), 60)
        return f"{minutes}:{seconds:02}"

    def _cells(self) -> str:
        if self.expected is None:
            # It moves, and claims nothing.
            place = int(self.elapsed / DRAW_SECONDS) % (_CELLS - 2)
            return "." * place + "###" + "." * (_CELLS - 3 - place)
        # Full is what has ended.
        full = min(int(_CELLS * self.elapsed / max(self.expected, 1.0)), _CELLS - 1)
        return "#" * full + "." * (_CELLS - full)


def time_left(elapsed: float, expected: float | None) -> str:
    """Say how long it will still take, no more precisely than an estimate can; nothing without one."""
    if expected is None:
        return ""
    left = expected - elapsed
    if left <= 0:
        return "longer than expected"
    if left <= _SECONDS_ABOVE:
        return "a few seconds left"
    return f"{about(left)} left"


def about(seconds: float) -> str:
    """Return a time in words, rounded up to minutes or to ten seconds."""
    if seconds > _MINUTES_ABOVE:
        return f"about {ceil(seconds / 60)} min"
    return f"about {ceil(seconds / 10) * 10} s"


def printable(text: str) -> str:
    """Return a text that takes one line, without anything that a terminal would obey."""
    return "".join(one for one in " ".join(text.split()) if one.isprintable())


def on_terminal() -> bool:
    """Whether standard output is a terminal whose lines can be drawn anew."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _size() -> os.terminal_size:
    """Return the terminal's size as it is now, whatever COLUMNS said when the program began."""
    try:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        columns, lines = 0, 0
    return os.terminal_size((columns or 80, lines or 24))


def _write_to_nobody() -> None:
    """Discard what is printed from now on: else the program's own lines, or the flush at its end, would fail."""
    with suppress(OSError, ValueError):
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, sys.stdout.fileno())
        os.close(nobody)


class Board:
    """All bars of this process, whose stages may run in several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bars: list[Bar] = []
        #: The lengths of the lines that are on the screen below the printed ones.
        self._drawn: list[int] = []
        self._drawing: threading.Thread | None = None
        #: When a line was printed last, or the first of these stages began.
        self._said = time.monotonic()

    def begin(self, bar: Bar, opening: str) -> None:
        """Show a bar from now on; where there is no terminal, print ``opening`` unless it is empty."""
        with self._writing():
            self._said = max(self._said, bar.begun) if not self._bars else self._said
            self._bars.append(bar)
            if not on_terminal():
                self._announce(bar, opening)
            self._redraw()
            if self._drawing is None:
                self._drawing = threading.Thread(target=self._go_on, name="progress", daemon=True)
                self._drawing.start()

    def tell(self, bar: Bar, detail: str) -> None:
        """Say what a stage does or waits for."""
        bar.detail = detail
        if not bar.announced and not on_terminal():
            self._announce(bar, f"{bar.title}: {printable(detail)}")

    def _announce(self, bar: Bar, opening: str) -> None:
        if opening:
            bar.announced = True
            self.say(opening)

    def end(self, bar: Bar, closing: str) -> None:
        """Take a bar away and leave one line in its place."""
        with self._lock:
            if bar in self._bars:
                self._bars.remove(bar)
            self.say(closing)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        with self._writing():
            self._erase()
            print(text, flush=True)
            self._said = time.monotonic()
            self._draw()

    def _go_on(self) -> None:
        """Draw the bars until there are none; where there is no terminal, say now and then which there are."""
        while True:
            time.sleep(DRAW_SECONDS)
            with self._writing():
                if not self._bars:
                    self._drawing = None
                    return
                if not on_terminal() and time.monotonic() - self._said >= QUIET_SECONDS:
                    self.say(f"still under way: {', '.join(bar.words for bar in self._bars)}")
                self._redraw()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let one thread write. Where the terminal has gone nobody looks any more, and the work goes on."""
        with self._lock:
            try:
                yield
            except (OSError, ValueError) as error:
                self._bars.clear()
                self._drawn.clear()
                if isinstance(error, OSError) and error.errno in _GONE:
                    _write_to_nobody()

    def _redraw(self) -> None:
        self._erase()
        self._draw()

    def _draw(self) -> None:
        if not self._bars or not on_terminal():
            return
        size = _size()
        # One character less than the terminal has: in the last column some begin a new row.
        lines = [bar.line(max(size.columns - 1, 1)) for bar in self._bars]
        lines = lines[: max(size.lines - 1, 1)]
        self._drawn = [len(line) for line in lines]
        sys.stdout.write("\n".join(lines))
        sys.stdout.flush()

    def _erase(self) -> None:
        """Remove the bars. A terminal that has become narrower since has broken their lines into several rows."""
        if not self._drawn:
            return
        columns = _size().columns
        above = sum(max(ceil(length / columns), 1) for length in self._drawn) - 1
        self._drawn = []
        sys.stdout.write("\r" + (f"\x1b[{above}A" if above else "") + "\x1b[J")


BOARD = Board()
