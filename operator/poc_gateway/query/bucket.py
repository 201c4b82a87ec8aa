# SPDX-License-Identifier: Apache-2.0
"""The bucket of the archive: objects that are there whole or not at all, on any server with the API of S3.

pyarrow completes an upload whatever happened before. So each object is uploaded under a temporary name, and gets its
own when all of it is there.
"""

import asyncio
import hashlib
import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from poc_gateway.settings import Settings

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Readers of a folder of Parquet pass over names that begin with "_".
MANIFEST, TEMPORARY = "_manifest.json", ".partial"
#: S3 may take so long to connect, and to go on with an answer.
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 20.0
#: Errors of S3: pyarrow has some of its own beside Python's.
FAILURES = (OSError, pa.ArrowException)
#: The name of the threads that wait for S3.
BUCKET_THREAD = "archive"
#: A bucket that was closed may take so long to end what is under way.
_LEAVE_SECONDS = 1.0


@dataclass(frozen=True)
class ArchivedFile:
    """One file of an archive: its rows, its bytes, and their SHA-256 in hexadecimal."""

    name: str
    rows: int
    bytes: int
    sha256: str


class Bucket:
    """The bucket of the archive. What it does waits for the network, in a thread of its own, one after the other.

    A server that hangs is given up after minutes only: a process that ends need not wait for the thread
    (`poc_gateway.server.process.leave`).
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=BUCKET_THREAD, daemon=True).start()
        self._root = "/".join(part for part in (settings.archive_bucket, settings.archive_prefix.strip("/")) if part)
        self._files: Any = None  # pyarrow has no types
        #: No two processes write to the same temporary name: one may still end what the other has taken over.
        self.suffix = f".{secrets.token_hex(4)}{TEMPORARY}"

    async def do(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` in the bucket's thread. OSError or pa.ArrowException if S3 fails or refuses."""
        return await asyncio.wrap_future(self.later(work))

    def later(self, work: Callable[[], Result]) -> Future[Result]:
        """Let ``work`` be done after what is under way, and do not wait for it."""
        done: Future[Result] = Future()
        self._waiting.put((done, work))
        return done

    def close(self) -> None:
        """Let the thread end after what is under way."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (next_ := self._waiting.get()) is not None:
            done, work = next_
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work())
            except BaseException as error:  # who waits for it gets it
                done.set_exception(error)

    def path(self, name: str) -> str:
        """Return where an object is, as pyarrow has it: the bucket, and the key."""
        return f"{self._root}/{name}"

    @property
    def files(self) -> Any:  # noqa: ANN401 - pyarrow has no types
        """The file system, made when it is first needed."""
        if self._files is None:
            # A gateway without an archive starts sooner without it.
            from pyarrow import fs  # noqa: PLC0415

            settings = self._settings
            options: dict[str, object] = {"region": settings.archive_region, "background_writes": False}
            if settings.archive_endpoint is not None:
                endpoint = urlsplit(settings.archive_endpoint)
                options |= {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc}
            if settings.archive_access_key is not None and settings.archive_secret_key is not None:
                options["access_key"] = settings.archive_access_key.get_secret_value()
                options["secret_key"] = settings.archive_secret_key.get_secret_value()
            self._files = fs.S3FileSystem(connect_timeout=_CONNECT_SECONDS, request_timeout=_ANSWER_SECONDS, **options)
        return self._files

    def has(self, folder: str) -> bool:
        """Whether the archive in a folder is complete: its manifest is there, and what that names."""
        manifest = self.path(f"{folder}/{MANIFEST}")
        if self._size(manifest) is None:
            return False
        with self.files.open_input_stream(manifest) as stream:
            text = stream.read()
        try:
            listed = {str(one["name"]): one["bytes"] for one in json.loads(text)["files"]}
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be read, and is written anew: %s", manifest, error)
            return False
        return all(self._size(self.path(f"{folder}/{name}")) == size for name, size in listed.items())

    def write_manifest(self, folder: str, manifest: Mapping[str, object]) -> None:
        """Write the manifest: from then on the archive is complete."""
        text = json.dumps(manifest, indent=2).encode()
        with self.files.open_output_stream(self.path(f"{folder}/{MANIFEST}")) as stream:
            stream.write(text)

    def rename(self, temporary: str, final: str, size: int) -> None:
        """Give a whole object of ``size`` bytes its name; OSError if it is not whole."""
        self.files.move(temporary, final)
        found = self._size(final)
        if found != size:
            raise OSError(f"{final} has {found} bytes in place of {size}")

    def clean(self, folder: str) -> None:
        """Delete what an earlier process has left unfinished in a folder and those below it."""
        from pyarrow import fs  # noqa: PLC0415

        selector = fs.FileSelector(self.path(folder), allow_not_found=True, recursive=True)
        for found in self.files.get_file_info(selector):
            if found.path.endswith(TEMPORARY):
                self.files.delete_file(found.path)

    def _size(self, path: str) -> int | None:
        found = self.files.get_file_info(path)
        return int(found.size) if found.is_file else None


def hangs() -> bool:
    """Whether a call to S3 goes on, a moment after its bucket was closed."""
    threads = [thread for thread in threading.enumerate() if thread.name == BUCKET_THREAD]
    for thread in threads:
        thread.join(_LEAVE_SECONDS)
    return any(thread.is_alive() for thread in threads)


class Upload:
    """A file on its way to the bucket. All calls wait for the network: `Bucket.do` them."""

    def __init__(self, bucket: Bucket, folder: str, name: str) -> None:
        self._bucket = bucket
        self._name = name
        self._final = bucket.path(f"{folder}/{name}")
        self._temporary = bucket.path(f"{folder}/_{name}{bucket.suffix}")
        self._hash = hashlib.sha256()
        self._rows = 0
        self.size = 0
        self._stream = bucket.files.open_output_stream(self._temporary)

    def add(self, data: bytes, rows: int = 0) -> None:
        """Write what so many rows are."""
        self._rows += rows
        self._hash.update(data)
        self.size += len(data)
        self._stream.write(data)

    def finish(self) -> ArchivedFile:
        """Complete the file and give it its name."""
        self._stream.close()
        self._bucket.rename(self._temporary, self._final, self.size)
        return ArchivedFile(self._name, self._rows, self.size, self._hash.hexdigest())

    def discard(self) -> None:
        """Leave nothing of the file, as far as S3 lets us."""
        with suppress(*FAILURES):
            self._stream.close()
        with suppress(*FAILURES):
            self._bucket.files.delete_file(self._temporary)
