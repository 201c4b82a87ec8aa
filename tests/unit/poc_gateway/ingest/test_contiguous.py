# SPDX-License-Identifier: Apache-2.0
"""``delivered_index``: in the artifact protocol only what is stored without a gap counts as delivered."""

from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.builders.deliveries import a_round, artifacts, distances
from tests.unit.poc_gateway.ingest.conftest import Gateway, Start


async def delivered(gateway: Gateway, uid: str = "uid-1") -> list[int]:
    status, told = await gateway.get(f"/rounds/ns/round-{uid}/progress")
    assert status == 200
    return [slot["delivered_index"] for slot in told["slots"]]


async def test_one_nonce_far_ahead_delivers_nothing(start: Start) -> None:
    async with start(a_round(groups=2)) as gateway:
        await gateway.deliver(artifacts([0, 2, 1]))
        assert await delivered(gateway) == [2, 1]
        assert (await gateway.deliver(artifacts([2147483646])))[0] == 200
        assert await delivered(gateway) == [2, 1]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([[2]], [0]),
        ([[2], [0]], [0, 2]),
        ([[2, 4], [6], [0]], [0, 0, 4]),
        ([[0, 4, 8], [2], [6]], [1, 3, 5]),
        ([[4, 2, 0]], [3]),
        ([[0], [0], [4], [4]], [1, 1, 1, 1]),
        ([[0, 2, 6], [8], [8]], [2, 2, 2]),
    ],
)
async def test_gaps_and_what_fills_them(start: Start, steps: list[list[int]], expected: list[int]) -> None:
    async with start(a_round(groups=2)) as gateway:
        for nonces, index in zip(steps, expected, strict=True):
            await gateway.deliver(artifacts(nonces))
            assert (await delivered(gateway))[0] == index


async def test_a_distance_round_is_delivered_up_to_its_last_result(start: Start) -> None:
    async with start(a_round(groups=2, rTarget="1.4")) as gateway:
        await gateway.deliver(distances([(4, 0.5), (10, 0.5)]))
        assert await delivered(gateway) == [6, 0]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=9, unique=True), min_size=1, max_size=9))
async def test_any_order_ends_at_the_first_gap(start: Start, batches: list[list[int]]) -> None:
    uid = f"uid-{uuid4().hex}"
    async with start(a_round(uid, groups=3)) as gateway:
        stored = set[int]()
        for some in batches:
            await gateway.deliver(artifacts([1 + 3 * index for index in some]), uid)
            stored.update(some)
            first_gap = next(index for index in range(22) if index not in stored)
            assert await delivered(gateway, uid) == [0, first_gap, 0]
