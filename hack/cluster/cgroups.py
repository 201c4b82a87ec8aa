# SPDX-License-Identifier: Apache-2.0
"""The control group that all pods are under, on a machine with cgroup v1 or v2."""

import os
import signal
from pathlib import Path

from hack.toolchain.common import UserError, wait_until

from .layout import OWN_NAME

MOUNT = Path("/sys/fs/cgroup")
KILL_LIMIT = 20.0


def ensure_group() -> None:
    """The kubelet asks for its root group in every hierarchy before it starts."""
    unified = MOUNT / "cgroup.controllers"
    if unified.exists():
        controllers = unified.read_text().split()
        (MOUNT / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
    for parent in _parents():
        (parent / OWN_NAME).mkdir(exist_ok=True)
    _weigh(len(os.sched_getaffinity(0)))


def _weigh(cores: int) -> None:
    """Give all pods together the weight of as many processes as there are cores.

    Without it they weigh as much as one process: beside tests or a build on the same machine they starve.
    """
    for file, one, most in (("cpu/{}/cpu.shares", 1024, 262_144), ("{}/cpu.weight", 100, 10_000)):
        if (path := MOUNT / file.format(OWN_NAME)).exists():
            path.write_text(str(min(one * cores, most)))


def remove_group() -> None:
    """End every process of every pod, then remove the empty groups from the innermost outwards."""
    if not wait_until(_killed, KILL_LIMIT):
        raise UserError(f"Processes of pods do not end: {sorted(_processes())}; find out what they wait for.")
    for group in _groups():
        for path, _, _ in os.walk(group, topdown=False):
            Path(path).rmdir()


def _killed() -> bool:
    processes = _processes()
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended between the listing and the signal
    return not processes


def _processes() -> set[int]:
    """The processes inside, found by the kernel's own list: no name is guessed and no foreign process is hit."""
    lists = (file for group in _groups() for file in group.rglob("cgroup.procs"))
    return {int(pid) for file in lists for pid in file.read_text().split()}


def _groups() -> list[Path]:
    return [parent / OWN_NAME for parent in _parents() if (parent / OWN_NAME).exists()]


def _parents() -> list[Path]:
    """One folder with cgroup v2; one for each hierarchy with cgroup v1."""
    if (MOUNT / "cgroup.controllers").exists():
        return [MOUNT]
    return sorted(path for path in MOUNT.iterdir() if path.is_dir() and not path.is_symlink())
