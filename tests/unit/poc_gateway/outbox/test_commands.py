# SPDX-License-Identifier: Apache-2.0
"""What is asked of the outbox by way of the database: durable before it is done, and done once."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from sqlalchemy import Connection, insert, select, update

from poc_gateway.errors import Refusal
from poc_gateway.outbox import commands as module
from poc_gateway.outbox import endings, forward, listing, pace
from poc_gateway.outbox.commands import Commands
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.states import State
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseUnavailable
from poc_gateway.store.rounds import KnownRound, by_id
from poc_gateway.store.schema import commands
from poc_operator.observed import Decision, Truth
from tests.support.builders.forwarding import Receiver, add_callback, add_round, running, settings, store, until


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = Database.open(database_url)
    yield opened
    opened.close()


async def a_round(database: Database, receiver: str, artifacts: int) -> KnownRound:
    round_id = await add_round(database, receiver)
    await store(database, round_id, range(artifacts))
    known = await database.read(partial(by_id, round_id=round_id))
    assert known is not None
    return known


@asynccontextmanager
async def obeying(asked: Commands, database: Database, outbox: Outbox) -> AsyncIterator[None]:
    task = asyncio.create_task(asked.obey(database, outbox))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_what_is_asked_is_done_by_the_owner(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda _: 503
    known = await a_round(database, receiver.url, 40)
    await add_callback(database, f"{receiver.url}/validated", {}, round_id=known.id)
    outbox, asked = Outbox(database, settings()), Commands(database)
    async with running(outbox), obeying(Commands(database), database, outbox):
        await until(lambda: len(receiver.posts) > 0)
        assert await asked.abandon(known, "too late") == 41
        assert await asked.abandon(known, "too late") == 0
        receiver.answer = lambda _: 200
        assert await asked.replay(known, State.ABANDONED) == 40
        await until(lambda: set(receiver.nonces) == set(range(40)))
    assert len(receiver.nonces) == 40


async def test_without_an_owner_it_is_kept_until_there_is_one(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.3)
    known = await a_round(database, receiver.url, 40)
    asked = Commands(database)
    with pytest.raises(Refusal, match="this is written down and not done yet") as told:
        await asked.abandon(known, "too late")
    assert (told.value.status_code, told.value.body.reason) == (503, "NotDoneYet")

    async def all_abandoned() -> bool:
        found = await database.read(partial(listing.counts, round_id=known.id))
        return found.abandoned == 40

    async with obeying(asked, database, Outbox(database, settings())):
        await until(all_abandoned)


async def test_what_is_asked_again_while_it_waits_is_one_command(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.1)
    known = await a_round(database, receiver.url, 10)
    asked = Commands(database)
    for reason in ("too late", "too late", "no more use", "too late"):
        with pytest.raises(Refusal):
            await asked.abandon(known, reason)
    assert len(await database.read(lambda one: one.execute(select(commands)).all())) == 2
    monkeypatch.setattr(module, "WAIT_SECONDS", 10)
    async with obeying(asked, database, Outbox(database, settings())):
        assert await asked.abandon(known, "too late") == 10
        assert await asked.abandon(known, "too late") == 0, "what is done is no command that waits"


async def test_a_command_whose_writes_fail_keeps_no_other_up(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = await a_round(database, receiver.url, 10), await a_round(database, receiver.url, 7)
    end_some = endings.end_some

    def failing(connection: Connection, round_id: int, *arguments: object, **named: object) -> int:
        if round_id == first.id:
            raise DatabaseUnavailable("the database is behind")
        return end_some(connection, round_id, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(endings, "end_some", failing)
    asking = asyncio.create_task(Commands(database).abandon(first, "too late"))
    async with obeying(Commands(database), database, Outbox(database, settings())):
        await until(lambda: not asking.done())
        assert await asyncio.wait_for(Commands(database).abandon(other, "too late"), 10) == 7
        monkeypatch.setattr(endings, "end_some", end_some)
        assert await asyncio.wait_for(asking, 10) == 10


async def test_a_command_that_always_fails_is_given_up_and_says_why(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, tries = await a_round(database, receiver.url, 10), 0

    def failing(*_: object, **__: object) -> int:
        nonlocal tries
        tries += 1
        raise ValueError("no\nuse")

    monkeypatch.setattr(endings, "end_some", failing)
    asked = Commands(database)
    async with obeying(asked, database, Outbox(database, settings())):
        with pytest.raises(Refusal, match=r"was given up .* ValueError: no use\. Correct what it says") as told:
            await asyncio.wait_for(asked.abandon(known, "too late"), 20)
        assert (told.value.status_code, told.value.body.reason) == (500, "CommandFailed")
        monkeypatch.undo()
        assert await asyncio.wait_for(asked.abandon(known, "too late"), 10) == 10, "asked again, it is another"
    assert tries == module.MOST_FAILURES


async def test_a_command_that_fails_and_then_does_not_is_done(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, tries, end_some = await a_round(database, receiver.url, 10), 0, endings.end_some

    def failing(*arguments: object, **named: object) -> int:
        nonlocal tries
        tries += 1
        if tries < module.MOST_FAILURES:
            raise ValueError("not yet")
        return end_some(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(endings, "end_some", failing)
    asked = Commands(database)
    async with obeying(asked, database, Outbox(database, settings())):
        assert await asyncio.wait_for(asked.abandon(known, "too late"), 20) == 10


async def test_what_is_asked_lets_a_post_that_began_end(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that takes its time is sent each payload once, however often something is decided meanwhile."""
    monkeypatch.setattr(pace, "FINISH_SECONDS", 0.2)

    async def slow(_: object) -> int:
        await asyncio.sleep(1.5)
        return 200

    receiver.answer = slow
    known = await a_round(database, receiver.url, 12)
    decision = Decision(nonce=0, truth=Truth.STORED, up_to=1, pod="c")
    outbox, asked = Outbox(database, settings()), Commands(database)
    async with running(outbox), obeying(asked, database, outbox):
        while len(receiver.nonces) < 12 and len(receiver.posts) < 12:
            await asked.decide(known, [decision])
            await asyncio.sleep(0.3)
        await until(lambda: len(receiver.nonces) >= 12)
    assert sorted(receiver.nonces) == list(range(12))
    assert len(receiver.posts) == len(receiver.accepted)


async def test_a_post_without_end_holds_up_what_is_asked_no_longer_than_it_may_take(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FINISH_SECONDS", 0.2)
    monkeypatch.setattr(forward, "FINISH_SECONDS", 0.2)
    known = await a_round(database, receiver.url, 4)
    outbox = Outbox(database, settings(forward_seconds=0.5), may_post=lambda: False)  # for which a post waits
    async with running(outbox):
        await asyncio.sleep(0.5)
        assert await asyncio.wait_for(outbox.abandon(known, "too late"), 20) == 4
    assert not receiver.posts


async def test_a_command_that_an_owner_began_is_finished_by_the_next(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "CHUNK_ARTIFACTS", 5)
    known = await a_round(database, receiver.url, 40)
    asked = asyncio.create_task(Commands(database).abandon(known, "too late"))
    chunks, end_some = 0, endings.end_some

    def some(*arguments: object, **named: object) -> int:
        nonlocal chunks
        chunks += 1
        if chunks == 3:
            raise FenceLost("another gateway owns the database now")
        return end_some(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(endings, "end_some", some)
    async with obeying(Commands(database), database, Outbox(database, settings())):
        assert await asyncio.wait_for(asked, 10) == 40
    assert chunks > 3
    (row,) = await database.read(lambda one: one.execute(select(commands)).all())
    assert row.ended_at is not None


async def test_a_command_of_another_release_keeps_no_other_up(database: Database, receiver: Receiver) -> None:
    known = await a_round(database, receiver.url, 10)
    odd = {"round_id": known.id, "kind": "polish", "body": "{}", "created_at": 1}
    await database.write(lambda one: one.execute(insert(commands).values(odd)) and None)
    async with obeying(Commands(database), database, Outbox(database, settings())):
        assert await asyncio.wait_for(Commands(database).abandon(known, "too late"), 10) == 10
    waiting = select(commands.c.kind).where(commands.c.ended_at.is_(None))
    assert await database.read(lambda one: list(one.scalars(waiting))) == ["polish"]


async def test_what_was_done_long_ago_is_forgotten(database: Database, receiver: Receiver) -> None:
    known = await a_round(database, receiver.url, 10)
    async with obeying(Commands(database), database, Outbox(database, settings())):
        await Commands(database).abandon(known, "too late")
        await database.write(lambda one: one.execute(update(commands).values(ended_at=1)) and None)
        await Commands(database).replay(known, State.ABANDONED)
        found = await database.read(lambda one: list(one.scalars(select(commands.c.kind))))
    assert found == ["replay"]


async def test_all_processes_tell_what_keeps_a_round(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda _: 503
    known = await a_round(database, receiver.url, 10)
    asked = Commands(database)
    assert await asked.trouble(known) == (None, 0.0)
    async with running(Outbox(database, settings(retry_first_seconds=60, retry_limit_seconds=60))):
        await until(lambda: len(receiver.posts) > 0)

        async def told() -> bool:
            error, seconds = await asked.trouble(known)
            return error is not None and "HTTP 503" in error and 20 < seconds <= 90

        await until(told)


async def test_an_address_in_trouble_is_told_too(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda _: 502
    known = await a_round(database, f"{receiver.url}/hook?token=secret", 10)
    asked = Commands(database)
    async with running(Outbox(database, settings(retry_first_seconds=60, retry_limit_seconds=60))):

        async def told() -> bool:
            return "HTTP 502" in str((await asked.trouble(known)).error)

        await until(told)
