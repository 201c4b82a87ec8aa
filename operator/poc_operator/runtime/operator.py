# SPDX-License-Identifier: Apache-2.0
"""What the handlers share: connections, pods, and the rounds that are being driven."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Collection
from typing import Self
from uuid import uuid4

from poc_operator.model.pods import PodView
from poc_operator.podapi.client import PodClient
from poc_operator.podapi.collector import CollectorClient
from poc_operator.runtime.actions import Emit
from poc_operator.runtime.driver import POLL_SECONDS, RoundDriver
from poc_operator.runtime.logs import RoundRef
from poc_operator.runtime.metrics import Metrics
from poc_operator.runtime.pods import PodCache
from poc_operator.runtime.watches import CHECK_SECONDS, WatchCheck
from poc_operator.store.connection import connect
from poc_operator.store.errors import StaleRound, StoreError, StoreUnavailable
from poc_operator.store.lease import Lease
from poc_operator.store.rounds import RoundStore

log = logging.getLogger(__name__)

#: Seconds without a finished tick after which a round's loop counts as hung. A tick that stops pods
#: waits for their results.
HUNG_SECONDS = 180.0


class Operator:
    """One per process."""

    def __init__(
        self, store: RoundStore, lease: Lease, client: PodClient, collector: CollectorClient | None = None
    ) -> None:
        self._store = store
        self.lease = lease
        self._client = client
        self._collector = collector
        self._pods = PodCache(time.monotonic)
        self.metrics = Metrics()
        self._drivers: dict[str, RoundDriver] = {}  # by round uid
        self._last_tick: dict[str, float] = {}
        self._watches = WatchCheck(store, self._pods, self._last_tick.keys)

    @classmethod
    async def create(
        cls, client: PodClient, collector: CollectorClient | None, lease_namespace: str | None, identity: str | None
    ) -> Self:
        """Connect to the API server. Without ``collector`` pods deliver to the rounds' own callback addresses.

        ``identity`` is the name in the Lease, if it is not to be one that no other process ever has.
        """
        api, namespace = await connect()
        unique = f"{socket.gethostname()}-{uuid4().hex[:8]}"
        lease = Lease(api, lease_namespace or namespace, identity or unique, time.monotonic)
        return cls(RoundStore(api), lease, client, collector)

    async def close(self) -> None:
        """Close all connections; running rounds go on in their pods."""
        await self._client.close()
        if self._collector is not None:
            await self._collector.close()
        await self._store.close()

    def pod_changed(self, pod: PodView) -> None:
        """Remember a pod and let its rounds look at it at once."""
        if self._pods.put(pod):
            self._wake_rounds_of(pod)

    def pod_deleted(self, pod: PodView) -> None:
        """Forget a pod and let its rounds react at once."""
        if self._pods.remove(pod):
            self._wake_rounds_of(pod)

    def round_changed(self, uid: str, generation: int) -> None:
        """Let the round's loop look at its changed spec at once. A changed status is its own work and no news."""
        driver = self._drivers.get(uid)
        if driver is not None and driver.generation != generation:
            driver.wake.set()

    def _wake_rounds_of(self, pod: PodView) -> None:
        for driver in self._drivers.values():
            if driver.concerns(pod):
                driver.wake.set()

    async def check_watches(self, namespaces: Collection[str]) -> None:
        """Compare the watches with lists, for ever."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await self._watches.check(namespaces)
            except StoreError as error:
                self.metrics.api_server_failed(error)
                log.warning("API server: %s; the watches are compared with lists later", error)

    def ailments(self) -> list[str]:
        """Return what only a new process can heal: rounds whose loop hangs, changes that a watch missed."""
        hung = [f"round {uid} hangs" for uid in self.hung_rounds()]
        return hung + self._watches.missed

    def hung_rounds(self) -> list[str]:
        """Return the uids of rounds whose loop has not finished a tick for too long."""
        oldest = time.monotonic() - HUNG_SECONDS
        return [uid for uid, tick in self._last_tick.items() if tick < oldest]

    def driver(self, ref: RoundRef, emit: Emit) -> RoundDriver:
        """Return a driver for the round."""
        return RoundDriver(
            ref,
            store=self._store,
            client=self._client,
            pods=self._pods,
            metrics=self.metrics,
            emit=emit,
            collector=self._collector,
        )

    async def drive(self, uid: str, driver: RoundDriver) -> None:
        """Drive the round until it is finished. A cancellation is safe at any moment."""
        self._drivers[uid] = driver
        try:
            self._last_tick[uid] = time.monotonic()
            while await self._tick(driver):
                self._last_tick[uid] = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(driver.wake.wait(), POLL_SECONDS)
                driver.wake.clear()
        finally:
            await driver.close()
            self._drivers.pop(uid, None)
            self._last_tick.pop(uid, None)

    async def _tick(self, driver: RoundDriver) -> bool:
        """Take one step; trouble with the API server is logged and tried again at the next tick."""
        if not self.lease.held:
            return True  # the process is about to end: another may act by now
        try:
            return await driver.tick()
        except StaleRound as error:
            self.metrics.api_server_failed(error)
            driver.log.debug("the round changed while it was planned; planning again")
        except StoreUnavailable as error:
            self.metrics.api_server_failed(error)
            driver.log.warning("API server: %s; trying again", error)
        return True
