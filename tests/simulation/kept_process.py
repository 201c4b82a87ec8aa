# SPDX-License-Identifier: Apache-2.0
"""A process of this machine that is started again whenever it ends, as a kubelet does.

It can be killed, and what it uses is read from /proc.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

from hack.images.site import ROOT

#: As long as a kubelet waits at first before it starts an ended container again.
RESTART_SECONDS = 1.0
END_SECONDS = 30.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_PYTHON = {
    "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("operator", "image", ".")),
    # Bytecode, as the images have it: the first start writes it, beside nothing of the checkout.
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "bytecode"),
}


class KeptProcess:
    """Runs ``argv`` with this checkout's packages and further variables; its output goes to ``log``."""

    def __init__(self, argv: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._argv = argv
        self._environment = {**os.environ, **_PYTHON, **variables}
        self.log = log
        self._process: asyncio.subprocess.Process | None = None
        self._restart_seconds = RESTART_SECONDS
        self._started = asyncio.Event()
        #: When the process ended and when the next one started.
        self.gaps: list[tuple[float, float]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep it running until the block ends; then it ends in order."""
        await self._start()
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            await self._end()

    async def kill(self, pause_seconds: float) -> None:
        """End it by SIGKILL; it is started again after ``pause_seconds``. Returns when it runs again."""
        self._restart_seconds = pause_seconds
        self._started.clear()
        with contextlib.suppress(ProcessLookupError):
            self._alive().kill()
        await self._started.wait()

    async def hang(self, seconds: float) -> None:
        """Stop it for so long, as a machine does that stands still."""
        process = self._alive()
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the present process has used."""
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def rss_bytes(self) -> int:
        """Memory that the present process holds."""
        return int((self._folder / "statm").read_text().split()[1]) * _PAGE_BYTES

    @property
    def peak_rss_bytes(self) -> int:
        """The most memory that the present process has held so far."""
        (line,) = re.findall(r"^VmHWM:\s*(\d+) kB$", (self._folder / "status").read_text(), re.MULTILINE)
        return int(line) * 1024

    def prefer(self, niceness: int) -> None:
        """Give the present process, and the threads it starts, this niceness. PermissionError if it may not have it."""
        os.setpriority(os.PRIO_PROCESS, self._alive().pid, niceness)

    @property
    def _folder(self) -> Path:
        return Path("/proc") / str(self._alive().pid)

    def _alive(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def _start(self) -> None:
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, env=self._environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._started.set()

    async def _keep(self) -> None:
        while True:
            await self._alive().wait()
            ended = monotonic()
            await asyncio.sleep(self._restart_seconds)
            self._restart_seconds = RESTART_SECONDS
            await self._start()
            self.gaps.append((ended, monotonic()))

    async def _end(self) -> None:
        process = self._alive()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                process.send_signal(number)
                await asyncio.wait_for(process.wait(), END_SECONDS)
