# SPDX-License-Identifier: Apache-2.0
"""Order, completeness and what is written down, against a real receiver."""

import asyncio

import pytest
import sqlalchemy
from sqlalchemy import func, select

from poc_gateway.outbox.forward import Outbox
from poc_gateway.store.database import Database
from poc_gateway.store.engine import WAIT_SECONDS
from poc_gateway.store.schema import late_items, slots
from tests.support.builders.forwarding import Post, Receiver, add_round, running, settings, store, until


async def forwarded(database: Database) -> int:
    return await database.read(lambda connection: connection.scalar(select(func.sum(slots.c.forwarded))) or 0)


async def test_each_slot_in_the_order_of_its_nonces_and_slots_in_turn(database: Database, receiver: Receiver) -> None:
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, range(20))
    async with running(Outbox(database, settings())):
        await until(lambda: len(receiver.nonces) == 20)
    assert [post.nonces for post in receiver.posts] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
        [16, 18],
        [17, 19],
    ]
    assert [post.body["node_id"] for post in receiver.posts] == [0, 1, 0, 1, 0, 1]


async def test_a_payload_is_what_a_pod_would_have_sent(database: Database, receiver: Receiver) -> None:
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, [1])
    async with running(Outbox(database, settings())):
        await until(lambda: bool(receiver.accepted))
    assert receiver.posts[0].body == {
        "public_key": "key",
        "block_hash": "a" * 64,
        "block_height": 7,
        "node_id": 1,
        "artifacts": [{"nonce": 1, "vector_b64": "ADwAOA=="}],
        "encoding": {"dtype": "f16", "k_dim": 2, "endian": "le"},
    }
    assert receiver.posts[0].path == "/generated"


async def test_distances(database: Database, receiver: Receiver) -> None:
    round_id = await add_round(database, receiver.url, protocol="distance", k_dim=None, r_target=1.5)
    await store(database, round_id, [0, 6], distance=1.25)
    async with running(Outbox(database, settings())):
        await until(lambda: bool(receiver.accepted))
    assert {"nonces": [0, 6], "dist": [1.25, 1.25], "r_target": 1.5}.items() <= receiver.posts[0].body.items()


async def test_the_receivers_path_is_sent_as_it_is_written(database: Database, receiver: Receiver) -> None:
    base = f"{receiver.url}/v2/poc-batches/org%252fmodel%2520%41"
    await store(database, await add_round(database, base), [0])
    async with running(Outbox(database, settings())):
        await until(lambda: bool(receiver.accepted))
    assert receiver.posts[0].path == "/v2/poc-batches/org%252fmodel%2520%41/generated"


async def test_what_arrives_together_or_shortly_after_is_one_post(database: Database, receiver: Receiver) -> None:
    round_id = await add_round(database, receiver.url)
    async with running(Outbox(database, settings(payload_artifacts=100))) as outbox:
        await store(database, round_id, range(0, 10, 2))
        outbox.wake()
        await until(lambda: len(receiver.nonces) == 5)
        for nonce in range(10, 30, 2):
            await store(database, round_id, [nonce])
            outbox.wake()
        await until(lambda: len(receiver.nonces) == 15)
    assert len(receiver.posts) <= 3


async def test_late_artifacts_go_out_by_themselves_and_once(database: Database, receiver: Receiver) -> None:
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, [0, 8, 10])
    await store(database, round_id, [4])  # before anything was forwarded: not to be sent with the others, too
    async with running(Outbox(database, settings())):
        await until(lambda: len(receiver.nonces) == 4)
        await store(database, round_id, [2, 6])
        await until(lambda: len(receiver.nonces) == 6)
        await until_settled(database, 6)
    assert [post.nonces for post in receiver.posts] == [[0, 8, 10], [4], [2, 6]]
    assert not await database.read(lambda connection: connection.scalar(select(func.count()).select_from(late_items)))


async def until_settled(database: Database, count: int) -> None:
    async def settled() -> bool:
        return await forwarded(database) == count

    await until(settled)


async def test_nothing_is_sent_again_after_a_restart(database: Database, receiver: Receiver) -> None:
    """The receiver answers slowly: the outbox is ended while a payload is on its way, and takes its answer down."""

    async def slowly(_: Post) -> int:
        await asyncio.sleep(0.3)
        return 200

    receiver.answer = slowly
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, range(40))
    for stop_after in (1, 4, 7):
        async with running(Outbox(database, settings())):
            await until(lambda stop_after=stop_after: len(receiver.posts) == stop_after)  # type: ignore[misc]
        assert len(receiver.posts) == stop_after
        assert await forwarded(database) == 4 * stop_after
    async with running(Outbox(database, settings())):
        await until(lambda: len(receiver.nonces) == 40)
    assert len(receiver.posts) == 10
    assert sorted(receiver.nonces) == list(range(40))


async def test_a_commit_that_fails_is_repeated_instead_of_the_post(database: Database, receiver: Receiver) -> None:
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, range(8))

    def lock(_: Post) -> int:
        other.exec_driver_sql("BEGIN IMMEDIATE")  # and keep it for longer than a write waits
        receiver.answer = lambda _: 200
        return 200

    receiver.answer = lock
    with sqlalchemy.create_engine(database.engine.url).connect() as other:
        async with running(Outbox(database, settings())):
            await until(lambda: bool(receiver.accepted))
            await asyncio.sleep(WAIT_SECONDS + 0.5)
            assert len(receiver.posts) == 1
            other.exec_driver_sql("ROLLBACK")
            await until(lambda: len(receiver.nonces) == 8)
    assert sorted(receiver.nonces) == list(range(8))


async def test_rounds_without_a_receiver_are_kept(database: Database, receiver: Receiver) -> None:
    await store(database, await add_round(database, None), range(4))
    await store(database, await add_round(database, receiver.url), [0])
    async with running(Outbox(database, settings())):
        await until_settled(database, 1)
    assert len(receiver.posts) == 1


async def test_a_round_that_is_deleted_meanwhile_ends(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda _: 503
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, range(8))
    async with running(Outbox(database, settings())) as outbox:
        await until(lambda: len(receiver.posts) > 1)
        await database.write(lambda connection: connection.exec_driver_sql("DELETE FROM rounds"))
        await until(lambda: outbox.forwarder(round_id) is None)


@pytest.mark.parametrize("receiver_url", ["http://[::1", "ftp://host/x", "http://user@127.0.0.1:1", "http://ho st/"])
async def test_an_address_that_cannot_be_used_is_the_rounds_error(database: Database, receiver_url: str) -> None:
    round_id = await add_round(database, receiver_url)
    await store(database, round_id, [0])
    async with running(Outbox(database, settings())) as outbox:
        await until(lambda: (forwarder := outbox.forwarder(round_id)) is not None and forwarder.error is not None)
        forwarder = outbox.forwarder(round_id)
        assert forwarder is not None
        assert "the receiver's URL" in str(forwarder.error)
