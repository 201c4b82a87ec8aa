# SPDX-License-Identifier: Apache-2.0
from collections.abc import AsyncIterator

from poc_gateway.limits import BURST_SECONDS, MOST_PEERS, Peers
from tests.support.deliveries import a_round, artifacts, path
from tests.unit.poc_gateway.collector.conftest import Start


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
