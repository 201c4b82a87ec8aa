# SPDX-License-Identifier: Apache-2.0
"""Archiving rounds that have ended: all that is stored of them as files in an S3 bucket, with a manifest.

::

    ended ──> being written: files under temporary names ──> named ──> manifest ──> archived
      ^                            │                           │          │            │
      ├── something fails: again after a pause ────────────────┴──────────┘            │
      └── results, verdicts, conflicts or decisions have come ─────────────────────────┘

What is in an archive names its folder, and the manifest is written last. So who writes the same again, after a process
was killed, finds either the manifest, and has nothing left to do, or files without one, which are no archive.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, select, update

from poc_gateway import __version__, metrics
from poc_gateway.query.bucket import MANIFEST, ArchivedFile, Bucket, Upload
from poc_gateway.query.cursor import Position, Positions, cursor_of
from poc_gateway.query.export import chunks, public_terms, writer
from poc_gateway.query.messages import ArtifactsQuery, ConflictsQuery, Format
from poc_gateway.query.queries import conflict_page, moment
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseAway
from poc_gateway.store.retention import content_version, has_ended, is_archived
from poc_gateway.store.rounds import KnownRound, RoundTerms, load, newest
from poc_gateway.store.schema import one_line
from vllm_poc.logs import bound
from vllm_poc.wire.messages import MAX_TEXT

_log = logging.getLogger(__name__)

#: Seconds between two looks for rounds that have ended.
PERIOD_SECONDS = 60.0
#: Pause after a round could not be archived; it doubles up to the limit.
RETRY_SECONDS, RETRY_LIMIT_SECONDS = 30.0, 3_600.0
#: A file that has so many bytes is the last but one: S3 renames no object of more than 5 GiB.
MOST_FILE_BYTES = 4 * 2**30
#: Of the manifest's fields, and of how the files are named.
SCHEMA_VERSION = 1
#: Verdicts, conflicts or pods that are read at once.
PAGE_ROWS = 200
#: Rounds that a process was writing which has ended, or lost the database: one process archives, one after the other.
_INTERRUPTED = schema.rounds.c.archiving_since.is_not(None)

#: Reads what follows the row with this id: rows with their ids, which rise.
Page = Callable[[Connection, KnownRound, int], Sequence[tuple[int, Mapping[str, Any]]]]


class ArchiveError(ValueError):
    """A round cannot be archived by hand."""


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
    digest = hashlib.sha256(f"{content.cursor} {content.version}".encode()).hexdigest()[:16]
    of_round = f"{terms.namespace}/{terms.name}/{terms.uid}"
    folder = f"{of_round}/{digest}"
    if not await bucket.do(partial(bucket.has, folder)):
        if gently:
            await bucket.do(partial(bucket.clean, of_round))
        files = await _write_results(database, bucket, known, folder, content.end, gently=gently)
        for name, page in _BESIDE.items():
            files += await _write_lines(database, bucket, known, folder, name, page)
        await bucket.do(partial(bucket.write_manifest, folder, _manifest(terms, content, files)))
    return Copy(f"s3://{bucket.path(folder)}/{MANIFEST}", content.version)


class _Results:
    """Results on their way to a Parquet file."""

    def __init__(self, bucket: Bucket, terms: RoundTerms, folder: str, number: int) -> None:
        self._parquet = writer(Format.PARQUET, terms)
        self._upload = Upload(bucket, folder, f"results-{number:05}.parquet")

    @property
    def is_full(self) -> bool:
        return self._upload.size >= MOST_FILE_BYTES

    def add(self, table: Any) -> None:  # noqa: ANN401 - pyarrow has no types
        """Write a table as one row group."""
        self._upload.add(self._parquet.chunk(table), table.num_rows)

    def finish(self) -> ArchivedFile:
        self._upload.add(self._parquet.end())
        return self._upload.finish()

    def discard(self) -> None:
        self._upload.discard()


async def _write_results(
    database: Database, bucket: Bucket, known: KnownRound, folder: str, end: Positions, *, gently: bool
) -> list[ArchivedFile]:
    files = list[ArchivedFile]()

    async def begin() -> _Results:
        return await bucket.do(partial(_Results, bucket, known.terms, folder, len(files)))

    results = await begin()
    try:
        async with aclosing(chunks(database, known, ArtifactsQuery(), {}, end)) as tables:
            begun = time.monotonic()
            async for table in tables:
                if results.is_full:
                    files.append(await bucket.do(results.finish))
                    results = await begin()
                await bucket.do(partial(results.add, table))
                if gently:
                    await asyncio.sleep(min(1.0, time.monotonic() - begun))
                begun = time.monotonic()
        files.append(await bucket.do(results.finish))
    except BaseException:
        bucket.later(results.discard)
        raise
    return files


async def _write_lines(
    database: Database, bucket: Bucket, known: KnownRound, folder: str, name: str, page: Page
) -> list[ArchivedFile]:
    """Write all pages as lines of JSON; no file if there are none."""

    async def after(last: int) -> Sequence[tuple[int, Mapping[str, Any]]]:
        return await database.read(lambda connection: page(connection, known, last))

    if not (rows := await after(0)):
        return []
    upload = await bucket.do(partial(Upload, bucket, folder, f"{name}.jsonl"))
    try:
        while rows:
            data = "".join(f"{json.dumps(row)}\n" for _, row in rows).encode()
            await bucket.do(partial(upload.add, data, len(rows)))
            rows = await after(rows[-1][0])
        return [await bucket.do(upload.finish)]
    except BaseException:
        bucket.later(upload.discard)
        raise


def _conflicts(connection: Connection, known: KnownRound, after: int) -> Sequence[tuple[int, Mapping[str, Any]]]:
    page = conflict_page(connection, known, ConflictsQuery(after=after, limit=PAGE_ROWS))
    return [(one.id, one.model_dump(mode="json", exclude_none=True)) for one in page.conflicts]


def _verdicts(connection: Connection, known: KnownRound, after: int) -> Sequence[tuple[int, Mapping[str, Any]]]:
    # Not where they went: an address may have a secret in it.
    found = schema.callbacks.c
    columns = select(found.id, found.state, found.reason, found.created_at, found.ended_at, found.body)
    of_round = columns.where(found.round_id == known.id, found.id > after).order_by(found.id).limit(PAGE_ROWS)
    return [(row["id"], _told(row)) for row in connection.execute(of_round).mappings()]


def _pods(connection: Connection, known: KnownRound, after: int) -> Sequence[tuple[int, Mapping[str, Any]]]:
    authors, slots = schema.authors.c, schema.slots.c
    columns = select(
        authors.id, slots.slot, *(authors[name] for name in ("pod", "pod_uid", "since", "refused", "refusal"))
    )
    of_round = columns.join(schema.slots).where(slots.round_id == known.id, authors.id > after)
    rows = connection.execute(of_round.order_by(authors.id).limit(PAGE_ROWS)).mappings()
    return [(row["id"], _told(row)) for row in rows]


#: What an archive has beside the results, by the name of its file.
_BESIDE: Mapping[str, Page] = {"verdicts": _verdicts, "conflicts": _conflicts, "pods": _pods}
_MOMENTS = frozenset({"created_at", "ended_at", "since"})


def _told(row: RowMapping) -> Mapping[str, Any]:
    """Return a row of the database with its moments as text, without what is null."""
    return {
        name: moment(value).isoformat() if name in _MOMENTS else value
        for name, value in row.items()
        if value is not None
    }


def _content(connection: Connection, known: KnownRound) -> _Content:
    slots, rounds = schema.slots.c, schema.rounds.c
    rows = connection.execute(select(slots.slot, slots.last_nonce, slots.late).where(slots.round_id == known.id))
    end = {row.slot: Position(row.last_nonce, row.late) for row in rows}
    of_round = select(content_version(), rounds.created_at).where(rounds.id == known.id)
    version, created_at = connection.execute(of_round).one()
    return _Content(int(version), end, cursor_of(connection, known, end), created_at)


def _manifest(terms: RoundTerms, content: _Content, files: Sequence[ArchivedFile]) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "round": public_terms(terms),
        "created_at": moment(content.created_at).isoformat(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "written_by": f"vllm-poc-gateway {__version__}",
        "results": sum(file.rows for file in files if file.name.endswith(".parquet")),
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
