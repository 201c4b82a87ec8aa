# SPDX-License-Identifier: Apache-2.0
"""The server's end: the signal that asks for it is held back until PoC has delivered what it computed.

    serving -> draining -> the signal goes on    when all is delivered, the time for it is over, or at a second signal

vLLM ends its engine as soon as it sees the signal. Which handlers see it differs from release to release: of the event
loop, of uvicorn, or of both. All of them learn of a signal in one of two ways, by a Python handler or by the wakeup
file descriptor. Both are taken while the server runs, and put back before the signal is raised once more. So vLLM ends
as it would without us, with its own ``--shutdown-timeout``.
"""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import ClassVar

from vllm_poc.logs import get_logger

_log = get_logger(__name__)

#: What ends uvicorn's servers.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Most signals that are read at once; more follow.
_READ = 4096

Handler = Callable[[int, FrameType | None], object] | int | None


@dataclass(frozen=True)
class _Held:
    """What was there before, and the pair of sockets in place of it, which the loop reads."""

    loop: asyncio.AbstractEventLoop
    handlers: dict[signal.Signals, Handler]
    wakeup: int
    reading: socket.socket
    writing: socket.socket


class Termination:
    """Awaits ``drain`` before the process's handlers see the first signal; a second one cancels it.

    One server of a process has the signals. Others of it end as they would without us.
    """

    _taken: ClassVar[bool] = False

    def __init__(self, drain: Callable[[], Awaitable[None]]) -> None:
        self._drain = drain
        self._held: _Held | None = None
        self._draining: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Hold signals back from now on. Does nothing outside of the main thread, which alone may take them."""
        if Termination._taken or threading.current_thread() is not threading.main_thread():
            return
        Termination._taken = True
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        handlers: dict[signal.Signals, Handler] = {number: signal.signal(number, _ignore) for number in SIGNALS}
        wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._held = _Held(asyncio.get_running_loop(), handlers, wakeup, reading, writing)
        self._held.loop.add_reader(reading, self._read, self._held)

    def end(self) -> None:
        """Put the handlers back that were there before. Harmless if that was done."""
        if self._held is None:
            return
        held, self._held = self._held, None
        if not held.loop.is_closed():
            held.loop.remove_reader(held.reading)
        signal.set_wakeup_fd(held.wakeup)
        for number, handler in held.handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        held.reading.close()
        held.writing.close()
        Termination._taken = False

    def _read(self, held: _Held) -> None:
        for number in held.reading.recv(_READ):
            if number in SIGNALS:
                self._asked(signal.Signals(number))
            elif held.wakeup >= 0:  # somebody else's
                with suppress(BlockingIOError):
                    os.write(held.wakeup, bytes([number]))

    def _asked(self, number: signal.Signals) -> None:
        if self._draining is None:
            _log.info("%s: no more PoC work is taken; what is computed is delivered first", number.name)
            self._draining = asyncio.create_task(self._drain_or_log())
            self._draining.add_done_callback(partial(self._let_through, number))
        else:
            _log.warning("%s once more: the server ends at once", number.name)
            self._draining.cancel()

    async def _drain_or_log(self) -> None:
        try:
            await self._drain()
        except Exception:
            _log.exception("what was computed could not be delivered")

    def _let_through(self, number: signal.Signals, _: asyncio.Task[None]) -> None:
        self.end()
        signal.raise_signal(number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the wakeup file descriptor tells of the signal."""
