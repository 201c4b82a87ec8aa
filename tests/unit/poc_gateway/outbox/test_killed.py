# SPDX-License-Identifier: Apache-2.0
"""A gateway that is killed without warning, again and again."""

import asyncio
import multiprocessing
from collections import Counter
from pathlib import Path

from poc_gateway.outbox.forward import Outbox
from poc_gateway.store.database import Database
from tests.support.builders.forwarding import Receiver, add_round, running, settings, store, until

KILLS = 5


def forward(url: str) -> None:
    database = Database.open(url)
    asyncio.run(Outbox(database, settings()).run())


async def test_each_kill_repeats_one_payload_at_most_and_loses_none(tmp_path: Path, receiver: Receiver) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    database = Database.open(url)
    await store(database, await add_round(database, receiver.url), range(4000))
    database.close()
    for _ in range(KILLS):
        process = multiprocessing.get_context("spawn").Process(target=forward, args=(url,))
        process.start()
        try:
            count = len(receiver.posts)
            await until(lambda count=count: len(receiver.posts) > count + 20, seconds=30)  # type: ignore[misc]
        finally:
            process.kill()
            await asyncio.to_thread(process.join)
    database = Database.open(url)
    try:
        async with running(Outbox(database, settings())):
            await until(lambda: set(receiver.nonces) == set(range(4000)), seconds=30)
    finally:
        database.close()
    payloads = Counter(tuple(post.nonces) for post in receiver.accepted)
    assert len(payloads) == 1000
    assert payloads.total() <= 1000 + KILLS
