# SPDX-License-Identifier: Apache-2.0
"""What the receiver once got for a nonce it gets again, if at all: the network compares early leaves with final ones.

A nonce for which another result came before it went out waits until somebody says which of the two is honest. And each
result goes out at the height of its own round, whichever is active by then.
"""

import struct
from base64 import b64decode
from collections import defaultdict
from functools import partial
from uuid import uuid4

from aiohttp import web
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import select

from poc_gateway.ingest.deliveries import CheckedArtifact, Delivery
from poc_gateway.ingest.storing import StoreResult, store
from poc_gateway.outbox import ledger
from poc_gateway.outbox.forward import Outbox
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, load
from tests.support.builders.forwarding import Post, Receiver, add_round, running, settings, until

HEIGHTS = (100, 400)
NODES = 2
#: Of a receiver that took what it got, and whose answer says otherwise, or that refuses it.
ANSWERS = st.sampled_from([200, 200, 503, 500, 400])
NONCES = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)
#: The place of a height, nonces, and which of several pods computed them.
DELIVERIES = st.tuples(st.sampled_from([0, 1]), NONCES, st.integers(0, 2))
#: What a process sees in its life.
LIFE = st.tuples(st.lists(DELIVERIES, max_size=4), st.lists(ANSWERS, max_size=4))

Leaves = dict[tuple[int, int], set[bytes]]


def vector(height: int, nonce: int, pod: int) -> bytes:
    return struct.pack("<2e", nonce + height, pod)


async def deliver(database: Database, known: KnownRound, nonces: list[int], pod: int) -> None:
    height = known.terms.block_height
    checked = [CheckedArtifact(known.slots[n % NODES], n, vector(height, n, pod)) for n in nonces]
    delivery = Delivery(known, checked=checked)
    (result,) = await database.write(lambda one: store(one, [delivery], ledger.now()))
    assert isinstance(result, StoreResult)
    assert result.stored + result.duplicates + len(result.conflicts) == len(nonces)


def leaves(posts: list[Post]) -> Leaves:
    """Return what arrived for each height and nonce, whatever was answered."""
    found = defaultdict[tuple[int, int], set[bytes]](set)
    for post in posts:
        for artifact in post.body["artifacts"]:
            found[post.body["block_height"], artifact["nonce"]].add(b64decode(artifact["vector_b64"]))
    return dict(found)


async def all_is_sent(database: Database) -> bool:
    late = select(schema.late_items.c.nonce).where(schema.late_items.c.state == "waiting")
    behind = select(schema.slots.c.id).where(schema.slots.c.last_nonce > schema.slots.c.forwarded_nonce)
    return not await database.read(lambda one: one.execute(late).all() or one.execute(behind).all())


@hypothesis_settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=st.lists(LIFE, min_size=1, max_size=4))
async def test_a_leaf_never_changes_and_keeps_its_height(
    database: Database, lives: list[tuple[list[tuple[int, list[int], int]], list[int]]]
) -> None:
    script, first, disputed = list[int](), dict[tuple[int, int], bytes](), set[tuple[int, int]]()

    def answer(_: Post) -> web.Response | int:
        return script.pop(0) if script else 200

    async with Receiver(answer).served() as receiver:
        uids = [uuid4().hex for _ in HEIGHTS]
        for uid, height in zip(uids, HEIGHTS, strict=True):
            await add_round(database, receiver.url, uid=uid, block_height=height, node_count=NODES)
        for deliveries, answers in lives:
            script[:] = answers
            async with running(Outbox(database, settings())):
                for place, nonces, pod in deliveries:
                    known = await database.read(partial(load, uid=uids[place]))
                    assert known is not None
                    await deliver(database, known, nonces, pod)
                    for nonce in nonces:
                        key = HEIGHTS[place], nonce
                        if first.setdefault(key, vector(*key, pod)) != vector(*key, pod):
                            disputed.add(key)
                await until(lambda: not script or all_is_sent(database))
            # What was refused for good is sent again by request.
            for uid in uids:
                known = await database.read(partial(load, uid=uid))
                assert known is not None
                await database.write(partial(ledger.replay, round_id=known.id, nonces=None))
        script.clear()
        async with running(Outbox(database, settings())):
            await until(partial(all_is_sent, database))
        sent = leaves(receiver.posts)
        assert sent == {key: {first[key]} for key in sent}
        assert first.keys() - sent.keys() <= disputed
