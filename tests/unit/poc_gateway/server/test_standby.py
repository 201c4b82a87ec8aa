# SPDX-License-Identifier: Apache-2.0
"""Two gateways on one SQLite database: one owns it, the other stands by. And the lock, and the epoch, of both kinds."""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from poc_gateway.server.standby import opened, while_owner
from poc_gateway.store import fence
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseUnavailable
from poc_gateway.store.fence import fence_of, give_up, next_epoch
from tests.simulation.gateway_process import GatewayProcess, gateway, wait_until_ready
from tests.support.builders.deliveries import JSON, artifacts, path, round_body
from tests.support.builders.forwarding import Receiver, until
from tests.support.servers.postgres import PostgresServer


@pytest.fixture
def rounds(tmp_path: Path) -> Path:
    return tmp_path / "rounds.json"


def describe(rounds: Path, receiver: Receiver) -> dict[str, str]:
    rounds.write_text(json.dumps([round_body(callbackURL=receiver.url)]))
    return {"POC_GATEWAY_RECEIVER_PRIVATE": "127.0.0.0/8", "POC_GATEWAY_PAYLOAD_ARTIFACTS": "100"}


def reason(running: GatewayProcess, url: str) -> tuple[int, str]:
    answer = httpx.post(running.url + url, content=artifacts([1]), headers=JSON, timeout=30)
    return answer.status_code, answer.json()["reason"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_second_stands_by_and_takes_over_when_the_first_is_killed(
    database_url: str, tmp_path: Path, rounds: Path
) -> None:
    async with Receiver().served() as receiver:
        settings = describe(rounds, receiver)
        with (
            gateway(database_url, rounds, tmp_path / "first", settings) as first,
            gateway(database_url, rounds, tmp_path / "second", settings, wait=False) as second,
        ):
            await until(lambda: "stands by" in (tmp_path / "second").read_text(), seconds=30)
            for url in (path(), "/readyz"):
                assert await asyncio.to_thread(reason, second, url) == (503, "StandBy")
            async with httpx.AsyncClient(timeout=30) as client:
                assert (await client.get(second.url + "/livez")).status_code == 200
                for start in range(0, 3_000, 500):
                    body = artifacts(range(start, start + 500))
                    answer = await client.post(first.url + path(), content=body, headers=JSON)
                    assert answer.status_code == 200
                await until(lambda: len(receiver.posts) > 5)
                first.process.kill()
                killed = time.monotonic()
                await asyncio.to_thread(wait_until_ready, second.process, second.url)
                assert time.monotonic() - killed < 20
                answer = await client.post(second.url + path(), content=artifacts([3_000]), headers=JSON)
                assert answer.json()["stored"] == 1
                await until(lambda: len(nonces(receiver)) == 3_001, seconds=30)
        # The payload that was on its way may have come twice.
        assert sum(count - 1 for count in nonces(receiver).values()) <= 100


def nonces(receiver: Receiver) -> Counter[int]:
    return Counter(artifact["nonce"] for post in receiver.accepted for artifact in post.body["artifacts"])


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_an_owner_that_loses_its_lock_sends_nothing_until_it_has_it_again(
    database_url: str, tmp_path: Path, rounds: Path, postgres_server: PostgresServer
) -> None:
    async with Receiver().served() as receiver:
        settings = describe(rounds, receiver)
        with gateway(database_url, rounds, tmp_path / "log", settings) as first:
            await until(lambda: "this gateway owns the database" in (tmp_path / "log").read_text())
            await asyncio.to_thread(postgres_server.end_sessions)
            await until(lambda: "the database's fence is lost" in (tmp_path / "log").read_text(), seconds=15)
            async with httpx.AsyncClient(timeout=30) as client:
                answer = await client.post(first.url + path(), content=artifacts(range(50)), headers=JSON, timeout=30)
                while answer.status_code == 503:
                    await asyncio.sleep(0.2)
                    answer = await client.post(first.url + path(), content=artifacts(range(50)), headers=JSON)
                assert answer.status_code == 200
            await until(lambda: len(nonces(receiver)) == 50, seconds=30)
            assert first.process.poll() is None


async def test_who_owned_the_database_before_writes_no_more(database_url: str) -> None:
    first = Database.open(database_url, fenced=True)
    await first.write(lambda one: one.execute(text("SELECT 1")) and None)
    second = Database.open(database_url, fenced=True)
    with pytest.raises(FenceLost, match="this one stands by"):
        await first.write(lambda one: one.execute(text("SELECT 1")) and None)
    with pytest.raises(FenceLost):
        await first.take_over()
    await second.write(lambda one: one.execute(text("SELECT 1")) and None)
    await second.take_over()
    first.close()
    second.close()


async def test_the_lock_is_one_processes_at_a_time(database_url: str) -> None:
    Database.open(database_url).close()
    first, second = fence_of(database_url), fence_of(database_url)
    assert (first.take(), first.take(), first.holds()) == (True, True, True)
    assert (second.take(), second.holds()) == (False, False)
    first.close()
    assert not first.holds()
    await until(second.take)  # PostgreSQL ends a session after its client has gone
    second.close()


async def test_who_has_the_lock_but_not_the_database_any_more_ends(database_url: str) -> None:
    lock = fence_of(database_url)
    assert lock.take()
    database = Database.open(database_url, fenced=True)

    async def write_always() -> None:
        while True:
            with contextlib.suppress(FenceLost):
                await database.write(lambda _: None)
            await asyncio.sleep(0.05)

    try:
        owning = asyncio.create_task(while_owner(lock, database, write_always))
        await asyncio.sleep(0.2)
        with database.engine.begin() as connection:
            next_epoch(connection)  # as in a database that was restored
        with pytest.raises(FenceLost):
            await asyncio.wait_for(owning, 20)
    finally:
        database.close()
        lock.close()


async def test_a_database_that_is_being_opened_is_waited_for_at_the_end(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    databases = list[Database]()

    def open_slowly() -> Database:
        begun.set()
        go_on.wait(20)
        databases.append(Database.open(f"sqlite:///{tmp_path}/gateway.db"))
        return databases[0]

    opening = asyncio.create_task(opened(open_slowly))
    await asyncio.to_thread(begun.wait, 20)
    opening.cancel()
    await asyncio.sleep(0.1)
    assert not opening.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    with pytest.raises(DatabaseUnavailable):
        await databases[0].write(lambda _: None)


async def test_the_last_owner_has_ended_in_order_or_not(database_url: str) -> None:
    first = Database.open(database_url, fenced=True)
    assert first.was_given_up, "there was none before"
    first.close()
    second = Database.open(database_url, fenced=True)
    assert not second.was_given_up
    await second.write(give_up)
    second.close()
    third = Database.open(database_url, fenced=True)
    assert third.was_given_up
    third.close()


def test_a_lock_is_certain_for_a_while_after_it_was_seen(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Database.open(database_url).close()
    lock = fence_of(database_url)
    assert (lock.is_taken, lock.is_certain) == (False, False)
    assert lock.take()
    assert (lock.is_taken, lock.is_certain) == (True, True)
    monkeypatch.setattr(fence, "CERTAIN_SECONDS", 0.0)
    # A file's lock cannot be lost while the process lives.
    assert (lock.is_taken, lock.is_certain) == (True, database_url.startswith("sqlite"))
    monkeypatch.undo()
    lock.close()
    assert (lock.is_taken, lock.is_certain) == (False, False)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_lock_whose_owner_hangs_is_lost(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "_SESSION", (*fence._SESSION, "SET idle_session_timeout = 1000"))
    Database.open(database_url).close()
    first, second = fence_of(database_url), fence_of(database_url)
    assert first.take()
    deadline = time.monotonic() + 30
    while not second.take():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not first.holds()
    second.close()
