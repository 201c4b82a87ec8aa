# SPDX-License-Identifier: Apache-2.0
"""Artifacts that a receiver refuses: found, buried one by one, sent again, and never all of them."""

import pytest
from aiohttp import web
from sqlalchemy import select

from poc_gateway.outbox import ledger, listing
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.round_sender import SEARCH_LIMIT
from poc_gateway.store.database import Database
from poc_gateway.store.schema import late_items
from tests.support.builders.forwarding import Post, Receiver, add_round, running, settings, store, until


async def dead(database: Database) -> dict[int, str]:
    query = select(late_items.c.nonce, late_items.c.reason).where(late_items.c.state == "refused")
    return dict(await database.read(lambda connection: connection.execute(query).all()))


@pytest.mark.parametrize("status", [400, 413, 422, 418])
async def test_the_bad_ones_are_found_and_the_others_accepted_in_order(
    database: Database, receiver: Receiver, status: int
) -> None:
    def refuse(post: Post) -> web.Response | int:
        bad = {6, 14} & set(post.nonces)
        return web.Response(status=status, text=f"cannot\x00 take\n{'it' * 200}") if bad else 200

    receiver.answer = refuse
    round_id = await add_round(database, receiver.url, node_count=1)
    await store(database, round_id, range(20))
    async with running(Outbox(database, settings(payload_artifacts=8))):
        await until(lambda: len(receiver.nonces) == 18)
    assert receiver.nonces == [nonce for nonce in range(20) if nonce not in {6, 14}]
    reasons = await dead(database)
    assert set(reasons) == {6, 14}
    assert reasons[6].startswith(f"HTTP {status}: cannot take itit")
    assert len(reasons[6]) == len(f"HTTP {status}: ") + 200


async def test_dead_letters_are_sent_again_when_asked_for(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda post: 400 if {1, 3} & set(post.nonces) else 200
    round_id = await add_round(database, receiver.url, node_count=1)
    await store(database, round_id, range(6))
    async with running(Outbox(database, settings())) as outbox:
        await until(lambda: len(receiver.nonces) == 4)
        assert await database.write(lambda connection: ledger.replay(connection, round_id, [3, 5])) == 1
        outbox.wake()
        await until(lambda: [post.nonces for post in receiver.posts].count([3]) == 2)

        async def dead_again() -> bool:
            return set(await dead(database)) == {1, 3}

        await until(dead_again)  # what it answered is written down a moment later
        receiver.answer = lambda _: 200
        assert await database.write(lambda connection: ledger.replay(connection, round_id, None)) == 2
        outbox.wake()
        await until(lambda: len(receiver.nonces) == 6)
    counts = await database.read(lambda connection: listing.counts(connection, round_id))
    assert counts == (0, 6, 0, 0, 0, 0)


async def test_a_receiver_that_refuses_everything_buries_no_more(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda _: 400
    round_id = await add_round(database, receiver.url, node_count=1)
    await store(database, round_id, range(200))

    def error(outbox: Outbox) -> str:
        forwarder = outbox.forwarder(round_id)
        return (forwarder.error or "") if forwarder is not None else ""

    async with running(Outbox(database, settings(payload_artifacts=100))) as outbox:
        await until(lambda: "refuses everything, last with HTTP 400" in error(outbox))
        count = len(receiver.posts)
        await until(lambda: len(receiver.posts) >= count + 3)
        assert [len(post.nonces) for post in receiver.posts[count:]] == [1, 1, 1]
        assert set(await dead(database)) == set(range(SEARCH_LIMIT))
        receiver.answer = lambda _: 200
        await until(lambda: receiver.nonces == list(range(SEARCH_LIMIT, 200)))
    assert len(await dead(database)) == SEARCH_LIMIT
