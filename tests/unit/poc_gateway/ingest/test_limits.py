# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import AsyncIterator

from poc_gateway.server.middleware import BURST_SECONDS, LARGEST_AT_ONCE, MOST_PEERS, Peers
from tests.support.builders.deliveries import a_round, artifacts, path
from tests.support.builders.forwarding import until
from tests.unit.poc_gateway.ingest.conftest import Start


async def test_large_bodies_are_refused(start: Start) -> None:
    async with start(a_round(), body_bytes=2048) as gateway:
        status, body = await gateway.deliver(artifacts([0]) + b" " * 2048)
        assert (status, body["reason"]) == (413, "BodyTooLarge")

        async def chunks() -> AsyncIterator[bytes]:
            yield artifacts([0])
            for _ in range(8):
                yield b" " * 256

        async with gateway.session.post(path(), data=chunks()) as answer:
            assert (answer.status, (await answer.json())["reason"]) == (413, "BodyTooLarge")
        assert (await gateway.deliver(artifacts([0])))[0] == 200


async def test_a_peer_that_asks_too_often_is_refused(start: Start) -> None:
    async with start(a_round(), peer_requests=0.5) as gateway:
        for _ in range(2):
            assert (await gateway.deliver(artifacts([0])))[0] == 200
        async with gateway.session.post(path(), data=artifacts([0])) as answer:
            assert (answer.status, (await answer.json())["reason"]) == (429, "TooManyRequests")
            assert answer.headers["Retry-After"] in ("1", "2")


async def test_bodies_under_way_are_bounded_together(start: Start) -> None:
    async with start(a_round(), body_bytes=2048) as gateway:
        arrived, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield artifacts([0])
            yield b" " * (2048 - len(artifacts([0])))
            arrived.set()
            await go_on.wait()

        async def deliver_slowly() -> int:
            async with gateway.session.post(path(), data=slow()) as answer:
                return answer.status

        async with asyncio.TaskGroup() as group:
            slowly = []
            for _ in range(LARGEST_AT_ONCE):
                slowly.append(group.create_task(deliver_slowly()))
                await arrived.wait()
                arrived.clear()

            async def is_busy() -> bool:
                status, body = await gateway.deliver(artifacts([1]))
                return (status, body.get("reason")) == (503, "Busy")

            await until(is_busy)
            # What has no body is answered all the same.
            assert (await gateway.get("/readyz"))[0] == 200
            go_on.set()
        assert [task.result() for task in slowly] == [200] * LARGEST_AT_ONCE
        assert (await gateway.deliver(artifacts([1])))[0] == 200


def test_requests_come_back_with_time() -> None:
    peers = Peers(8)
    burst = int(8 * BURST_SECONDS)
    assert [peers.wait_seconds("a", 0.0) for _ in range(burst)] == [0] * burst
    assert peers.wait_seconds("a", 0.0) > 0
    assert peers.wait_seconds("b", 0.0) == 0
    assert [peers.wait_seconds("a", 1.0) > 0 for _ in range(9)] == [False] * 8 + [True]


def test_the_peers_remembered_are_bounded() -> None:
    peers = Peers(1)
    for number in range(MOST_PEERS + 100):
        peers.wait_seconds(str(number), 0.0)
    assert len(peers._full_at) == MOST_PEERS
