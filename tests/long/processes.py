# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a server's processes."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.vllm.client import Client

#: PoC's flags, with an extension that tells the worker's process.
EXTENSION = ("--worker-extension-cls", "tests.vllm.faults.FaultExtension")
FLAGS = (*EXTENSION, "--middleware", "vllm_poc.server.app.PocMiddleware")


def processes(client: Client) -> list[Path]:
    """Return the folders in /proc of the API server, the engine and its workers."""
    # The API server leads the group of them all.
    group = os.getpgid(int(client.worker("poc_test_process")))
    folders = (folder for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [folder for folder in folders if _group(int(folder.name)) == group]


def resident_bytes(folders: Sequence[Path]) -> int:
    """Return how much memory the processes hold together."""
    return sum(_resident((folder / "status").read_text()) for folder in folders)


def waited_seconds(folders: Sequence[Path]) -> float:
    """Return how long threads of the processes have waited for a CPU, summed over the threads that live."""
    nanoseconds = 0
    for folder in folders:
        for thread in (folder / "task").iterdir():
            with suppress(OSError):  # it has just ended
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def _group(process: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(process)
    return None


def _resident(status: str) -> int:
    found = re.search(r"VmRSS:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found is not None else 0  # a process that has ended has none
