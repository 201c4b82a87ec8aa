# SPDX-License-Identifier: Apache-2.0
"""The loop around each round: it turns only while the lease is held."""

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
        assert await operator._tick(driver) is True
        assert store.reads == 0
        await lease.acquire()
        assert await operator._tick(driver) is False
        assert store.reads == 1
