# SPDX-License-Identifier: Apache-2.0
"""A piece of work that a person waits for: a bar while it goes on, one line when it has ended, and its time kept."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .board import BOARD, Bar, about
from .common import UserError
from .durations import estimate, record

#: Where there is no terminal, work that takes this long is announced.
ANNOUNCED_SECONDS = 20.0
LOOK_SECONDS = 1.0


class Step:
    """A piece of work under way."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        #: What its last line says beside the time.
        self.result = ""
        #: Whether another step was inside, such as a build that is needed once.
        self.had_steps = False

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._bar.elapsed

    def tell(self, detail: str) -> None:
        """Say what it does or waits for."""
        BOARD.tell(self._bar, detail)

    def closing(self, ending: str = "") -> str:
        """Return its last line; ``ending`` is how it ended, if not well."""
        seconds = f"{self.elapsed:.1f} s"
        if ending:
            return f"{self._bar.title}: {ending} after {seconds}"
        return f"{self._bar.title}: {self.result} ({seconds})" if self.result else f"{self._bar.title}: {seconds}"


#: The innermost step under way in this thread.
_innermost: ContextVar[Step | None] = ContextVar("innermost", default=None)


@contextmanager
def step(title: str, *, of: str = "") -> Iterator[Step]:
    """Show that a piece of work goes on, and how long it will still take as far as that is known.

    ``of`` is its name from run to run, where the title has a version or a digest. The time of a step that had others
    inside is not kept: theirs are, and they may have been builds that the next run does not need.
    """
    bar = Bar(title, estimate(of or title))
    begun = Step(bar)
    if around := _innermost.get():
        around.had_steps = True
    mark = _innermost.set(begun)
    opening = bar.expected is not None and bar.expected >= ANNOUNCED_SECONDS
    BOARD.begin(bar, f"{title}: takes {about(bar.expected or 0)}" if opening else "")
    try:
        yield begun
    except KeyboardInterrupt:
        BOARD.end(bar, begun.closing("interrupted"))
        raise
    except BaseException:
        BOARD.end(bar, begun.closing("failed"))
        raise
    finally:
        _innermost.reset(mark)
    BOARD.end(bar, begun.closing())
    if not begun.had_steps:
        record(of or title, bar.elapsed)


def follow(what: str, look: Callable[[], tuple[bool, str]], limit: float) -> str:
    """Show what ``look`` tells until it says that it is done; return its last words.

    ``look`` returns whether the thing is done, and what it does or waits for. UserError after ``limit`` seconds.
    """
    with step(what) as waiting:
        while True:
            done, text = look()
            if done:
                waiting.result = text
                return text
            if waiting.elapsed > limit:
                raise UserError(f"{what} did not get ready within {limit:.0f} s; last seen: {text}")
            waiting.tell(text)
            time.sleep(LOOK_SECONDS)
