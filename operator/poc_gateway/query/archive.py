# SPDX-License-Identifier: Apache-2.0
"""Archiving rounds that have ended: their results as Parquet files in an S3 bucket, with a manifest.

::

    ended ──> being written: Parquet under temporary names ──> named ──> manifest ──> archived
      ^                            │                             │          │            │
      ├── something fails: again after a pause ──────────────────┴──────────┘            │
      └── results have come, or a decision has replaced one ─────────────────────────────┘

What is in an archive names its folder, and the manifest is written last. So who writes the same again, after a process
was killed, finds either the manifest, and has nothing left to do, or files without one, which are no archive.
"""

import asyncio
import hashlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
from sqlalchemy import ColumnElement, Connection, Select, select, update

from poc_gateway import __version__, metrics
from poc_gateway.query.cursor import Position, Positions, cursor_of
from poc_gateway.query.export import chunks, public_terms, writer
from poc_gateway.query.messages import ArtifactsQuery, Format
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseAway
from poc_gateway.store.retention import has_ended, is_archived
from poc_gateway.store.rounds import KnownRound, RoundTerms, load, newest
from poc_gateway.store.schema import one_line
from vllm_poc.logs import bound
from vllm_poc.wire.messages import MAX_TEXT

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Seconds between two looks for rounds that have ended.
PERIOD_SECONDS = 60.0
#: Pause after a round could not be archived; it doubles up to the limit.
RETRY_SECONDS, RETRY_LIMIT_SECONDS = 30.0, 3_600.0
#: A file that has so many bytes is the last but one: S3 renames no object of more than 5 GiB.
MOST_FILE_BYTES = 4 * 2**30
#: Of the manifest's fields, and of how the files are named.
SCHEMA_VERSION = 1
#: Readers of a folder of Parquet pass over names that begin with "_".
MANIFEST, TEMPORARY = "_manifest.json", ".partial"
#: S3 may take so long to connect, and to go on with an answer.
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 20.0
#: Errors of S3: pyarrow has some of its own beside Python's.
_FAILURES = (OSError, pa.ArrowException)


#: The name of the threads that wait for S3.
BUCKET_THREAD = "archive"
#: A bucket that was closed may take so long to end what is under way.
_LEAVE_SECONDS = 1.0
#: Rounds that a process was writing which has ended, or lost the database: one process archives, one after the other.
_INTERRUPTED = schema.rounds.c.archiving_since.is_not(None)


class ArchiveError(ValueError):
    """A round cannot be archived by hand."""


@dataclass(frozen=True)
class ArchivedFile:
    """One Parquet file of an archive, and the SHA-256 of its bytes in hexadecimal."""

    name: str
    results: int
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


class _Upload:
    """A Parquet file on its way to the bucket, under a temporary name until all of it is there.

    pyarrow completes an upload whatever happened before, so what is not whole must have another name.
    """

    def __init__(self, bucket: Bucket, terms: RoundTerms, folder: str, name: str) -> None:
        self._bucket = bucket
        self._name = name
        self._final = bucket.path(f"{folder}/{name}")
        self._temporary = bucket.path(f"{folder}/_{name}{bucket.suffix}")
        self._hash = hashlib.sha256()
        self._parquet = writer(Format.PARQUET, terms)
        self._results = 0
        self.size = 0
        self._stream = bucket.files.open_output_stream(self._temporary)

    def add(self, table: pa.Table) -> None:
        """Write a table as one row group."""
        self._results += table.num_rows
        self._write(self._parquet.chunk(table))

    def finish(self) -> ArchivedFile:
        """Complete the file and give it its name."""
        self._write(self._parquet.end())
        self._stream.close()
        self._bucket.rename(self._temporary, self._final, self.size)
        return ArchivedFile(self._name, self._results, self.size, self._hash.hexdigest())

    def discard(self) -> None:
        """Leave nothing of the file, as far as S3 lets us."""
        with suppress(*_FAILURES):
            self._stream.close()
        with suppress(*_FAILURES):
            self._bucket.files.delete_file(self._temporary)

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += len(data)
        self._stream.write(data)


class Copy(NamedTuple):
    """A complete archive: where it is, and which content of the round it has."""

    uri: str
    version: int


class _Content(NamedTuple):
    """What is stored of a round at one moment, and the cursor for what comes after."""

    version: int
    end: Positions
    cursor: str
    created_at: int


async def copy(database: Database, bucket: Bucket, known: KnownRound, *, gently: bool) -> Copy:
    """Write what is stored of a round to the archive, unless it is there; ``gently`` leaves time for everything else.

    OSError or pa.ArrowException if S3 fails, DatabaseError if the database does or the round is deleted meanwhile.
    """
    terms, content = known.terms, await database.read(partial(_content, known=known))
    digest = hashlib.sha256(content.cursor.encode()).hexdigest()[:16]
    of_round = f"{terms.namespace}/{terms.name}/{terms.uid}"
    folder = f"{of_round}/{digest}"
    if not await bucket.do(partial(bucket.has, folder)):
        if gently:
            await bucket.do(partial(bucket.clean, of_round))
        files = await _write_files(database, bucket, known, folder, content.end, gently=gently)
        await bucket.do(partial(bucket.write_manifest, folder, _manifest(terms, content, files)))
    return Copy(f"s3://{bucket.path(folder)}/{MANIFEST}", content.version)


async def _write_files(
    database: Database, bucket: Bucket, known: KnownRound, folder: str, end: Positions, *, gently: bool
) -> list[ArchivedFile]:
    files = list[ArchivedFile]()

    async def begin() -> _Upload:
        return await bucket.do(partial(_Upload, bucket, known.terms, folder, f"results-{len(files):05}.parquet"))

    upload = await begin()
    try:
        async with aclosing(chunks(database, known, ArtifactsQuery(), {}, end)) as tables:
            begun = time.monotonic()
            async for table in tables:
                if upload.size >= MOST_FILE_BYTES:
                    files.append(await bucket.do(upload.finish))
                    upload = await begin()
                await bucket.do(partial(upload.add, table))
                if gently:
                    await asyncio.sleep(min(1.0, time.monotonic() - begun))
                begun = time.monotonic()
        files.append(await bucket.do(upload.finish))
    except BaseException:
        bucket.later(upload.discard)
        raise
    return files


def _content(connection: Connection, known: KnownRound) -> _Content:
    slots, rounds = schema.slots.c, schema.rounds.c
    of_round = select(slots.slot, slots.last_nonce, slots.late, slots.stored).where(slots.round_id == known.id)
    rows = connection.execute(of_round).all()
    end = {row.slot: Position(row.last_nonce, row.late) for row in rows}
    version = sum(row.stored + row.late for row in rows)
    created_at = connection.scalar(select(rounds.created_at).where(rounds.id == known.id))
    return _Content(version, end, cursor_of(connection, known, end), created_at or 0)


def _manifest(terms: RoundTerms, content: _Content, files: Sequence[ArchivedFile]) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "round": public_terms(terms),
        "created_at": datetime.fromtimestamp(content.created_at / 1000, UTC).isoformat(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "written_by": f"vllm-poc-gateway {__version__}",
        "results": sum(file.results for file in files),
        "since": content.cursor,
        "files": [asdict(file) for file in files],
    }


class Archive:
    """Archives the rounds that have ended, one at a time. For the process that owns the database."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._bucket = Bucket(settings)
        self._retries: dict[int, tuple[int, float]] = {}  # by the round's id: failures, and when to try again

    async def run(self) -> None:
        """Look for rounds that have ended once in a while until cancelled; a failure waits for the next look."""
        try:
            while True:
                try:
                    await self.sweep()
                except Exception:
                    _log.exception("rounds could not be archived, which is tried again in %.0f s", PERIOD_SECONDS)
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            self._bucket.close()
            metrics.ARCHIVE_WAITING.set(0)  # they wait for the process that owns the database next

    async def sweep(self) -> None:
        """Archive what has ended and is not archived, but for rounds that wait after a failure."""
        await self._write(_INTERRUPTED, archiving_since=None)
        quiet = (time.time() - self._settings.archive_after_seconds) * 1000
        due = await self._database.read(lambda one: one.execute(unarchived(int(quiet))).all())
        self._retries = {id_: self._retries[id_] for id_, _ in due if id_ in self._retries}
        metrics.ARCHIVE_WAITING.set(len(due))
        left = len(due)
        for id_, uid in due:
            _, retry_at = self._retries.get(id_, (0, 0.0))
            if time.monotonic() >= retry_at and await self._archive(id_, uid):
                left -= 1
                metrics.ARCHIVE_WAITING.set(left)

    async def _archive(self, id_: int, uid: str) -> bool:
        begun, of_round = time.time_ns() // 1_000_000, schema.rounds.c.id == id_
        with bound(round=uid):
            try:
                known = await self._database.read(lambda connection: load(connection, uid))
                if known is None:
                    return True
                await self._write(of_round, archiving_since=begun)
                found = await copy(self._database, self._bucket, known, gently=True)
            except (DatabaseAway, FenceLost):
                raise
            except Exception as error:  # of S3 as a rule; whatever it is, other rounds go on
                await self._failed(id_, error)
                return False
            done = {"archived_version": found.version, "archived_at": time.time_ns() // 1_000_000}
            await self._write(of_round, **done, archiving_since=None, archive_error=None)
            self._retries.pop(id_, None)
            metrics.ARCHIVED.inc()
            _log.info("the round is archived: %s", found.uri)
            return True

    async def _failed(self, id_: int, error: Exception) -> None:
        failures, _ = self._retries.get(id_, (0, 0.0))
        pause = min(RETRY_SECONDS * 2**failures, RETRY_LIMIT_SECONDS)
        self._retries[id_] = failures + 1, time.monotonic() + pause
        metrics.ARCHIVE_FAILURES.inc()
        why = one_line(str(error) or type(error).__name__)[:MAX_TEXT]
        _log.error("the round could not be archived, which is tried again in %.0f s: %s", pause, why)
        await self._write(schema.rounds.c.id == id_, archiving_since=None, archive_error=why)

    async def _write(self, of_rounds: ColumnElement[bool], **values: object) -> None:
        change = update(schema.rounds).where(of_rounds).values(**values)
        await self._database.write(lambda connection: connection.execute(change) and None)


def unarchived(quiet_since: int) -> Select[int, str]:
    """Return the query of rounds that have ended and are not archived, the oldest first."""
    rounds = schema.rounds.c
    return select(rounds.id, rounds.uid).where(has_ended(quiet_since), ~is_archived()).order_by(rounds.created_at)


async def by_hand(settings: Settings, wanted: str) -> Copy:
    """Archive a round by its uid or its NAMESPACE/NAME, beside the gateway, which finds that it is done.

    ArchiveError if there is no archive, no such round, or it has not ended; else the errors of `copy`.
    """
    if settings.archive_bucket is None:
        raise ArchiveError("there is no archive: set POC_GATEWAY_ARCHIVE_BUCKET as the gateway has it")
    database = await asyncio.to_thread(Database.beside, settings.database.get_secret_value())
    bucket = Bucket(settings)
    try:
        known = await database.read(partial(_ended_round, wanted=wanted))
        return await copy(database, bucket, known, gently=False)
    finally:
        bucket.close()
        await asyncio.to_thread(database.close)


def _ended_round(connection: Connection, wanted: str) -> KnownRound:
    namespace, _, name = wanted.partition("/")
    known = newest(connection, namespace, name) if name else load(connection, wanted)
    if known is None:
        raise ArchiveError(f"there is no round {wanted}: name one as NAMESPACE/NAME, or by its uid")
    now = time.time_ns() // 1_000_000 + 1
    of_round = schema.rounds.c.id == known.id
    if connection.scalar(select(schema.rounds.c.id).where(of_round, has_ended(now))) is None:
        raise ArchiveError(
            f"results or verdicts of the round {wanted} still wait for their receiver: archive it when all have ended, "
            "or export it by the route artifacts"
        )
    return known
