# SPDX-License-Identifier: Apache-2.0
"""The loop around each round: only while the lease is held, and no ailments while it turns."""

import asyncio
import time
from typing import cast

from poc_operator.model.round import Round
from poc_operator.podapi.client import PodClient
from poc_operator.runtime.logs import RoundRef
from poc_operator.runtime.operator import Operator
from poc_operator.store.lease import Lease
from poc_operator.store.rounds import RoundStore
from tests.support.lease_api import lease_api
from tests.unit.poc_operator.build import UID


class GoneRound:
    """A store whose round does not exist, which counts how often it is asked."""

    reads = 0

    async def get(self, namespace: str, name: str) -> Round | None:
        """Return nothing."""
        self.reads += 1
        return None


async def test_rounds_stand_still_without_the_lease() -> None:
    async with lease_api() as (_, connection), PodClient() as client:
        store, lease = GoneRound(), Lease(connection, "ns", "me", time.monotonic)
        operator = Operator(cast(RoundStore, store), lease, client)
        driver = operator.driver(RoundRef("ns", "r", UID), lambda _: None)
        driving = asyncio.create_task(operator.drive(UID, driver))
        while driver.wake.is_set() or UID not in operator._last_tick:
            await asyncio.sleep(0.005)
        operator.round_changed(UID)
        while driver.wake.is_set():
            await asyncio.sleep(0.005)
        assert (store.reads, driving.done(), operator.ailments()) == (0, False, [])
        await lease.acquire()
        operator.round_changed(UID)
        await asyncio.wait_for(driving, 20)
        assert store.reads == 1
