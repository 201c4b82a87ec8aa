# SPDX-License-Identifier: Apache-2.0
"""Rounds that have ended get into a bucket of a real server of S3, each content once and whole, whatever fails."""

import asyncio
import ctypes
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from httpx import AsyncClient
from sqlalchemy import select, update

from hack.images.site import ROOT
from poc_gateway import __main__ as program
from poc_gateway import metrics
from poc_gateway.ingest.deliveries import CheckedArtifact, Delivery
from poc_gateway.ingest.storing import store as take
from poc_gateway.outbox import rivals
from poc_gateway.query import archive, bucket, export
from poc_gateway.query.archive import Archive, ArchiveError
from poc_gateway.query.bucket import MANIFEST
from poc_gateway.query.export import TERMS_KEY
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseError, DatabaseUnavailable
from poc_gateway.store.retention import Retention, is_archived
from poc_gateway.store.rounds import KnownRound
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.observed import Decision, Truth
from tests.simulation.archive_process import archiving
from tests.simulation.gateway_process import gateway
from tests.support.builders import stored
from tests.support.builders.deliveries import a_round, vector
from tests.support.builders.forwarding import until
from tests.support.servers.s3 import BUCKET, PREFIX, S3Server, s3_server

PAGE = ROOT / "docs" / "operate" / "archive.md"
DAY = 86_400
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(export, "CHUNK_ROWS", 7)
    with s3_server() as server:
        yield server


def settings_for(s3: S3Server, **values: object) -> Settings:
    names = {f"POC_GATEWAY_{name.upper()}": str(value) for name, value in values.items()}
    return Settings.from_environment(s3.settings | names)


async def quieten(database: Database) -> None:
    """Let everything have arrived long ago."""
    await database.write(lambda one: one.execute(update(schema.rounds).values(created_at=0)) and None)
    await database.write(lambda one: one.execute(update(schema.slots).values(heard_at=0)) and None)


async def store(database: Database, round_: PoCRound, nonces: Iterable[int]) -> KnownRound:
    """Write a round down that began long ago."""
    known = await stored.store(database, round_, nonces)
    await database.write(lambda one: one.execute(update(schema.rounds).values(created_at=0)) and None)
    return known


async def sweep(database: Database, s3: S3Server, **values: object) -> None:
    await Archive(database, settings_for(s3, **values)).sweep()


async def columns(database: Database, *names: str) -> list[tuple[Any, ...]]:
    query = select(*(schema.rounds.c[name] for name in names)).order_by(schema.rounds.c.id)
    return [tuple(row) for row in await database.read(lambda one: one.execute(query).all())]


async def archived(database: Database) -> list[bool]:
    query = select(is_archived()).select_from(schema.rounds).order_by(schema.rounds.c.id)
    return [bool(one) for one in await database.read(lambda one: one.scalars(query).all())]


def archives(s3: S3Server, uid: str | None = None) -> dict[str, dict[str, Any]]:
    """The manifests of the complete archives, or those of a round, by their folders; each checked against its files."""
    objects, found = s3.objects(folder_of(uid)), dict[str, dict[str, Any]]()
    for key, content in objects.items():
        folder, _, name = key.rpartition("/")
        if name != MANIFEST:
            continue
        manifest = json.loads(content)
        for each in manifest["files"]:
            data = objects[f"{folder}/{each['name']}"]
            assert len(data) == each["bytes"]
            assert hashlib.sha256(data).hexdigest() == each["sha256"]
            is_parquet = each["name"].endswith(".parquet")
            rows = pq.ParquetFile(io.BytesIO(data)).metadata.num_rows if is_parquet else len(data.splitlines())
            assert rows == each["rows"]
        results = [each["rows"] for each in manifest["files"] if each["name"].startswith("results-")]
        assert manifest["results"] == sum(results)
        found[folder] = manifest
    return found


def folder_of(uid: str | None) -> str:
    """What the keys of a round begin with."""
    return f"{PREFIX}/ns/round-{uid}/" if uid is not None else ""


def nothing_half_written(s3: S3Server, uid: str | None = None) -> None:
    """What has a Parquet file's own name is whole."""
    for key, content in s3.objects(folder_of(uid)).items():
        if key.rpartition("/")[2].startswith("results-"):
            pq.ParquetFile(io.BytesIO(content)).read()


# What is written.


@pytest.mark.parametrize("spec", [{}, {"rTarget": "1.4"}], ids=["artifacts", "distances"])
async def test_an_archive_has_what_an_export_has(
    database: Database, client: AsyncClient, s3: S3Server, spec: dict[str, str]
) -> None:
    await store(database, a_round(nodes=2, groups=2, **spec), range(50))
    await sweep(database, s3)
    ((folder, manifest),) = archives(s3).items()
    assert folder.startswith(f"{PREFIX}/ns/round-uid-1/uid-1/")
    (each,) = manifest["files"]
    archived = s3.objects()[f"{folder}/{each['name']}"]
    exported = await client.get("/rounds/ns/round-uid-1/artifacts", params={"format": "parquet"})
    assert archived == exported.content
    assert (manifest["schema_version"], manifest["results"]) == (1, 50)
    terms = json.loads(pq.ParquetFile(io.BytesIO(archived)).schema_arrow.metadata[TERMS_KEY.encode()])
    assert manifest["round"] == terms
    if not spec:
        vectors = pq.read_table(io.BytesIO(archived))["vector"].combine_chunks()
        numbers = vectors.flatten().buffers()[1].to_pybytes()
        nonces = sorted(range(50), key=lambda nonce: (nonce % 4, nonce))
        assert numbers == b"".join(vector(nonce) for nonce in nonces)
    # What comes later follows the archive.
    since = {"format": "jsonl", "since": manifest["since"]}
    assert (await client.get("/rounds/ns/round-uid-1/artifacts", params=since)).text == ""
    entry = (await client.get("/rounds")).json()["rounds"][0]
    assert entry["archived_at"] is not None
    assert (entry["archiving_since"], entry["archive_error"]) == (None, None)


def lines(s3: S3Server, folder: str, name: str) -> list[dict[str, Any]]:
    """The lines of one of the files beside the results."""
    return [json.loads(line) for line in s3.objects()[f"{folder}/{name}.jsonl"].splitlines()]


async def newest_archive(database: Database, s3: S3Server) -> str:
    """Archive what is due, and return the folder of the one archive that this adds."""
    before = archives(s3).keys()
    assert await archived(database) == [False]
    await sweep(database, s3)
    assert await archived(database) == [True]
    (folder,) = archives(s3).keys() - before
    return folder


async def test_an_archive_has_all_that_is_deleted_with_the_round(
    database: Database, client: AsyncClient, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "PAGE_ROWS", 2)
    known = await store(database, a_round(), range(20))
    slot = known.slots[0]
    authors = [{"slot_id": slot, "pod": f"pod-{n}", "pod_uid": f"uid-{n}", "since": n, "refused": n} for n in range(5)]
    await database.write(lambda one: one.execute(schema.authors.insert(), authors) and None)
    only_results = await newest_archive(database, s3)
    assert [each["name"] for each in archives(s3)[only_results]["files"]] == ["results-00000.parquet", "pods.jsonl"]
    moments = [f"1970-01-01T00:00:00.00{n}000+00:00" if n else "1970-01-01T00:00:00+00:00" for n in range(5)]
    of_pods = [{**author, "slot": 0, "since": moment} for author, moment in zip(authors, moments, strict=True)]
    for author in of_pods:
        del author["slot_id"]
    assert [{k: v for k, v in one.items() if k != "id"} for one in lines(s3, only_results, "pods")] == of_pods

    for nonce in (3, 5, 7):
        await deliver(database, known, nonce, vector(99))
    conflicts = lines(s3, await newest_archive(database, s3), "conflicts")
    assert conflicts == (await client.get("/rounds/ns/round-uid-1/conflicts")).json()["conflicts"]
    assert [one["nonce"] for one in conflicts] == [3, 5, 7]

    decision = Decision(nonce=5, truth=Truth.STORED, up_to=conflicts[1]["id"], pod="third")
    await database.write(lambda connection: rivals.decide(connection, known, [decision]))
    decided = lines(s3, await newest_archive(database, s3), "conflicts")
    assert [one.get("truth") for one in decided] == [None, "stored", None]

    bodies = [json.dumps({"fraud_detected": bool(n), "text": "ü"}) for n in range(3)]
    of_round = {"round_id": known.id, "url": "http://user:secret@receiver/validated", "state": "delivered"}
    verdicts = [{**of_round, "body": body, "created_at": 1_000, "ended_at": 2_000} for body in bodies]
    await database.write(lambda one: one.execute(schema.callbacks.insert(), verdicts) and None)
    folder = await newest_archive(database, s3)
    told = lines(s3, folder, "verdicts")
    assert [one["body"] for one in told] == bodies
    assert {(one["state"], one["created_at"], one["ended_at"]) for one in told} == {
        ("delivered", "1970-01-01T00:00:01+00:00", "1970-01-01T00:00:02+00:00")
    }
    assert b"secret" not in b"".join(s3.objects().values())
    assert len(archives(s3)) == 4


async def test_a_large_round_has_several_files(
    database: Database, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_FILE_BYTES", 1_000)
    await store(database, a_round(), range(100))
    await sweep(database, s3)
    ((folder, manifest),) = archives(s3).items()
    assert len(manifest["files"]) > 2
    objects = s3.objects()
    tables = [pq.read_table(io.BytesIO(objects[f"{folder}/{each['name']}"])) for each in manifest["files"]]
    assert [nonce for table in tables for nonce in table["nonce"].to_pylist()] == list(range(100))


async def test_an_archive_that_is_there_is_not_written_again(database: Database, s3: S3Server) -> None:
    await store(database, a_round(), range(20))
    await sweep(database, s3)
    s3.requests.clear()
    await sweep(database, s3)
    assert s3.requests == []
    # Nor if it was written down nowhere, as when the process is killed in between.
    await database.write(lambda one: one.execute(update(schema.rounds).values(archived_version=None)) and None)
    await sweep(database, s3)
    assert s3.writes == []
    assert await archived(database) == [True]


@pytest.mark.parametrize("harm", ["lost", "cut", "unreadable"])
async def test_an_archive_that_was_harmed_is_written_again(database: Database, s3: S3Server, harm: str) -> None:
    await store(database, a_round(), range(20))
    await sweep(database, s3)
    before = s3.objects()
    (data,) = [key for key in before if key.endswith(".parquet")]
    if harm == "unreadable":
        s3.client.put_object(Bucket=BUCKET, Key=f"{data.rpartition('/')[0]}/{MANIFEST}", Body=b"{")
    elif harm == "cut":
        s3.client.put_object(Bucket=BUCKET, Key=data, Body=b"PAR1")
    else:
        s3.client.delete_object(Bucket=BUCKET, Key=data)
    await database.write(lambda one: one.execute(update(schema.rounds).values(archived_version=None)) and None)
    await sweep(database, s3)
    assert len(archives(s3)) == 1
    assert s3.objects()[data] == before[data]


# When.


async def deliver(database: Database, known: KnownRound, nonce: int, value: bytes) -> None:
    delivery = Delivery(known, checked=[CheckedArtifact(known.slots[0], nonce, value)])
    await database.write(lambda connection: take(connection, [delivery], 1), grows=True)


async def test_more_results_are_archived_again_beside_the_first(database: Database, s3: S3Server) -> None:
    known = await store(database, a_round(), range(20))
    await sweep(database, s3)
    (first,) = archives(s3)
    await deliver(database, known, 20, vector(20))
    assert await archived(database) == [False]
    await sweep(database, s3)
    # A duplicate is nothing new, and what a decision replaces is.
    await deliver(database, known, 20, vector(20))
    assert await archived(database) == [True]
    await deliver(database, known, 5, vector(99))
    conflict = await database.read(lambda one: one.scalar(select(schema.conflicts.c.id)))
    assert conflict is not None
    decision = Decision(nonce=5, truth=Truth.OTHER, conflict=conflict, up_to=conflict, pod="third")
    await database.write(lambda connection: rivals.decide(connection, known, [decision]))
    await sweep(database, s3)
    found = archives(s3)
    assert first in found
    assert sorted(manifest["results"] for manifest in found.values()) == [20, 21, 21]
    assert len({manifest["since"] for manifest in found.values()}) == 3


async def test_a_round_that_has_not_ended_is_not_archived(database: Database, s3: S3Server) -> None:
    receiver = {"callbackURL": "http://receiver"}
    for uid in ("waits", "disputed", "verdict", "sent", "expired"):
        await store(database, a_round(uid, **receiver), range(3))
    running = await store(database, a_round("running"), range(3))
    await quieten(database)
    now = int(time.time() * 1000)
    slots, rounds = schema.slots.c, schema.rounds.c
    of_running = update(schema.slots).where(slots.round_id == running.id).values(heard_at=now + 5_000)
    passed = update(schema.slots).where(
        slots.round_id.in_(select(rounds.id).where(rounds.uid.in_(("disputed", "verdict", "sent", "expired"))))
    )
    late = {"nonce": 1, "reason": "r", "since": 1}
    ids = dict(await columns(database, "uid", "id"))
    slot_of = dict(await database.read(lambda one: one.execute(select(slots.round_id, slots.id)).all()))
    changes = [
        of_running,
        passed.values(forwarded_nonce=2),
        schema.late_items.insert().values(slot_id=slot_of[ids["disputed"]], state="disputed", **late),
        schema.late_items.insert().values(slot_id=slot_of[ids["expired"]], state="expired", **late),
        schema.callbacks.insert().values(round_id=ids["verdict"], url="u", body="{}", state="waiting", created_at=1),
    ]
    for change in changes:
        await database.write(lambda one, change=change: one.execute(change) and None)  # type: ignore[misc]
    await sweep(database, s3)
    assert {manifest["round"]["uid"] for manifest in archives(s3).values()} == {"sent", "expired"}
    await database.write(lambda one: one.execute(schema.callbacks.update().values(state="expired")) and None)
    await sweep(database, s3)
    assert {manifest["round"]["uid"] for manifest in archives(s3).values()} == {"sent", "expired", "verdict"}


async def uids(database: Database) -> set[str]:
    return {uid for (uid,) in await columns(database, "uid")}


@pytest.mark.parametrize("limits", [{"retention_seconds": DAY}, {"retention_bytes": 1}], ids=["age", "size"])
async def test_a_round_is_deleted_only_after_its_archive(
    database: Database, s3: S3Server, limits: dict[str, int]
) -> None:
    known = await store(database, a_round("old"), range(20))
    await store(database, a_round("empty"), ())
    await quieten(database)
    settings = settings_for(s3, **limits)
    retention = Retention(database, settings, lambda _: None)
    await retention.sweep()
    # Of the other nothing is stored that could be archived.
    assert await uids(database) == {"old"}
    await Archive(database, settings).sweep()
    await deliver(database, known, 20, vector(20))
    await quieten(database)
    await retention.sweep()
    assert await uids(database) == {"old"}, "what came after the archive would be lost"
    await Archive(database, settings).sweep()
    await retention.sweep()
    assert await uids(database) == set()
    assert max(manifest["results"] for manifest in archives(s3).values()) == 21


async def test_a_round_that_begins_anew_leaves_its_first_archive_alone(database: Database, s3: S3Server) -> None:
    await store(database, a_round("old"), range(20))
    await sweep(database, s3)
    first = s3.objects()
    await quieten(database)
    await Retention(database, settings_for(s3, retention_seconds=DAY), lambda _: None).sweep()
    await store(database, a_round("old"), range(5))
    await sweep(database, s3)
    assert len(archives(s3)) == 2
    assert first.items() <= s3.objects().items()


# What fails.


async def test_a_bucket_that_is_away_is_told_of_and_tried_again(
    database: Database,
    client: AsyncClient,
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(bucket, "_CONNECT_SECONDS", 0.5)
    await store(database, a_round(), range(20))
    before = metrics.ARCHIVE_FAILURES._value.get(), metrics.ARCHIVED._value.get()
    writing = Archive(database, settings_for(s3))
    s3.stop()
    await writing.sweep()
    entry = (await client.get("/rounds")).json()["rounds"][0]
    assert entry["archive_error"]
    assert (entry["archived_at"], entry["archiving_since"]) == (None, None)
    assert metrics.ARCHIVE_FAILURES._value.get() == before[0] + 1
    assert metrics.ARCHIVE_WAITING._value.get() == 1
    assert "the round could not be archived, which is tried again in 30 s" in caplog.text
    s3.start()
    await writing.sweep()  # too soon
    assert archives(s3) == {}
    writing._retries.clear()  # as after the pause
    await writing.sweep()
    assert len(archives(s3)) == 1
    assert (await client.get("/rounds")).json()["rounds"][0]["archive_error"] is None
    assert metrics.ARCHIVED._value.get() == before[1] + 1
    assert metrics.ARCHIVE_WAITING._value.get() == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [({"archive_bucket": "nowhere"}, "nowhere"), ({"archive_endpoint": "http://127.0.0.1:1"}, "")],
    ids=["bucket", "address"],
)
async def test_a_wrong_bucket_is_named(
    database: Database, s3: S3Server, monkeypatch: pytest.MonkeyPatch, values: dict[str, str], says: str
) -> None:
    monkeypatch.setattr(bucket, "_CONNECT_SECONDS", 0.5)
    await store(database, a_round(), range(20))
    await sweep(database, s3, **values)
    ((error,),) = await columns(database, "archive_error")
    assert error
    assert says in error


async def test_one_round_that_fails_holds_up_no_other(database: Database, s3: S3Server) -> None:
    for uid in ("bad", "good"):
        await store(database, a_round(uid), range(20))
    s3.fault = lambda _, path: 403 if "/bad/" in path or "round-bad" in path else None
    await sweep(database, s3)
    assert {manifest["round"]["uid"] for manifest in archives(s3).values()} == {"good"}
    assert [error is None for (error,) in await columns(database, "archive_error")] == [False, True]


async def test_one_round_that_cannot_be_read_holds_up_no_other(
    database: Database, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uid in ("bad", "good"):
        await store(database, a_round(uid), range(20))
    read, tries = export.Scan.read, list[str]()

    def failing(self: export.Scan, connection: Any) -> Any:  # noqa: ANN401 - as it has it
        tries.append(self._round.terms.uid)
        if tries[-1] == "bad":
            raise DatabaseUnavailable("it takes too long")
        return read(self, connection)

    monkeypatch.setattr(export.Scan, "read", failing)
    one = Archive(database, settings_for(s3))
    await one.sweep()
    assert {manifest["round"]["uid"] for manifest in archives(s3).values()} == {"good"}
    assert await columns(database, "archive_error") == [("it takes too long",), (None,)]
    await one.sweep()
    assert tries.count("bad") == 1, "it waits before it is tried again"


async def test_who_does_not_archive_any_more_tells_of_nothing_that_waits(database: Database, s3: S3Server) -> None:
    await store(database, a_round(), range(20))
    s3.fault = lambda _, path: 403
    metrics.ARCHIVE_WAITING.set(0)
    running = asyncio.create_task(Archive(database, settings_for(s3)).run())
    await until(lambda: metrics.ARCHIVE_WAITING._value.get() == 1)
    running.cancel()
    await asyncio.wait([running])
    assert metrics.ARCHIVE_WAITING._value.get() == 0


async def test_a_server_that_hangs_is_given_up(
    database: Database, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_ANSWER_SECONDS", 1.0)
    await store(database, a_round(), range(20))
    go_on = threading.Event()

    def hang(_: str, __: str) -> int:
        go_on.wait(60)
        return 503

    s3.fault = hang
    try:
        async with asyncio.timeout(50):
            await sweep(database, s3)
    finally:
        go_on.set()
    ((error,),) = await columns(database, "archive_error")
    assert error


async def places_of_an_archive(database: Database, s3: S3Server) -> Iterable[int]:
    """The places of an archive's requests among them; of PostgreSQL some, since S3 does not know the database."""
    await store(database, a_round("counted"), range(40))
    await sweep(database, s3)
    count = len(s3.requests)
    assert count >= 6
    return range(0, count, 1 if database.engine.dialect.name == "sqlite" else 4)


async def test_wherever_the_server_fails_nothing_half_written_is_seen(database: Database, s3: S3Server) -> None:
    for place in await places_of_an_archive(database, s3):
        uid = f"fails-{place}"
        await store(database, a_round(uid), range(40))
        seen = list[str]()

        def fail(method: str, path: str, seen: list[str] = seen, place: int = place) -> int | None:
            seen.append(f"{method} {path}")
            return 403 if len(seen) > place else None  # which is not tried again

        s3.fault = fail
        await sweep(database, s3)
        s3.fault = lambda _method, _path: None
        nothing_half_written(s3, uid)
        assert archives(s3, uid) == {}, seen
        await sweep(database, s3)
        assert [manifest["results"] for manifest in archives(s3, uid).values()] == [40]
        assert [key for key in s3.objects(folder_of(uid)) if key.endswith(bucket.TEMPORARY)] == []


async def test_a_server_that_is_busy_for_a_moment_is_no_failure(database: Database, s3: S3Server) -> None:
    await store(database, a_round(), range(40))
    refused = set[str]()

    def busy(method: str, path: str) -> int | None:
        if (name := f"{method} {path}") in refused:
            return None
        refused.add(name)
        return 503

    s3.fault = busy
    await sweep(database, s3)
    s3.fault = lambda _method, _path: None
    assert len(archives(s3)) == 1


async def what_was_interrupted_is_seen_by_no_reader(database: Database, s3: S3Server) -> None:
    """Not even if it cannot be deleted; the next try does that."""
    await until(lambda: any(request.startswith("DELETE") for request in s3.requests))
    s3.fault = lambda _method, _path: None
    assert len(s3.objects()) == 1, "pyarrow completes an upload whatever happens"
    nothing_half_written(s3)
    await sweep(database, s3)
    assert [manifest["results"] for manifest in archives(s3).values()] == [40]
    assert [key for key in s3.objects() if key.endswith(bucket.TEMPORARY)] == []


async def test_a_database_that_fails_in_the_middle_leaves_nothing_half_written(
    database: Database, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store(database, a_round(), range(40))
    read, reads = export.Scan.read, list[int]()

    def failing(self: export.Scan, connection: Any) -> Any:  # noqa: ANN401 - as it has it
        reads.append(1)
        if len(reads) == 3:
            raise FenceLost("another owns it")
        return read(self, connection)

    monkeypatch.setattr(export.Scan, "read", failing)
    s3.fault = lambda method, _path: 403 if method == "DELETE" else None
    with pytest.raises(FenceLost):
        await sweep(database, s3)
    await what_was_interrupted_is_seen_by_no_reader(database, s3)


async def test_a_gateway_that_ends_in_the_middle_leaves_nothing_half_written(
    database: Database, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store(database, a_round(), range(40))
    begun, goes_on, read = asyncio.Event(), threading.Event(), export.Scan.read
    loop, reads = asyncio.get_running_loop(), list[int]()

    def slow(self: export.Scan, connection: Any) -> Any:  # noqa: ANN401 - as it has it
        reads.append(1)
        if len(reads) == 3:
            loop.call_soon_threadsafe(begun.set)
            goes_on.wait(30)
        return read(self, connection)

    monkeypatch.setattr(export.Scan, "read", slow)
    s3.fault = lambda method, _path: 403 if method == "DELETE" else None
    sweeping = asyncio.create_task(sweep(database, s3))
    await begun.wait()
    sweeping.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await sweeping
    await what_was_interrupted_is_seen_by_no_reader(database, s3)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_wherever_the_process_is_killed_there_is_one_archive_in_the_end(
    database: Database, database_url: str, s3: S3Server
) -> None:
    for place in await places_of_an_archive(database, s3):
        uid = f"killed-{place}"
        await store(database, a_round(uid), range(40))
        process = archiving(database_url, s3.settings)
        seen = list[str]()

        def kill(
            method: str,
            path: str,
            seen: list[str] = seen,
            place: int = place,
            process: Any = process,  # noqa: ANN401
        ) -> None:
            seen.append(f"{method} {path}")
            if len(seen) == place + 1:
                os.kill(process.pid, signal.SIGKILL)

        s3.fault = kill
        process.start()
        await asyncio.to_thread(process.join, 60)
        assert process.exitcode == -signal.SIGKILL
        s3.fault = lambda _method, _path: None
        nothing_half_written(s3, uid)
        await sweep(database, s3)
        assert [manifest["results"] for manifest in archives(s3, uid).values()] == [40]
        assert [key for key in s3.objects(folder_of(uid)) if key.endswith(bucket.TEMPORARY)] == []
        assert all(await archived(database))


# The gateway, the command, and the page.


def command_of_page(pattern: str) -> str:
    """The one command of the page that matches."""
    (found,) = re.findall(rf"^ *({pattern}.*)$", PAGE.read_text(), re.MULTILINE)
    return str(found)


def run(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("operator", "image"))
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": search, **variables}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


async def test_a_gateway_archives_and_the_page_reads_what_it_wrote(
    database: Database, database_url: str, s3: S3Server, tmp_path: Path
) -> None:
    await store(database, a_round(), range(100))
    (tmp_path / "rounds.json").write_text("[]")
    with gateway(database_url, tmp_path / "rounds.json", tmp_path / "log", s3.settings):
        await until(lambda: bool(archives(s3)), seconds=60)
    ((folder, _),) = archives(s3).items()
    script = re.search(r'```python title="read_archive.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert script is not None
    (tmp_path / "read_archive.py").write_text(script[1])
    command = command_of_page("python3 read_archive.py ")
    address = f"s3://{BUCKET}/{folder}?region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{s3.port}"
    command = re.sub(r'"s3://[^"]*"', f'"{address}"', command)
    done = await asyncio.to_thread(run, command, tmp_path, **KEYS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("round-uid-1 100 results, ['nonce', 'slot', 'node_id', 'received_at', 'vector']")


@pytest.mark.long
async def test_a_gateway_ends_while_the_server_hangs(
    database: Database, database_url: str, s3: S3Server, tmp_path: Path
) -> None:
    await store(database, a_round(), range(100))
    (tmp_path / "rounds.json").write_text("[]")
    go_on, hangs = threading.Event(), threading.Event()

    def hang(_: str, __: str) -> int:
        hangs.set()
        go_on.wait(60)
        return 503

    s3.fault = hang
    try:
        with gateway(database_url, tmp_path / "rounds.json", tmp_path / "log", s3.settings) as running:
            await until(hangs.is_set, seconds=60)
            running.process.terminate()
            # S3 is given up after much more: a Kubernetes node would kill it first.
            assert await asyncio.to_thread(running.process.wait, 10) == 0
    finally:
        go_on.set()


_FAILS = """
import asyncio, sys
from poc_gateway import __main__
from poc_gateway.query.bucket import Bucket

async def fail(settings):
    bucket = Bucket(settings)
    bucket.later(lambda: bucket.has("folder"))
    sys.stdin.read(1)
    bucket.close()
    raise OSError("the port is taken")

__main__._run = fail
sys.argv = ["poc_gateway"]
__main__.main()
"""


def interrupt(process: int, *, main_thread: bool) -> None:
    """Send SIGINT to one thread. The kernel may choose any; the main one may also be about to wait, and not see it."""
    threads = {int(folder.name) for folder in Path(f"/proc/{process}/task").iterdir()}
    thread = process if main_thread else max(threads - {process})
    assert ctypes.CDLL(None, use_errno=True).tgkill(process, thread, int(signal.SIGINT)) == 0, ctypes.get_errno()


def ended(process: subprocess.Popen[bytes]) -> bytes:
    """Wait for the end, for less than S3 hangs, and return the log; with what all threads do, if it does not come."""
    try:
        return process.communicate(b"x", 40)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler's
        return process.communicate(timeout=10)[1]


def test_what_was_cancelled_with_the_signal_leaves_as_what_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    left = list[int]()

    def cancelled(_: object, __: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(sys, "argv", ["poc_gateway", "archive", "uid-1"])
    monkeypatch.setattr(program, "_settings", Settings)
    monkeypatch.setattr("vllm_poc.logs.configure", lambda *_: None)
    monkeypatch.setattr(program, "_perform", cancelled)
    monkeypatch.setattr(program, "leave", lambda _, status: left.append(status))
    with pytest.raises(SystemExit) as end:
        program.main()
    assert (end.value.code, left) == (128 + signal.SIGINT, [128 + signal.SIGINT])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "how",
    [
        "an error",
        *(pytest.param(how, marks=pytest.mark.long) for how in ("by hand", "by hand, told in another thread")),
    ],
)
async def test_a_process_ends_while_the_server_hangs_however_it_ends(
    database: Database, database_url: str, s3: S3Server, how: str
) -> None:
    await store(database, a_round(), range(100))
    go_on, hangs = threading.Event(), threading.Event()

    def hang(_: str, __: str) -> int:
        hangs.set()
        go_on.wait(60)
        return 503

    s3.fault = hang
    by_hand = how.startswith("by hand")
    path = os.pathsep.join(str(ROOT / folder) for folder in ("operator", "image", "."))
    variables = {**os.environ, **s3.settings, "PYTHONPATH": path, "POC_GATEWAY_DATABASE": database_url}
    variables["PYTHONFAULTHANDLER"] = "1"
    arguments = ["-m", "poc_gateway", "archive", "uid-1"] if by_hand else ["-c", _FAILS]
    pipe = subprocess.PIPE
    # A shell lets what it runs in the background ignore SIGINT, and so these tests.
    command = ["env", "--default-signal=INT", sys.executable, *arguments]
    process = subprocess.Popen(command, env=variables, stdin=pipe, stderr=pipe)  # noqa: ASYNC220
    try:
        await until(hangs.is_set, seconds=60)
        if by_hand:
            interrupt(process.pid, main_thread="another" not in how)
        log = await asyncio.to_thread(ended, process)
        assert process.returncode == (130 if by_hand else 1), log.decode()
        assert b"S3 does not answer" in log
    finally:
        go_on.set()
        process.kill()


async def test_what_was_interrupted_is_not_told_as_being_written(database: Database, s3: S3Server) -> None:
    """Its process was killed, or lost the database; and since then the round waits again, for its receiver."""
    await store(database, a_round(callbackURL="http://receiver"), range(20))
    await database.write(lambda one: one.execute(update(schema.rounds).values(archiving_since=1)) and None)
    await sweep(database, s3)
    assert await columns(database, "archiving_since", "archived_at") == [(None, None)]


async def test_a_round_is_archived_by_hand_and_the_gateway_finds_it(
    database: Database, database_url: str, s3: S3Server, tmp_path: Path
) -> None:
    known = await store(database, a_round(), range(100))
    command = command_of_page("python3 -m poc_gateway archive ").replace("poc/round-1", "{round}")
    variables = {**s3.settings, "POC_GATEWAY_DATABASE": database_url}
    for wanted in ("ns/round-uid-1", "uid-1"):
        done = await asyncio.to_thread(run, command.format(round=wanted), tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        ((folder, manifest),) = archives(s3).items()
        assert f"s3://{BUCKET}/{folder}/{MANIFEST}" in done.stderr
        assert manifest["results"] == 100
    assert await archived(database) == [False], "the command writes nothing to the gateway's database"
    s3.requests.clear()
    await sweep(database, s3)
    assert s3.writes == []
    assert await archived(database) == [True]
    await deliver(database, known, 100, vector(100))
    refused = await asyncio.to_thread(run, command.format(round="ns/other"), tmp_path, **variables)
    assert refused.returncode == 1
    assert "there is no round ns/other: name one as NAMESPACE/NAME, or by its uid" in refused.stderr


async def test_what_cannot_be_archived_by_hand_says_why(
    database: Database, database_url: str, s3: S3Server, tmp_path: Path
) -> None:
    await store(database, a_round(callbackURL="http://receiver"), range(3))
    with pytest.raises(ArchiveError, match="still wait for their receiver"):
        await archive.by_hand(settings_for(s3, database=database_url), "uid-1")
    with pytest.raises(ArchiveError, match="set POC_GATEWAY_ARCHIVE_BUCKET"):
        await archive.by_hand(Settings(), "uid-1")
    missing = tmp_path / "missing.db"
    with pytest.raises(DatabaseError, match="there is no database: set POC_GATEWAY_DATABASE"):
        await archive.by_hand(settings_for(s3, database=f"sqlite:///{missing}"), "uid-1")
    assert not missing.exists()
    change = "UPDATE alembic_version SET version_num = '9999'"
    await database.write(lambda one: one.exec_driver_sql(change) and None)
    with pytest.raises(DatabaseError, match="use the release of its gateway"):
        await archive.by_hand(settings_for(s3, database=database_url), "uid-1")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("BUCKET", "s3://bucket", "must be the name of a bucket alone, without s3://"),
        ("BUCKET", "Bucket/folder", "must be the name of a bucket alone, without s3://"),
        ("PREFIX", "a b", "must be folders of letters"),
        ("ENDPOINT", "minio:9000", "must be http://HOST:PORT or https://HOST"),
        ("ENDPOINT", "http://minio:9000/path", "must be http://HOST:PORT or https://HOST"),
        ("REGION", "", "must be a region such as eu-central-1"),
        ("ACCESS_KEY", "key", "set POC_GATEWAY_ARCHIVE_ACCESS_KEY and POC_GATEWAY_ARCHIVE_SECRET_KEY, or neither"),
    ],
)
def test_a_setting_that_is_wrong_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Settings.from_environment({f"POC_GATEWAY_ARCHIVE_{name}": value})


def test_what_is_set_to_nothing_is_not_set() -> None:
    names = ("BUCKET", "ENDPOINT", "ACCESS_KEY", "SECRET_KEY")
    settings = Settings.from_environment({f"POC_GATEWAY_ARCHIVE_{name}": "" for name in names})
    assert (settings.archive_bucket, settings.archive_endpoint, settings.archive_access_key) == (None, None, None)
