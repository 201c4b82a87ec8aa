# SPDX-License-Identifier: Apache-2.0
"""What the process has once: connections, the pod cache, the metrics, and a loop for each object."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, Self
from uuid import uuid4

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.status import is_finished
from poc_operator.clients.errors import StaleObject, StoreError, StoreForbidden, StoreUnavailable
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.kube.connection import connect
from poc_operator.clients.kube.events import EventPoster
from poc_operator.clients.kube.fleet_objects import FleetObjects
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import ClientOf
from poc_operator.clients.pods.tokens import PodClients, Tokens
from poc_operator.controller.actions import Emit
from poc_operator.controller.event_loop import MOST_ORDERS, Computing, FewRequests
from poc_operator.controller.fleet_health import FleetHealth
from poc_operator.controller.fleet_refs import FleetRefs
from poc_operator.controller.fleet_surroundings import FleetOptions
from poc_operator.controller.fleets import Fleets
from poc_operator.controller.health import CHECK_SECONDS, StaleWatchCheck, supervised
from poc_operator.controller.kinds import PLANNERS, Planner, Sources
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache, PodPoller
from poc_operator.controller.other_rounds import OtherRounds
from poc_operator.controller.reaper import CONNECTIONS as REAPER_CONNECTIONS
from poc_operator.controller.reaper import Reaper
from poc_operator.controller.reconciler import POLL_SECONDS, Reconciler
from poc_operator.controller.untold_pods import UntoldPods
from poc_operator.credentials import RATE_LIMIT
from poc_operator.leases import LEASE_SECONDS
from poc_operator.observed import PodView
from vllm_poc.logs import bound

log = logging.getLogger(__name__)

#: Seconds after which one reconciliation is given up. All that it waits for has shorter limits of its own.
RECONCILE_SECONDS = 180.0
#: Longest pause of an object between two turns although there is news.
MOST_PAUSE_SECONDS = 1.0

#: Seconds between two looks how late the event loop is, and the lateness with which the process is of no use.
LAG_SECONDS = 0.5
#: Polls of pods that the process makes a second, if there are so many pods: they take about half a core.
POLLS_PER_SECOND = 1_250
#: However many there are: allowances, leases and the queue's memory of other rounds rely on turns. An allowance is
#: extended when half of it, 10 s, is left.
MOST_TURN_SECONDS = 8.0
MOST_LAG_SECONDS = 10.0


def needs_reconciling(body: Mapping[str, Any]) -> bool:
    """Whether the object, as the API server has it, needs a loop."""
    metadata, status = body["metadata"], body.get("status") or {}
    if not is_finished(status):
        return True
    if "deletionTimestamp" in metadata:
        return False
    unseen = status.get("observedGeneration") != metadata["generation"]
    return unseen or (body.get("spec") or {}).get("ttlSecondsAfterFinished") is not None


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for so long at most, which may be over; always True."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    return True


class Manager:
    """One per process."""

    def __init__(
        self,
        store: ObjectStore,
        lease: LeaderElection,
        clients: ClientOf,
        gateway: GatewayClient | None = None,
        rate_limit: int = RATE_LIMIT,
        *,
        poll_clients: ClientOf | None = None,
        ask_clients: ClientOf | None = None,
        reaper_clients: ClientOf | None = None,
        strangers: ClientOf | None = None,
        events: EventPoster | None = None,
        holds_deleted: bool = True,
        lease_seconds: int = LEASE_SECONDS,
        fleet_objects: FleetObjects | None = None,
        fleet_options: FleetOptions | None = None,
    ) -> None:
        """``clients`` is for orders. Polls, asks and the reaper have connections of their own: an ask or a stop may
        hold one for minutes, and a poll must not wait for it.

        ``strangers`` has no token: it is for pods that no object selects. Without ``fleet_objects`` no fleet is kept.
        """
        #: Whether deleted objects are held, by the finalizer, until their pods have stopped.
        self.holds_deleted = holds_deleted
        self._store = store
        self.lease = lease
        self._clients = clients
        self._poll_clients = poll_clients or clients
        self._ask_clients = ask_clients or clients
        self._poller = PodPoller(self._poll_clients, time.monotonic)
        self._gateway = gateway
        self._sources = Sources(
            store=store,
            gateway=gateway,
            rate_limit=rate_limit,
            lease_seconds=lease_seconds,
            may_act=lambda: self.lease.held,
        )
        self._pods = PodCache(time.monotonic)
        self.metrics = Metrics(leads=lambda: self.lease.held)
        #: The fleets; None if none is kept.
        self.fleets: Fleets | None = None
        if fleet_objects is not None:
            self.fleets = Fleets(
                store,
                fleet_objects,
                options=fleet_options or FleetOptions(),
                pods=self._pods,
                metrics=self.metrics,
                may_act=lambda: self.lease.held,
                clients=self._ask_clients,
                judged=self._wake_work_on,
                gone=self.pod_deleted,
                events=events,
                health=FleetHealth(self._poll_clients, strangers=strangers),
            )
            refs = FleetRefs(store, self.fleets.find)
            self._sources = dataclasses.replace(self._sources, fleets=refs)
        self._lag = 0.0  # of the event loop, in seconds
        self._load = 0  # of one turn of each object, in polls
        self._others = OtherRounds(time.monotonic)
        self._untold = UntoldPods(store, self._pods)
        self._computing = Computing()
        self._orders = FewRequests(MOST_ORDERS)
        # By the objects' uid. What needs to be done lives in the loop alone: deletion too.
        self._reconcilers: dict[str, Reconciler[Any]] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._released = set[str]()  # deleted objects whose loop has ended, until they are gone
        self._reaper_clients = reaper_clients or clients
        self._strangers = strangers or self._reaper_clients
        self.reaper = Reaper(
            store=store,
            clients=self._reaper_clients,
            strangers=self._strangers,
            events=events,
            pods=self._pods,
            metrics=self.metrics,
            driven=self._reconcilers.keys,
            may_act=lambda: self.lease.held,
            clock=time.monotonic,
        )
        kinds = [kind.resource for kind in PLANNERS]
        self._watches = StaleWatchCheck(
            store, kinds, self._pods, self._reconcilers.keys, self.pod_deleted, self._fleets_selectors
        )

    @classmethod
    async def create(
        cls,
        gateway: GatewayClient | None,
        lease_namespace: str | None,
        identity: str | None,
        *,
        token_secret: str | None = None,
        rate_limit: int = RATE_LIMIT,
        holds_deleted: bool = True,
        lease_seconds: int = LEASE_SECONDS,
        fleet_options: FleetOptions | None = None,
    ) -> Self:
        """Connect to the API server. Without ``gateway`` pods deliver to the rounds' own callback addresses.

        ``identity`` is the name in the Lease, if it is not to be one that no other process ever has. ``token_secret``
        names the Secret, in the namespace of the pods, whose token they get.
        """
        api, namespace = await connect()
        store = ObjectStore(api)
        tokens = Tokens(partial(store.pod_token, token_secret)) if token_secret is not None else None
        unique = f"{socket.gethostname()}-{uuid4().hex[:8]}"
        # Its own connections: a thousand rounds that start together wait for each other's.
        lease_api, _ = await connect()
        lease = LeaderElection(lease_api, lease_namespace or namespace, identity or unique, time.monotonic)
        return cls(
            store,
            lease,
            PodClients(tokens),
            gateway,
            rate_limit,
            poll_clients=PodClients(tokens),
            ask_clients=PodClients(tokens),
            reaper_clients=PodClients(tokens, connections=REAPER_CONNECTIONS),
            strangers=PodClients(connections=REAPER_CONNECTIONS),
            events=EventPoster(api),
            holds_deleted=holds_deleted,
            lease_seconds=lease_seconds,
            fleet_objects=FleetObjects(api, namespace),
            fleet_options=fleet_options,
        )

    async def stop(self) -> None:
        """End all loops, so that another process may act; running rounds go on in their pods."""
        loops = list(self._loops.values())
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        if self.fleets is not None:
            await self.fleets.stop()
        await self.reaper.close()

    async def close(self) -> None:
        """End all loops and close all connections."""
        await self.stop()
        await self._poller.close()
        await self._clients.close()
        await self._poll_clients.close()
        await self._ask_clients.close()
        await self._reaper_clients.close()
        await self._strangers.close()
        if self._gateway is not None:
            await self._gateway.close()
        await self._store.close()
        await self.lease.close()

    async def identify(self) -> None:
        """Find out under which name to give orders, and which names count as ours. The Lease must be ours by now.

        The cluster's own name, the UID of kube-system, lasts longest. Who may not read it takes that of the Lease; work
        that was ordered under either is ours.
        """
        names = [name for name in (await self._cluster_uid(), self.lease.uid) if name is not None]
        self._sources = dataclasses.replace(self._sources, owner=names[0] if names else None)
        self.reaper.owners = names

    async def wait_for_kinds(self) -> None:
        """Wait until the API server serves the kinds of work and fleets.

        kopf asks once which kinds there are, and never watches those that come later. An API server that has just
        started serves them some seconds late.
        """
        while True:
            try:
                missing = await self._store.unserved([*(kind.resource for kind in PLANNERS), PoCFleet])
            except StoreError as error:
                missing = [str(error)]
            if not missing:
                return
            log.warning("the API server does not serve %s yet; are the CRDs installed?", ", ".join(missing))
            await asyncio.sleep(POLL_SECONDS)

    async def _cluster_uid(self) -> str | None:
        while True:
            try:
                return await self._store.namespace_uid("kube-system")
            except StoreForbidden:
                return None
            except StoreError as error:
                log.warning("API server: %s; trying again", error)
                await asyncio.sleep(POLL_SECONDS)

    def pod_changed(self, pod: PodView) -> None:
        """Remember a pod, and let its objects react at once."""
        if self._pods.put(pod):
            self._wake_work_on(pod)
            self._wake_fleet_of(pod)

    def pod_deleted(self, pod: PodView) -> None:
        """Forget a pod and let its objects react at once."""
        if self._pods.remove(pod):
            self._wake_work_on(pod)
            self._wake_fleet_of(pod)

    def work_changed(self, kind: type[Planner[Any]], body: Mapping[str, Any], emit: Emit) -> None:
        """Begin to drive an object that needs it, or let its loop react to its changed spec or its deletion at once.

        A changed status is the loop's own work and no news.
        """
        metadata = body["metadata"]
        uid = str(metadata["uid"])
        self.reaper.object_changed(body)
        if self.fleets is not None:
            self.fleets.work_changed(kind.resource.KIND.kind, body)
        reconciler = self._reconcilers.get(uid)
        if reconciler is not None:
            reconciler.tell(dict(body))
            if reconciler.generation != metadata["generation"]:
                reconciler.failures.spec_changed.set()
                reconciler.wake.set()
        elif uid not in self._released and needs_reconciling(body):
            ref = ObjectRef(str(metadata.get("namespace", "")), str(metadata["name"]), uid)
            with bound(round=uid):
                reconciler = self.reconciler(kind, ref, emit)
                reconciler.tell(dict(body))
                self._begin(uid, reconciler)

    def work_deleted(self, uid: str) -> None:
        """Let the loop of an object that is gone see it at once, and the reaper look after its pods."""
        self.reaper.object_gone(uid)
        if self.fleets is not None:
            self.fleets.work_deleted(uid)
        self._released.discard(uid)
        reconciler = self._reconcilers.get(uid)
        if reconciler is not None:
            reconciler.read_anew()
            reconciler.failures.spec_changed.set()
            reconciler.wake.set()

    async def released(self, uid: str, seconds: float) -> bool:
        """Whether nothing holds a deleted object any more; waits for it for so many seconds at most."""
        loop = self._loops.get(uid)
        if loop is not None:
            await asyncio.wait({loop}, timeout=seconds)
        return loop is None or loop.done()

    def _begin(self, uid: str, reconciler: Reconciler[Any]) -> None:
        self._reconcilers[uid] = reconciler
        self._loops[uid] = loop = supervised(f"the loop of {uid}", self.run(uid, reconciler), forever=False)
        loop.add_done_callback(partial(self._ended, uid))

    def _ended(self, uid: str, loop: "asyncio.Task[None]") -> None:
        if self._loops.get(uid) is loop:  # another one may have begun meanwhile
            del self._loops[uid]

    def _wake_work_on(self, pod: PodView) -> None:
        for reconciler in self._reconcilers.values():
            if reconciler.concerns(pod):
                reconciler.wake.set()

    def _wake_fleet_of(self, pod: PodView) -> None:
        if self.fleets is not None:
            self.fleets.pod_changed(pod)

    def _fleets_selectors(self) -> Iterable[tuple[str, LabelSelector]]:
        return self.fleets.selectors if self.fleets is not None else ()

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
        """Return what only a new process can heal: missed changes of a watch, a Lease not renewed, a slow event loop.

        An object on which the operator fails is none: it would fail again, and all others with it. A loop that
        is blocked does not answer the probe.
        """
        lease = ["the Lease is not renewed"] if self.lease.overdue else []
        slow = [f"the event loop is {self._lag:.1f} s late"] if self._lag > MOST_LAG_SECONDS else []
        return [*lease, *slow, *self._watches.missed]

    async def measure_lag(self) -> None:
        """Measure how late the event loop comes to what is due, for ever."""
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._lag = max(0.0, time.monotonic() - due)
            self.metrics.loop_lag.observe(self._lag)

    def reconciler(self, kind: type[Planner[Any]], ref: ObjectRef, emit: Emit) -> Reconciler[Any]:
        """Return a reconciler for the object."""
        return Reconciler(
            kind,
            ref,
            sources=self._sources,
            clients=self._clients,
            ask_clients=self._ask_clients,
            poller=self._poller,
            pods=self._pods,
            metrics=self.metrics,
            emit=emit,
            others=self._others,
            untold=self._untold,
            computing=self._computing,
            orders=self._orders,
        )

    async def run(self, uid: str, reconciler: Reconciler[Any]) -> None:
        """Reconcile the object until it is gone, or finished for good. A cancellation is safe at any moment."""
        self._reconcilers[uid] = reconciler
        try:
            reconciler.enter_queue()
            while await self._turn(uid, reconciler):
                if reconciler.seconds_to_release() <= 0:
                    reconciler.tell_of_pods_left()
                    return
                reconciler.wake.clear()
                reconciler.failures.spec_changed.clear()
        finally:
            if reconciler.seconds_to_release() < math.inf:
                self._released.add(uid)
            del self._reconcilers[uid]
            self._load -= reconciler.load
            self._others.forget(uid)
            try:
                await reconciler.close()
            except Exception as error:  # no object ends the process
                self.metrics.work_failed(error)
                reconciler.log.exception("what was under way could not be given up")

    async def _turn(self, uid: str, reconciler: Reconciler[Any]) -> bool:
        """Take one step and wait until it is time for the next; False if there is none."""
        failures, begun, load = reconciler.failures, time.monotonic(), reconciler.load
        try:
            if not await self._reconcile(reconciler):
                return False
        except Exception as error:
            self._others.fail(uid)
            reconciler.read_anew()
            await failures.failed(error, reconciler.generation or 0)
            await failures.pause(reconciler.seconds_to_release())
            return True
        finally:
            self._load += reconciler.load - load
        if reconciler.rest_seconds > POLL_SECONDS:
            if reconciler.rest_seconds == math.inf and not failures.spec_changed.is_set():
                return False
            return await _set_within(failures.spec_changed, reconciler.rest_seconds)
        # News of many pods come one by one. Turns that take long leave half of the time to others.
        await asyncio.sleep(min(MOST_PAUSE_SECONDS, (time.monotonic() - begun) / 2))
        return await _set_within(reconciler.wake, begun + self._turn_seconds - time.monotonic())

    @property
    def _turn_seconds(self) -> float:
        """From one turn without news to the next: longer where turns of so many objects and pods would take a core."""
        return min(max(POLL_SECONDS, self._load / POLLS_PER_SECOND), MOST_TURN_SECONDS)

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
