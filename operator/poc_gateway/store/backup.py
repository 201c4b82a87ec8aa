# SPDX-License-Identifier: Apache-2.0
"""Copies of a SQLite database: made while a gateway uses it, and put back while none does.

A copy has everything that was acknowledged before it began. It is whole, or it is not there: it is written under
another name, checked and synced before it gets its own. PostgreSQL has programs of its own for this.
"""

import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from sqlalchemy.engine import make_url

from poc_gateway.store.fence import fence_of
from poc_gateway.store.schema import one_line

#: Stands for standard output or input in place of a path.
STREAM = "-"
#: So much must be free beside the copy, so that the gateway can go on to store.
MARGIN_BYTES = 64 * 2**20
#: What a write-ahead log is called, and its index, beside the database.
_WAL, _SHM = "-wal", "-shm"


class BackupError(ValueError):
    """A copy could not be made or put back; nothing that was there has changed."""


def back_up(url: str, destination: str) -> int:
    """Copy the database at ``url`` to a new file, or to standard output; return the bytes of the copy."""
    source = _database(url)
    if not source.is_file():
        raise BackupError(f"there is no database {source}: set POC_GATEWAY_DATABASE as the gateway has it")
    if destination == STREAM:
        if sys.stdout.isatty():
            raise BackupError("the copy is no text: send standard output to a file")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "gateway.db"
            _copy(source, copy)
            with copy.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return copy.stat().st_size
    target = Path(destination)
    if target.exists():
        raise BackupError(f"{target} is there already, and is not written over: name another file, or remove it")
    with _written(target) as copy:
        _copy(source, copy)
    return target.stat().st_size


def restore(url: str, source: str, *, replace: bool) -> int:
    """Put a copy, or what standard input has of one, in the place of the database at ``url``; return its bytes.

    A database that is there is kept under another name if ``replace`` says so, and else refused.
    """
    target = _database(url)
    with _owned(url, target):
        old = target.with_name(f"{target.name}.replaced")
        if target.exists() and not replace:
            raise BackupError(f"{target} is there already: restore with --replace to keep it as {old.name}")
        if target.exists() and old.exists():
            raise BackupError(f"{old} is there from an earlier restore: remove it if it is not needed")
        with _written(target, partial(_keep, target, old)) as copy:
            with _opened(source) as file, copy.open("xb") as out:
                shutil.copyfileobj(file, out)
            _check(copy)
    return target.stat().st_size


def _database(url: str) -> Path:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in {None, "", ":memory:"}:
        raise BackupError("POC_GATEWAY_DATABASE is no SQLite file: use pg_dump and pg_restore for PostgreSQL")
    return Path(str(parsed.database))


def _copy(source: Path, target: Path) -> None:
    log = source.with_name(f"{source.name}{_WAL}")
    size = source.stat().st_size + (log.stat().st_size if log.exists() else 0)
    free = shutil.disk_usage(target.parent).free
    if free < size + MARGIN_BYTES:
        need = size + MARGIN_BYTES
        raise BackupError(f"{target.parent} has {free} bytes free, and the copy may need {need}: name another volume")
    try:
        with closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True)) as connection:
            connection.execute("VACUUM INTO ?", (str(target),))
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be copied to {target}: {error}") from error
    _check(target)


def _check(copy: Path) -> None:
    """Read all of a copy. A stream that broke off, or a disk that lies, must not look like a backup."""
    try:
        with closing(sqlite3.connect(f"{copy.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.Error as error:
        found = str(error)
    found = one_line(found)  # which tells of pages in lines
    if found != "ok":
        raise BackupError(f"this is no whole copy of a gateway's database ({found}): copy it again")


@contextmanager
def _written(target: Path, make_room: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Let a file be written beside ``target``, then sync it and give it that name; no rest stays if that fails.

    ``make_room`` is called between the two, when nothing of the file can fail any more.
    """
    unfinished = target.with_name(f"{target.name}.partial")
    try:
        unfinished.unlink(missing_ok=True)
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        make_room()
        unfinished.replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise BackupError(f"{target} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _owned(url: str, target: Path) -> Iterator[None]:
    """Own the database, so that no gateway uses it meanwhile."""
    fence = fence_of(url)
    if not fence.take():
        raise BackupError(f"a gateway owns {target}: stop it first, with kubectl scale --replicas=0")
    try:
        yield
    finally:
        fence.close()


@contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    if source == STREAM:
        yield sys.stdin.buffer
        return
    try:
        with Path(source).open("rb") as file:
            yield file
    except FileNotFoundError:
        raise BackupError(f"there is no copy {source}: name the file that a backup wrote") from None


def _keep(target: Path, old: Path) -> None:
    """Keep the database that is there, and its log, under another name."""
    if not target.exists():
        return
    os.link(target, old)
    # SQLite would play the log of the old database into the new one.
    log = target.with_name(f"{target.name}{_WAL}")
    if log.exists():
        log.replace(old.with_name(f"{old.name}{_WAL}"))
    target.with_name(f"{target.name}{_SHM}").unlink(missing_ok=True)
