# SPDX-License-Identifier: Apache-2.0
"""Starting, recognising and stopping the parts' processes: only what was recorded at its start is stopped."""

import hashlib
import json
import os
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from hack.toolchain.common import ERROR_LINES, UserError, wait_until
from hack.toolchain.steps import step

from .layout import folder, log, state
from .parts import Part

RUNNING_CHECK_LIMIT = 10.0
TERMINATE_LIMIT = 20.0
KILL_LIMIT = 10.0


@dataclass(frozen=True)
class Record:
    """Who a process is: a pid is used again sooner or later, a pid with its start time and boot is not."""

    pid: int
    start_time: int
    boot: str
    fingerprint: str  # of the command and of the files that it read at its start

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return self.boot == _boot() and self.start_time == _start_time(self.pid)


def ensure_running(part: Part) -> None:
    """Reuse the part if it is healthy and as configured; otherwise start it and wait for its health."""
    record = find(part.name)
    if record and record.alive():
        same = record.fingerprint == _fingerprint(part)
        if same and wait_until(part.check.healthy, RUNNING_CHECK_LIMIT):
            return
        stop(part.name)
    with step(part.name):
        _start(part)


def find(name: str) -> Record | None:
    """The record of a part, whether it lives or not."""
    path = _record_path(name)
    return Record(**json.loads(path.read_text())) if path.exists() else None


def running(name: str) -> bool:
    """Whether the part's recorded process still runs."""
    record = find(name)
    return record is not None and record.alive()


def recorded() -> list[str]:
    """The names of the parts that were started, in the order of their start."""
    records = (state() / "processes").glob("*.json")
    return [path.stem for path in sorted(records, key=lambda path: path.stat().st_mtime_ns)]


def stop(name: str) -> None:
    """End a recorded process: politely first, and for good when it does not listen."""
    record = find(name)
    if record is None:
        return
    for number, limit in ((signal.SIGTERM, TERMINATE_LIMIT), (signal.SIGKILL, KILL_LIMIT)):
        if not record.alive():
            break
        os.kill(record.pid, number)
        wait_until(lambda: not record.alive(), limit)
    if record.alive():
        raise UserError(f"{name} (process {record.pid}) does not end even by SIGKILL: restart the machine.")
    _record_path(name).unlink()


def _start(part: Part) -> None:
    folder("logs")
    folder("processes")
    with log(part.name).open("ab") as output:
        process = subprocess.Popen(
            part.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
        )
    _save(part, process.pid)
    failed = False

    def settled() -> bool:
        nonlocal failed
        failed = process.poll() is not None
        return failed or part.check.healthy()

    if not wait_until(settled, part.limit) or failed:
        what = f"ended with status {process.returncode}" if failed else f"was not healthy within {part.limit:.0f} s"
        raise UserError(f"{part.name} {what}; the end of {log(part.name)}:\n{_tail(log(part.name))}")


def _save(part: Part, pid: int) -> None:
    record = Record(pid, _start_time(pid), _boot(), _fingerprint(part))
    path = _record_path(part.name)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(asdict(record)))
    unfinished.rename(path)


def _fingerprint(part: Part) -> str:
    content = hashlib.sha256("\0".join(part.argv).encode())
    for file in part.files:
        content.update(file.read_bytes())
    return content.hexdigest()


def _record_path(name: str) -> Path:
    return state() / "processes" / f"{name}.json"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_time(pid: int) -> int:
    """The start of a process in clock ticks since the boot; -1 if it is gone or only its status is left."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    # The second field, the name, may hold blanks and brackets: count the fields after the last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    return -1 if fields[0] in "ZX" else int(fields[19])


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-ERROR_LINES:])
