# SPDX-License-Identifier: Apache-2.0
"""Deliveries for a round whose rows are being deleted: nothing is acknowledged that goes with them."""

import asyncio
import json

from sqlalchemy import Connection, update

from poc_gateway.query.queries import nothing
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.retention import CHUNK_ROWS, Retention
from tests.support.builders.deliveries import ROUND, a_round, artifacts
from tests.unit.poc_gateway.ingest.conftest import Start

DAY = 86_400
VERDICT = json.dumps(ROUND).encode()


def retention(database: Database, seconds: int) -> Retention:
    settings = Settings.from_environment({"POC_GATEWAY_RETENTION_SECONDS": str(seconds)})
    return Retention(database, settings, lambda _: None)


async def test_a_round_that_is_being_deleted_takes_nothing_until_it_is_gone(start: Start) -> None:
    async with start(a_round()) as gateway:
        assert (await gateway.deliver(artifacts([0])))[0] == 200
        await gateway.database.write(lambda one: one.execute(update(schema.rounds).values(deleted_at=1)))
        verdict = await gateway.deliver(VERDICT, end="validated")
        known, looked_up = [await gateway.deliver(artifacts([nonce])) for nonce in (1, 2)]
        for status, body in (known, looked_up, verdict):
            assert (status, body["reason"]) == (503, "RoundDeleted")
        progress = "/rounds/ns/round-uid-1/progress"
        assert (await gateway.get(progress))[0] == 404
        assert (await gateway.get(f"{progress}?uid=uid-1"))[1] == nothing("uid-1").model_dump()
        assert await gateway.rows(schema.callbacks) == []

        await retention(gateway.database, 0).sweep()
        assert (await gateway.deliver(artifacts([2])))[0] == 200
        assert [row.nonce for row in await gateway.rows(schema.artifacts)] == [2]


async def test_a_verdict_for_a_round_that_was_deleted_is_to_be_delivered_again(start: Start) -> None:
    async with start(a_round()) as gateway:
        await gateway.deliver(artifacts([0]))
        await gateway.database.write(lambda one: one.execute(schema.rounds.delete()))
        status, body = await gateway.deliver(VERDICT, end="validated")
        assert (status, body["reason"]) == (503, "RoundDeleted")
        assert (await gateway.deliver(VERDICT, end="validated"))[0] == 200


async def test_what_is_acknowledged_during_a_deletion_is_kept(start: Start) -> None:
    def age(connection: Connection) -> None:
        connection.execute(update(schema.rounds).values(created_at=0))
        connection.execute(update(schema.artifacts).values(received_at=0))

    async with start(a_round()) as gateway:
        nonces = range(6 * CHUNK_ROWS)
        for first in nonces[::CHUNK_ROWS]:
            assert (await gateway.deliver(artifacts(nonces[first : first + CHUNK_ROWS])))[0] == 200
        await gateway.database.write(age)
        deletion = asyncio.create_task(retention(gateway.database, DAY).sweep())
        acknowledged, nonce = set[int](), nonces.stop
        while not deletion.done():
            if (await gateway.deliver(artifacts([nonce])))[0] == 200:
                acknowledged.add(nonce)
            nonce += 1
        await deletion
        assert acknowledged <= {row.nonce for row in await gateway.rows(schema.artifacts)}
