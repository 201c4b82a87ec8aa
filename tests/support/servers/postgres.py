# SPDX-License-Identifier: Apache-2.0
"""A private PostgreSQL server on a Unix socket, as durable as a real one."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

_BINARIES = Path("/usr/lib/postgresql")
_USER = "postgres"


@dataclass(frozen=True)
class PostgresServer:
    """A running server, reached by the socket in ``folder``."""

    folder: Path

    def new_database(self, *, template: str | None = None) -> str:
        """Make a database, empty or a copy of another that nobody uses, and return its URL."""
        name = f"test_{secrets.token_hex(8)}"
        with psycopg.connect(host=str(self.folder), user=_USER, dbname=_USER, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template or 'template1'}".encode())
        return f"postgresql://{_USER}@/{name}?host={self.folder}"

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stop all of its processes until the block ends: connections stay open, and nothing answers."""
        processes = self._processes()
        try:
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            yield
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def end_sessions(self) -> None:
        """End all sessions of clients, as a restart would."""
        with psycopg.connect(host=str(self.folder), user=_USER, dbname=_USER, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def _processes(self) -> list[int]:
        main = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        return [main, *map(int, children)]


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """Start a server and end it with the block; RuntimeError names the package that lacks."""
    binaries = max(_BINARIES.glob("*/bin"), key=lambda folder: float(folder.parent.name), default=None)
    if binaries is None:
        raise RuntimeError("PostgreSQL is missing: install the Debian package postgresql (make test-unit does)")
    # A socket's path may have 107 characters at most, which pytest's own folders exceed.
    folder = Path(tempfile.mkdtemp(prefix="poc-postgres-"))
    try:
        owner = _USER if os.geteuid() == 0 else None  # PostgreSQL does not run as root
        if owner is not None:
            account = pwd.getpwnam(owner)
            os.chown(folder, account.pw_uid, account.pw_gid)
        data = folder / "data"
        _run(owner, binaries / "initdb", "-D", data, "-U", _USER, "--auth=trust", "--no-locale", "--encoding=UTF8")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c max_connections=50"
        _run(owner, binaries / "pg_ctl", "-D", data, "-l", folder / "log", "-w", "-o", options, "start")
        try:
            yield PostgresServer(folder)
        finally:
            _run(owner, binaries / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder)


def _run(owner: str | None, *command: str | Path) -> None:
    # The server would keep a pipe open, and its reader waiting.
    done = subprocess.run(command, user=owner, cwd="/", stdout=subprocess.DEVNULL, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with status {done.returncode}")
