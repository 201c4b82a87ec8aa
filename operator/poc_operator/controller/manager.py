# SPDX-License-Identifier: Apache-2.0
"""What the process has once: connections, the pod cache, the metrics, and a loop for each object."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Collection
from typing import Any, Self
from uuid import uuid4

from poc_operator.clients.errors import StaleObject, StoreError, StoreUnavailable
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.kube.connection import connect
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.actions import Emit
from poc_operator.controller.kinds import PLANNERS, Planner, Sources
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache, PodPoller
from poc_operator.controller.other_rounds import OtherRounds
from poc_operator.controller.reconciler import POLL_SECONDS, Reconciler
from poc_operator.controller.stale_watches import CHECK_SECONDS, StaleWatchCheck
from poc_operator.credentials import RATE_LIMIT
from poc_operator.observed import PodView

log = logging.getLogger(__name__)

#: Seconds after which one reconciliation is given up. All that it waits for has shorter limits of its own.
RECONCILE_SECONDS = 180.0


class Manager:
    """One per process."""

    def __init__(
        self,
        store: ObjectStore,
        lease: LeaderElection,
        client: PodClient,
        gateway: GatewayClient | None = None,
        rate_limit: int = RATE_LIMIT,
    ) -> None:
        self._store = store
        self.lease = lease
        self._client = client
        self._poller = PodPoller(client, time.monotonic)
        self._gateway = gateway
        self._sources = Sources(store=store, gateway=gateway, rate_limit=rate_limit)
        self._pods = PodCache(time.monotonic)
        self.metrics = Metrics()
        self._others = OtherRounds(time.monotonic)
        self._reconcilers: dict[str, Reconciler[Any]] = {}  # by the objects' uid
        kinds = [kind.resource for kind in PLANNERS]
        self._watches = StaleWatchCheck(store, kinds, self._pods, self._reconcilers.keys)

    @classmethod
    async def create(
        cls,
        client: PodClient,
        gateway: GatewayClient | None,
        lease_namespace: str | None,
        identity: str | None,
        *,
        rate_limit: int = RATE_LIMIT,
    ) -> Self:
        """Connect to the API server. Without ``gateway`` pods deliver to the rounds' own callback addresses.

        ``identity`` is the name in the Lease, if it is not to be one that no other process ever has.
        """
        api, namespace = await connect()
        unique = f"{socket.gethostname()}-{uuid4().hex[:8]}"
        lease = LeaderElection(api, lease_namespace or namespace, identity or unique, time.monotonic)
        return cls(ObjectStore(api), lease, client, gateway, rate_limit)

    async def close(self) -> None:
        """Close all connections; running rounds go on in their pods."""
        await self._poller.close()
        await self._client.close()
        if self._gateway is not None:
            await self._gateway.close()
        await self._store.close()

    def pod_changed(self, pod: PodView) -> None:
        """Remember a pod, and let its objects react at once."""
        if self._pods.put(pod):
            self._wake_work_on(pod)

    def pod_deleted(self, pod: PodView) -> None:
        """Forget a pod and let its objects react at once."""
        if self._pods.remove(pod):
            self._wake_work_on(pod)

    def work_changed(self, uid: str, generation: int) -> None:
        """Let the object's loop react to its changed spec at once. A changed status is its own work and no news."""
        reconciler = self._reconcilers.get(uid)
        if reconciler is not None and reconciler.generation != generation:
            reconciler.failures.spec_changed.set()
            reconciler.wake.set()

    def _wake_work_on(self, pod: PodView) -> None:
        for reconciler in self._reconcilers.values():
            if reconciler.concerns(pod):
                reconciler.wake.set()

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

    def health_findings(self) -> list[str]:
        """Return what only a new process can heal: changes that a watch missed.

        An object on which the operator fails is none: it would fail again, and all others with it. A loop that
        is blocked does not answer the probe.
        """
        return self._watches.missed

    def reconciler(self, kind: type[Planner[Any]], ref: ObjectRef, emit: Emit) -> Reconciler[Any]:
        """Return a reconciler for the object."""
        return Reconciler(
            kind,
            ref,
            sources=self._sources,
            client=self._client,
            poller=self._poller,
            pods=self._pods,
            metrics=self.metrics,
            emit=emit,
            others=self._others,
        )

    async def run(self, uid: str, reconciler: Reconciler[Any]) -> None:
        """Reconcile the object as long as it exists. A cancellation is safe at any moment."""
        self._reconcilers[uid] = reconciler
        failures = reconciler.failures
        reconciler.enter_queue()
        try:
            while True:
                try:
                    if not await self._reconcile(reconciler):
                        return
                    if reconciler.resting:
                        await failures.spec_changed.wait()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await reconciler.wake.wait()
                except Exception as error:
                    self._others.fail(uid)
                    await failures.failed(error, reconciler.generation or 0)
                    await failures.pause()
                reconciler.wake.clear()
                failures.spec_changed.clear()
        finally:
            self._others.forget(uid)
            await reconciler.close()
            self._reconcilers.pop(uid, None)

    async def _reconcile(self, reconciler: Reconciler[Any]) -> bool:
        """Take one step; trouble with the API server is logged and tried again at the next turn."""
        if not self.lease.held:
            return True  # the process is about to end: another may act by now
        try:
            async with asyncio.timeout(RECONCILE_SECONDS):
                goes_on = await reconciler.reconcile()
        except StaleObject as error:
            self.metrics.api_server_failed(error)
            reconciler.log.debug("the object changed while it was planned; planning again")
        except StoreUnavailable as error:
            self.metrics.api_server_failed(error)
            reconciler.log.warning("API server: %s; trying again", error)
        else:
            reconciler.failures.succeeded()
            return goes_on
        return True
