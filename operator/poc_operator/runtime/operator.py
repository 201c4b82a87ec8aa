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

#: Seconds after which a tick is given up. All that it waits for has shorter limits of its own.
TICK_SECONDS = 180.0
#: Longest pause, in seconds, between two tries of a round on which the operator fails; the first is `POLL_SECONDS`.
MOST_PAUSE_SECONDS = 300.0


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
        self._watches = WatchCheck(store, self._pods, self._drivers.keys)

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
            driver.changed.set()
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
            except Exception:
                log.exception("the watches could not be compared with lists; they are later")

    def ailments(self) -> list[str]:
        """Return what only a new process can heal: changes that a watch missed.

        A round on which the operator fails is none: it would fail again, and all other rounds with it. A loop that
        is blocked does not answer the probe.
        """
        return self._watches.missed

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
        pause = POLL_SECONDS
        try:
            while True:
                try:
                    if not await self._tick(driver):
                        return
                    pause, news = POLL_SECONDS, driver.wake
                except Exception as error:
                    await self._report(driver, error)
                    # News of pods would not help; another spec may.
                    pause, news = min(2 * pause, MOST_PAUSE_SECONDS), driver.changed
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), pause)
                driver.wake.clear()
                driver.changed.clear()
        finally:
            await driver.close()
            self._drivers.pop(uid, None)

    async def _report(self, driver: RoundDriver, error: Exception) -> None:
        """Log the operator's failure on a round, and tell the round's user."""
        driver.log.error("the operator fails on this round; others go on", exc_info=error)
        self.metrics.round_failed(error)
        try:
            await driver.report(error)
        except Exception as another:
            driver.log.warning("the failure cannot be told in the round: %s", another)

    async def _tick(self, driver: RoundDriver) -> bool:
        """Take one step; trouble with the API server is logged and tried again at the next tick."""
        if not self.lease.held:
            return True  # the process is about to end: another may act by now
        try:
            async with asyncio.timeout(TICK_SECONDS):
                return await driver.tick()
        except StaleRound as error:
            self.metrics.api_server_failed(error)
            driver.log.debug("the round changed while it was planned; planning again")
        except StoreUnavailable as error:
            self.metrics.api_server_failed(error)
            driver.log.warning("API server: %s; trying again", error)
        return True
