# SPDX-License-Identifier: Apache-2.0
"""Verdicts and results of jobs."""

import asyncio
from functools import partial

import pytest
from sqlalchemy import select, update

from poc_gateway.outbox import callback_ledger
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.ledger import now
from poc_gateway.outbox.states import Event
from poc_gateway.store.database import Database
from poc_gateway.store.schema import callbacks
from tests.support.builders.forwarding import Receiver, add_callback, running, settings, until
from tests.support.checks.cancellation import TURNS, ends_cancelled


async def states(database: Database) -> list[tuple[str, str | None]]:
    query = select(callbacks.c.state, callbacks.c.reason).order_by(callbacks.c.id)
    return [(state, reason) for state, reason in await database.read(lambda c: c.execute(query).all())]


def execute(database: Database, statement: str) -> None:
    """Execute a statement apart from the outbox's writes, which would fail together with it."""
    with database.engine.begin() as connection:
        connection.exec_driver_sql(statement)


async def test_they_are_posted_as_they_are_in_their_order_and_once(database: Database, receiver: Receiver) -> None:
    for number in range(5):
        await add_callback(database, f"{receiver.url}/cb/org%252Fm/validated", {"n_total": number})
    async with running(Outbox(database, settings())):
        await until(lambda: len(receiver.accepted) == 5)
    async with running(Outbox(database, settings())) as outbox:
        await add_callback(database, f"{receiver.url}/other", {"n_total": 5})
        outbox.wake()
        await until(lambda: len(receiver.accepted) == 6)
    assert [post.body["n_total"] for post in receiver.posts] == [0, 1, 2, 3, 4, 5]
    assert {post.path for post in receiver.posts} == {"/cb/org%252Fm/validated", "/other"}
    assert await states(database) == [("delivered", None)] * 6


async def test_one_that_is_refused_is_dead_and_one_that_fails_waits(database: Database, receiver: Receiver) -> None:
    answers = {0: 422, 1: 503, 2: 200, 3: 404, 4: 200}
    receiver.answer = lambda post: answers[post.body["n"]]
    for number in answers:
        await add_callback(database, receiver.url, {"n": number})
    async with running(Outbox(database, settings())):
        await until(lambda: [post.body["n"] for post in receiver.posts].count(3) == 2)
        delivered = ("delivered", None)
        failed = [("waiting", "HTTP 503"), ("waiting", "HTTP 404")]
        assert await states(database) == [("refused", "HTTP 422"), failed[0], delivered, failed[1], delivered]
        answers[1] = answers[3] = 200
        await until(lambda: len(receiver.accepted) == 4)
    assert [post.body["n"] for post in receiver.posts].count(0) == 1


async def test_the_order_outlasts_a_host_that_is_away(database: Database) -> None:
    async with Receiver().served() as down:
        url = down.url
    for number in range(4):
        await add_callback(database, url, {"n": number})
    async with running(Outbox(database, settings())) as outbox:
        await until(lambda: outbox._receivers.circuit(url).is_open)
        async with Receiver().served(port=int(url.rsplit(":", 1)[1])) as up:
            await until(lambda: len(up.accepted) == 4)
    assert [post.body["n"] for post in up.accepted] == [0, 1, 2, 3]


@pytest.mark.parametrize("pause", [0.0, 0.3, 0.9])
async def test_each_of_some_that_come_one_after_the_other_is_sent(
    database: Database, receiver: Receiver, pause: float
) -> None:
    async with running(Outbox(database, settings())) as outbox:
        for number in range(3):
            await add_callback(database, receiver.url, {"n": number})
            outbox.wake()
            await until(lambda: len(receiver.accepted) > number)  # noqa: B023 - called at once
            await asyncio.sleep(pause)
    assert [post.body["n"] for post in receiver.posts] == [0, 1, 2]


@pytest.mark.parametrize("event", [Event.ABANDONED, Event.EXPIRED])
async def test_one_that_ends_in_the_pause_of_its_address_is_not_sent(
    database: Database, receiver: Receiver, event: Event
) -> None:
    answers = [429]
    receiver.answer = lambda _: answers.pop() if answers else 200
    first, second = [await add_callback(database, f"{receiver.url}/validated", {"n": n}) for n in (1, 2)]
    async with running(Outbox(database, settings(retry_first_seconds=3, retry_limit_seconds=3))):
        await until(lambda: len(receiver.posts) == 1)
        await asyncio.sleep(0.5)
        assert await database.write(partial(callback_ledger.callback_ended, id_=second, event=event))
        await until(lambda: len(receiver.accepted) > 0)

        async def all_ended() -> bool:
            return "waiting" not in [state for state, _ in await states(database)]

        await until(all_ended)
    assert [post.body["n"] for post in receiver.posts] == [1, 1], f"callback {first} alone"


async def test_one_that_waits_for_nobody_is_left_alone(database: Database, receiver: Receiver) -> None:
    await add_callback(database, receiver.url, {})
    await database.write(lambda c: c.exec_driver_sql("UPDATE callbacks SET state = 'kept'"))
    await add_callback(database, receiver.url, {"n": 1})
    async with running(Outbox(database, settings())):
        await until(lambda: bool(receiver.posts))
    assert [post.body for post in receiver.posts] == [{"n": 1}]


async def test_a_database_that_fails_is_one_line_of_the_log(
    database: Database, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answer = lambda _: 503
    await add_callback(database, receiver.url, {})
    async with running(Outbox(database, settings())):
        await until(lambda: bool(receiver.posts))
        await asyncio.to_thread(execute, database, "ALTER TABLE callbacks RENAME TO away")
        await until(lambda: "what is to be forwarded cannot be read yet" in caplog.text)
        await asyncio.to_thread(execute, database, "ALTER TABLE away RENAME TO callbacks")
        receiver.answer = lambda _: 200
        await until(lambda: bool(receiver.accepted))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancellation_is_not_lost_to_news_that_come_with_it(database: Database, turns: int) -> None:
    """Neither of the outbox nor of what sends to an address, whose only callback is for another time."""
    await add_callback(database, "http://host.example/callback", {"n": 1})
    later = {"attempts": 1, "next_try_at": now() + 30_000}
    await database.write(lambda connection: connection.execute(update(callbacks).values(later)))
    outbox = Outbox(database, settings(retry_limit_seconds=60))
    task = asyncio.create_task(outbox.run())
    await asyncio.sleep(0.2)
    await ends_cancelled(task, outbox.wake, turns)
