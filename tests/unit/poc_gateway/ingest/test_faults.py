# SPDX-License-Identifier: Apache-2.0
"""What fails under deliveries: nothing that was acknowledged is lost, and every answer lets the sender try again."""

import asyncio
import json
import random
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from sqlalchemy import event, select

from poc_gateway.ingest import storing
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from tests.simulation.gateway_process import gateway as gateway_process
from tests.support.builders.deliveries import JSON, a_round, artifacts, path, round_body
from tests.support.fakes.held_write import HeldWrite
from tests.unit.poc_gateway.ingest.conftest import Start

KILLS = 3
GROUPS = 8
BATCH = 32
FULL_PAGES = 80


class Pod:
    """Delivers its slot in order, each batch until it is acknowledged, as pods do."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.acknowledged: list[int] = []
        self.went_on = asyncio.Event()

    async def deliver(self, session: aiohttp.ClientSession, url: str) -> None:
        """Deliver until the gateway is gone."""
        while True:
            first = self.group + len(self.acknowledged) * GROUPS
            nonces = range(first, first + BATCH * GROUPS, GROUPS)
            try:
                async with session.post(url + path(), data=artifacts(nonces)) as answer:
                    assert answer.status == 200, await answer.text()
                    body = await answer.json()
            except aiohttp.ClientError:
                return
            # A batch that was durable when the gateway was killed comes again whole.
            assert body["stored"] + body["duplicates"] == BATCH
            self.acknowledged += nonces
            self.went_on.set()


async def _until_all_went_on(pods: Sequence[Pod]) -> None:
    for pod in pods:
        pod.went_on.clear()
    async with asyncio.timeout(60):
        for pod in pods:
            await pod.went_on.wait()
    await asyncio.sleep(random.random() / 2)  # noqa: S311 - at any moment of the batches that follow


async def test_what_was_acknowledged_survives_kill(database_url: str, tmp_path: Path) -> None:
    rounds = tmp_path / "rounds.json"
    rounds.write_text(json.dumps([round_body(groups=GROUPS)]))
    pods = [Pod(group) for group in range(GROUPS)]
    for _ in range(KILLS):
        with gateway_process(database_url, rounds, tmp_path / "log") as running:
            async with aiohttp.ClientSession(headers=JSON) as session:
                delivering = asyncio.gather(*(pod.deliver(session, running.url) for pod in pods))
                await _until_all_went_on(pods)
                running.process.kill()
                await delivering
    database = Database.open(database_url)
    # PostgreSQL may only now commit what the killed gateway sent last: a single statement sees a single state.
    slots_and_nonces = select(schema.slots, schema.artifacts.c.nonce).join(schema.artifacts)
    rows = await database.read(lambda one: one.execute(slots_and_nonces).all())
    database.close()
    slots = {row.slot: (row.stored, row.last_nonce) for row in rows}
    for pod in pods:
        of_slot = {row.nonce for row in rows if row.slot == pod.group}
        assert set(pod.acknowledged) <= of_slot
        assert slots[pod.group] == (len(of_slot), max(of_slot))
        # At most the batch under way at the end is stored without its sender's knowledge.
        assert len(of_slot) - len(pod.acknowledged) in (0, BATCH)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_full_disk_loses_nothing_acknowledged(start: Start) -> None:
    async with start(a_round()) as gateway:
        engine = gateway.database.engine

        def limit(connection: sqlite3.Connection, _: object) -> None:
            connection.execute(f"PRAGMA max_page_count={FULL_PAGES}")

        event.listen(engine, "connect", limit)
        engine.dispose()
        acknowledged: list[int] = []
        while True:
            nonces = range(len(acknowledged), len(acknowledged) + 500)
            status, body = await gateway.deliver(artifacts(nonces))
            if status != 200:
                break
            acknowledged += nonces
        assert (status, body["reason"]) == (507, "StorageFull")
        assert acknowledged
        rows = await gateway.rows(schema.artifacts)
        assert [row.nonce for row in rows] == acknowledged
        # With room again the sender's next attempt succeeds.
        event.remove(engine, "connect", limit)
        engine.dispose()
        began = time.monotonic()
        while (await gateway.deliver(artifacts(nonces)))[0] != 200:
            assert time.monotonic() - began < 40
            await asyncio.sleep(0.2)


async def test_a_database_that_is_closed_is_unavailable(start: Start) -> None:
    async with start(a_round()) as gateway:
        await gateway.deliver(artifacts([0]))
        gateway.database.close()
        status, body = await gateway.deliver(artifacts([1]))
        assert (status, body["reason"]) == (503, "DatabaseUnavailable")
        status, body = await gateway.get("/readyz")
        assert (status, body["reason"]) == (503, "NotReady")


async def test_a_round_that_is_looked_for_holds_no_other_up(start: Start) -> None:
    async with start(a_round("uid-1"), a_round("uid-2")) as gateway:
        await gateway.deliver(artifacts([0]), "uid-1")
        gateway.forget("uid-1")  # as after a restart
        gateway.looking.clear()
        waiting = asyncio.create_task(gateway.deliver(artifacts([0]), "uid-2"))
        await asyncio.sleep(0.2)
        assert (await gateway.deliver(artifacts([1]), "uid-1"))[0] == 200
        assert not waiting.done()
        gateway.looking.set()
        assert (await waiting)[0] == 200


async def test_a_database_that_is_far_behind_is_unavailable(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "MOST_WAITING", 1)
    held = HeldWrite()
    async with start(a_round()) as gateway:
        await gateway.deliver(artifacts([0]))
        writing = asyncio.create_task(gateway.database.write(held))
        await held.begun()
        waiting = []
        for nonce in (1, 2, 4):  # the first is on its way to the database
            waiting.append(asyncio.create_task(gateway.deliver(artifacts([nonce, nonce + 4]))))
            await asyncio.sleep(0.2)
        held.release.set()
        answers = [status for status, _ in await asyncio.gather(*waiting)]
        await writing
    assert answers == [200, 200, 503]


async def test_a_round_that_was_deleted_begins_anew(start: Start) -> None:
    async with start(a_round()) as gateway:
        await gateway.deliver(artifacts([0, 1]))
        await gateway.database.write(lambda one: one.execute(schema.rounds.delete()))
        status, body = await gateway.deliver(artifacts([2]))
        assert (status, body["reason"]) == (503, "RoundDeleted")
        assert (await gateway.deliver(artifacts([2])))[0] == 200
        assert [row.nonce for row in await gateway.rows(schema.artifacts)] == [2]


async def test_deliveries_of_one_commit_do_not_mix(start: Start) -> None:
    """Many pods at once, some with the same nonces: each is told of its own artifacts."""
    async with start(a_round(groups=4)) as gateway:
        bodies = [artifacts([nonce, nonce + 4]) for nonce in (0, 1, 2, 3) for _ in range(5)]
        answers = await asyncio.gather(*(gateway.deliver(body) for body in bodies))
        assert sorted((body["stored"], body["duplicates"]) for _, body in answers) == [(0, 2)] * 16 + [(2, 0)] * 4
        slots = await gateway.rows(schema.slots)
    assert [(slot.stored, slot.duplicates, slot.conflicts) for slot in slots] == [(2, 8, 0)] * 4


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_delivery_that_fails_takes_no_other_along(start: Start) -> None:
    trap = "CREATE TRIGGER trap BEFORE INSERT ON artifacts WHEN new.nonce = 13 BEGIN SELECT RAISE(ABORT, 'trap'); END"
    async with start(a_round()) as gateway:
        await gateway.database.write(lambda one: one.exec_driver_sql(trap))
        answers = await asyncio.gather(*(gateway.deliver(artifacts([nonce])) for nonce in range(10, 20)))
        rows = await gateway.rows(schema.artifacts)
    refused = [(status, body["reason"]) for status, body in answers if status != 200]
    assert refused == [(500, "InternalError")]
    assert [row.nonce for row in rows] == [nonce for nonce in range(10, 20) if nonce != 13]
