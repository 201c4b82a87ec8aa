# SPDX-License-Identifier: Apache-2.0
"""Every item ends by name: delivered, refused, expired or abandoned, and each is listed."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import product
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Connection, select, update

from poc_gateway.outbox import callback_ledger, endings, ledger
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.post import Poster, SecretPoster
from poc_gateway.outbox.routes import router
from poc_gateway.outbox.states import ENDS, Event, State, after
from poc_gateway.store.database import Database
from poc_gateway.store.retention import Clock
from poc_gateway.store.schema import callbacks, late_items, rounds, slots
from tests.support.builders.forwarding import Receiver, add_callback, add_round, running, settings, store, until

ROUND = "/rounds/default/round"
DAY = 86_400
NAMES = ("backlog", "forwarded", "dead", "expired", "abandoned", "late")


@pytest.fixture
def database(database_url: str) -> Any:  # noqa: ANN401 - a fixture that yields
    opened = Database.open(database_url)
    yield opened
    opened.close()


@pytest.fixture
def outbox(database: Database) -> Outbox:
    return Outbox(database, settings())


@pytest.fixture
async def client(database: Database, outbox: Outbox) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI(routes=router(database, outbox).routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


async def counts(client: httpx.AsyncClient) -> dict[str, int]:
    answer = (await client.get(f"{ROUND}/forwarding")).json()
    return {name: answer[name] for name in NAMES}


async def listed(client: httpx.AsyncClient, state: State) -> list[tuple[int, int, int]]:
    """The ranges of a state, page by page."""
    found, after_nonce = list[tuple[int, int, int]](), -1
    while True:
        params: dict[str, str | int] = {"state": state, "after": after_nonce, "limit": 2}
        page = (await client.get(f"{ROUND}/ledger", params=params)).json()
        found += [(one["first_nonce"], one["last_nonce"], one["artifacts"]) for one in page["entries"]]
        if page["next"] is None:
            return found
        after_nonce = page["next"]


async def grow_old(database: Database, seconds: float) -> None:
    """Let everything have happened so long ago."""
    moment = ledger.now() - int(seconds * 1000)

    def write(connection: Connection) -> None:
        connection.execute(update(rounds).values(created_at=moment))
        connection.execute(update(slots).values(heard_at=moment))
        connection.execute(update(late_items).values(since=moment))
        connection.execute(update(callbacks).values(created_at=moment))

    await database.write(write)


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_an_end_is_left_by_a_person_alone(state: State, event: Event) -> None:
    assert after(State.WAITING, event) != State.WAITING or event in (Event.REPLAYED, Event.SETTLED)
    if state in ENDS and after(state, event) != state:
        assert event in (Event.REPLAYED, Event.ABANDONED)
    if state in (State.DELIVERED, State.KEPT):
        assert after(state, event) is state


async def test_a_round_whose_receiver_fails_for_ever_is_given_up(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient
) -> None:
    receiver.answer = lambda post: 400 if 2 in post.nonces else 200 if max(post.nonces) < 4 else 503
    round_id = await add_round(database, receiver.url, node_count=1)
    await store(database, round_id, [nonce for nonce in range(20) if nonce != 10])
    async with running(outbox):
        await until(lambda: (forwarder := outbox.forwarder(round_id)) is not None and forwarder.error is not None)
        await store(database, round_id, [10])
        answer = await client.delete(f"{ROUND}/ledger", params={"reason": "the host said so"})
        assert answer.json() == {"abandoned": 17}  # what was refused too
        assert await counts(client) == {
            "backlog": 0, "forwarded": 3, "dead": 0, "expired": 0, "abandoned": 17, "late": 0
        }  # fmt: skip
        posts = len(receiver.posts)
        receiver.answer = lambda _: 200
        await store(database, round_id, [20])
        await until(lambda: 20 in receiver.nonces)
    # Of what was given up nothing is sent any more; what arrives later is.
    assert [post.nonces for post in receiver.posts[posts:]] == [[20]]
    assert await listed(client, State.ABANDONED) == [(2, 2, 1), (4, 19, 15), (10, 10, 1)]
    assert await listed(client, State.DELIVERED) == [(0, 20, 4)]
    page = (await client.get(f"{ROUND}/ledger", params={"state": "abandoned"})).json()
    assert {one["reason"] for one in page["entries"]} == {"the host said so"}


async def test_a_round_that_is_ended_before_its_first_post_is_let_go(
    database: Database, outbox: Outbox, receiver: Receiver
) -> None:
    round_ = await add_round(database, receiver.url)
    await store(database, round_, range(10))
    async with Poster(settings()) as poster, asyncio.TaskGroup() as tasks:
        await outbox._start_forwarder(tasks, SecretPoster(poster, None), round_)
        outbox._tasks[round_].cancel()
    await asyncio.sleep(0)
    assert outbox.forwarder(round_) is None


async def test_what_waits_and_what_was_refused_is_listed(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient
) -> None:
    receiver.answer = lambda post: 400 if 1 in post.nonces else 200 if max(post.nonces) < 4 else 503
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, range(20))

    async def one_is_refused() -> bool:
        return (await counts(client))["dead"] == 1

    async with running(outbox):
        await until(one_is_refused)
    await store(database, round_id, [24, 22])
    assert await listed(client, State.REFUSED) == [(1, 1, 1)]
    assert await listed(client, State.EXPIRED) == []
    waiting = await listed(client, State.WAITING)
    assert sum(count for _, _, count in waiting) == (await counts(client))["backlog"]
    assert (22, 22, 1) in waiting


async def test_what_no_receiver_took_in_time_expires(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient
) -> None:
    receiver.answer = lambda _: 503
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, [0, 1, 2, 3, 6, 7])
    await store(database, round_id, [4])
    verdict = await add_callback(database, receiver.url, {"n": 1})
    await grow_old(database, DAY - 60)
    await outbox.expire()
    assert (await counts(client))["backlog"] == 7
    await grow_old(database, DAY + 60)
    young = await add_callback(database, receiver.url, {"n": 2})
    await outbox.expire()
    assert await counts(client) == {
        "backlog": 0, "forwarded": 0, "dead": 0, "expired": 7, "abandoned": 0, "late": 0
    }  # fmt: skip
    assert await listed(client, State.EXPIRED) == [(0, 6, 3), (1, 7, 3), (4, 4, 1)]
    found = (await client.get("/outbox")).json()["callbacks"]
    assert [(one["id"], one["state"]) for one in found] == [(verdict, "expired"), (young, "waiting")]
    receiver.answer = lambda _: 200
    async with running(outbox):
        await until(lambda: len(receiver.posts) == 1)
    assert receiver.posts[0].body == {"n": 2}


async def test_a_round_that_is_still_heard_of_does_not_expire(
    database: Database, outbox: Outbox, client: httpx.AsyncClient
) -> None:
    round_id = await add_round(database, "http://127.0.0.1:1")
    await store(database, round_id, range(6))
    await grow_old(database, 2 * DAY)
    await store(database, round_id, [6])
    await outbox.expire()
    assert (await counts(client))["backlog"] == 7


async def test_a_large_backlog_ends_in_parts(
    database: Database, outbox: Outbox, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "CHUNK_ARTIFACTS", 7)
    await store(database, await add_round(database, "http://127.0.0.1:1"), range(40))
    assert (await client.delete(f"{ROUND}/ledger")).json() == {"abandoned": 40}
    ranges = await listed(client, State.ABANDONED)
    assert [count for _, _, count in ranges] == [7, 7, 7, 7, 6, 6]
    assert (await counts(client))["abandoned"] == 40


async def test_of_a_round_without_a_receiver_there_is_nothing_to_give_up(
    database: Database, client: httpx.AsyncClient
) -> None:
    await store(database, await add_round(database, None), range(4))
    assert (await client.delete(f"{ROUND}/ledger")).json() == {"abandoned": 0}
    assert (await counts(client))["abandoned"] == 0


async def test_a_callback_is_given_up(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient
) -> None:
    receiver.answer = lambda post: 503 if post.body["n"] else 200
    done, late = [await add_callback(database, f"{receiver.url}/v?token=secret", {"n": n}) for n in (0, 1)]
    async with running(outbox):
        await until(lambda: len(receiver.posts) >= 3)
        assert (await client.delete(f"/outbox/{late}", params={"reason": "too late"})).json() == {"abandoned": 1}
        assert (await client.delete(f"/outbox/{done}")).json() == {"abandoned": 0}
        assert (await client.delete("/outbox/99")).status_code == 404
        posts = len(receiver.posts)
        await until(lambda: not outbox._senders)
    assert len(receiver.posts) <= posts + 1
    first, second = (await client.get("/outbox")).json()["callbacks"]
    assert (first["state"], second["state"], second["reason"]) == ("delivered", "abandoned", "too late")
    assert second["url"] == f"{receiver.url}/v"
    assert (await client.get("/outbox", params={"state": "abandoned"})).json()["callbacks"] == [second]
    assert (await client.get("/outbox", params={"limit": 1})).json()["next"] == done


async def test_a_verdict_without_a_receiver_can_be_read(database: Database, client: httpx.AsyncClient) -> None:
    round_id = await add_round(database, None, uid="uid-kept")
    add = partial(callback_ledger.add_verdict, round_id=round_id, receiver=None, body='{"n_total": 7}')
    assert await database.write(add)
    (found,) = (await client.get("/outbox", params={"uid": "uid-kept", "state": "kept"})).json()["callbacks"]
    assert (found["round"], found["url"], "body" in found) == ("uid-kept", None, False)
    assert (await client.get(f"/outbox/{found['id']}")).json()["body"] == '{"n_total": 7}'
    assert (await client.get("/outbox", params={"uid": "other"})).json()["callbacks"] == []
    assert (await client.get("/outbox/99")).json()["detail"].startswith("there is no callback 99")


@pytest.mark.parametrize("attempts", [0, 9])
async def test_a_new_vote_does_not_wait_for_two_thousand_dead_ones(
    database: Database, receiver: Receiver, attempts: int
) -> None:
    receiver.answer = lambda post: 503 if post.body["n"] else 200
    common = {"url": receiver.url, "state": "waiting", "attempts": attempts, "created_at": ledger.now() - 3_600_000}
    rows = [common | {"body": f'{{"n": {number}}}'} for number in range(1, 2_001)]
    await database.write(lambda connection: connection.execute(callbacks.insert(), rows) and None)
    outbox = Outbox(database, settings(retry_first_seconds=1, retry_limit_seconds=60))
    async with running(outbox):
        await until(lambda: len(receiver.posts) > 5)
        began = time.monotonic()
        await add_callback(database, receiver.url, {"n": 0})
        outbox.wake()
        await until(lambda: bool(receiver.accepted))
        assert time.monotonic() - began < 10


async def test_what_failed_waits_as_long_after_a_restart(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda _: 503
    await add_callback(database, receiver.url, {"n": 0})
    await store(database, await add_round(database, receiver.url), [0])
    slow = settings(retry_first_seconds=60, retry_limit_seconds=60)
    for _ in range(2):
        async with running(Outbox(database, slow)):
            await until(lambda: len(receiver.posts) == 2)
            await until(partial(_is_written, database))
    async with running(Outbox(database, slow)):
        with pytest.raises(TimeoutError):
            await until(lambda: len(receiver.posts) > 2, seconds=1.5)


async def _is_written(database: Database) -> bool:
    return bool(await database.read(lambda c: c.scalar(select(callbacks.c.attempts)))) and bool(
        await database.read(lambda c: c.exec_driver_sql("SELECT scope FROM backoffs").all())
    )


@pytest.mark.parametrize("days", [-40, 40])
async def test_a_clock_that_was_set_ends_nothing(database: Database, client: httpx.AsyncClient, days: int) -> None:
    wall, passed = [time.time()], [0.0]
    clock = Clock(database, wall=lambda: wall[0], monotonic=lambda: passed[0])
    outbox = Outbox(database, settings(), clock)
    await store(database, await add_round(database, "http://127.0.0.1:1"), range(4))
    await outbox.expire()
    wall[0] += days * DAY
    await grow_old(database, 40 * DAY)
    for _ in range(3):
        wall[0], passed[0] = wall[0] + 3600, passed[0] + 3600
        await outbox.expire()
    assert (await counts(client))["expired"] == 0
    wall[0], passed[0] = wall[0] + DAY, passed[0] + DAY
    await outbox.expire()
    assert (await counts(client))["expired"] == 4


@pytest.mark.parametrize("state", [State.EXPIRED, State.ABANDONED])
async def test_what_has_ended_is_sent_again_when_it_is_asked_for(
    database: Database,
    outbox: Outbox,
    receiver: Receiver,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    state: State,
) -> None:
    """Late items and ranges of several slots, in parts, and once each; nothing that has ended otherwise."""
    monkeypatch.setattr(endings, "CHUNK_ARTIFACTS", 7)
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, [nonce for nonce in range(60) if nonce not in (4, 5)])
    await store(database, round_id, [4, 5])
    event = Event.EXPIRED if state is State.EXPIRED else Event.ABANDONED
    while await database.write(lambda one: endings.end_some(one, round_id, event, "x")):
        pass
    await grow_old(database, 2 * DAY)
    assert (await counts(client))["backlog"] == 0
    other = {State.EXPIRED: "abandoned", State.ABANDONED: "expired"}[state]
    url = f"{ROUND}/ledger/replay"
    assert (await client.post(url, params={"state": other})).json() == {"replayed": 0}
    assert (await client.post(url, params={"state": "waiting"})).status_code == 422
    assert (await client.post(url, params={"state": state})).json() == {"replayed": 60}
    assert (await counts(client))["late"] == 60
    since = ledger.now() - DAY * 1000
    assert await database.read(lambda one: endings.rounds_overdue(one, since)) == []  # they wait since now
    async with running(outbox):
        await until(lambda: len(receiver.nonces) == 60)
    assert sorted(receiver.nonces) == list(range(60))
    await until(lambda: outbox.forwarder(round_id) is None)
    assert await counts(client) == dict(zip(NAMES, (0, 60, 0, 0, 0, 0), strict=True))
    assert (await client.post(url, params={"state": state})).json() == {"replayed": 0}


@pytest.mark.parametrize("state", [State.EXPIRED, State.ABANDONED, State.REFUSED])
async def test_a_callback_that_has_ended_is_sent_again(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient, state: State
) -> None:
    id_ = await add_callback(database, f"{receiver.url}/v", {"artifacts": []})
    assert (await client.post(f"/outbox/{id_}/replay")).json() == {"replayed": 0}  # it waits
    old = {"state": state, "ended_at": 5, "created_at": 1, "attempts": 9, "next_try_at": 2**50}
    await database.write(lambda one: one.execute(update(callbacks).values(old)))
    assert (await client.post(f"/outbox/{id_}/replay")).json() == {"replayed": 1}
    since = ledger.now() - DAY * 1000  # it is as young as if it were new
    assert await database.write(lambda one: callback_ledger.expire_callbacks(one, since, "x")) == 0
    async with running(outbox):
        await until(lambda: len(receiver.accepted) == 1)
    assert (await client.post("/outbox/999/replay")).status_code == 404
