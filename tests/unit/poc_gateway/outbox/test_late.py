# SPDX-License-Identifier: Apache-2.0
"""Results that arrive late while the slot has more to send than one payload takes: sent once, and counted once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import select

from poc_gateway.outbox import ledger, listing
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.listing import Counts
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseUnavailable
from poc_gateway.store.schema import late_items
from tests.support.builders.forwarding import Receiver, add_round, running, settings, store, until

LATE = {10, 11}


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = Database.open(database_url)
    yield opened
    opened.close()


async def late_round(database: Database, receiver: Receiver) -> int:
    """Store 20 results, five payloads of four, of which two arrive after their successors."""
    round_id = await add_round(database, receiver.url, node_count=1)
    await store(database, round_id, [nonce for nonce in range(20) if nonce not in LATE])
    await store(database, round_id, sorted(LATE))
    return round_id


async def sent(database: Database, round_id: int) -> Counts:
    """Forward until nothing is left; return the round's counts."""

    async def nothing_left() -> bool:
        return not await database.read(ledger.rounds_with_work)

    async with running(Outbox(database, settings())):
        await until(nothing_left)
    return await database.read(lambda connection: listing.counts(connection, round_id))


async def test_late_results_in_a_backlog_are_sent_once(database: Database, receiver: Receiver) -> None:
    round_id = await late_round(database, receiver)
    assert await sent(database, round_id) == (0, 20, 0, 0, 0, 0)
    assert sorted(receiver.nonces) == list(range(20))


async def test_a_late_result_that_is_refused_is_one_dead_letter(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda post: 400 if 11 in post.nonces else 200
    round_id = await late_round(database, receiver)
    assert await sent(database, round_id) == (0, 19, 1, 0, 0, 0)
    assert sorted(receiver.nonces) == [nonce for nonce in range(20) if nonce != 11]
    assert await database.read(lambda connection: connection.scalars(select(late_items.c.nonce)).all()) == [11]
    receiver.answer = lambda _: 200
    assert await database.write(lambda connection: ledger.replay(connection, round_id, None)) == 1
    assert await sent(database, round_id) == (0, 20, 0, 0, 0, 0)
    assert sorted(receiver.nonces) == list(range(20))


async def test_what_is_committed_without_an_answer_counts_once(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each payload's, also of late results and of those that are refused: the gateway writes it again."""
    attempt, told = database._attempt, set[tuple[int, int]]()

    def losing(writes: Any) -> list[Callable[[], None]]:  # noqa: ANN401
        answers = attempt(writes)
        answered = len(receiver.posts), len(receiver.accepted)
        if answered not in told:
            told.add(answered)
            raise DatabaseUnavailable("the server closed the connection after the commit")
        return answers

    round_id = await late_round(database, receiver)
    receiver.answer = lambda post: 400 if 13 in post.nonces or 11 in post.nonces else 200
    monkeypatch.setattr(database, "_attempt", losing)
    assert await sent(database, round_id) == (0, 18, 2, 0, 0, 0)
    assert sorted(receiver.nonces) == [nonce for nonce in range(20) if nonce not in {11, 13}]
    assert len(told) > 5
