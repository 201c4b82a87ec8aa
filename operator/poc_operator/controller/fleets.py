# SPDX-License-Identifier: Apache-2.0
"""Keeps fleets: one loop for each, and one list of all their objects for all loops.

A fleet asks pods for self-checks alone, so it is no work: it has no finalizer, and its objects go with it by their
owner references. What others change in its objects is found by lists, some seconds later, and put back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import DownloadState
from poc_operator.apis.v1alpha1.meta import DOWNLOAD_LABEL, FLEET_LABEL, LabelSelector, fleet_selector
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.clients.errors import (
    ObjectInvalid,
    StaleObject,
    StoreError,
    StoreForbidden,
    UnreadableObject,
)
from poc_operator.clients.kube.events import EventPoster
from poc_operator.clients.kube.fleet_objects import FleetObjects
from poc_operator.clients.kube.objects import ObjectStore, parse_object
from poc_operator.clients.pods.client import ClientOf
from poc_operator.controller.failing_objects import FailureBackoff
from poc_operator.controller.fleet_health import FleetHealth
from poc_operator.controller.fleet_surroundings import (
    FleetChildren,
    FleetOptions,
    FleetSurroundings,
)
from poc_operator.controller.fleet_updates import Evictor, WorkOnFleets, labels_of
from poc_operator.controller.health import supervised
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache
from poc_operator.controller.self_checks import CHECKS, SelfChecks
from poc_operator.fleets.download import DownloadSeen
from poc_operator.fleets.healing import restarted
from poc_operator.fleets.history import Known
from poc_operator.fleets.merge import covers
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.fleets.resolve import Refusal
from poc_operator.fleets.strangers import foreign, is_stranger
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import WorkEvent

log = logging.getLogger(__name__)

#: Seconds between two turns of a fleet with nothing to do, and of one whose pods come or go.
REST_SECONDS = 15.0
BUSY_SECONDS = 3.0
#: Age in seconds at which the list of objects is read again, for the one and the other.
REST_AGE_SECONDS = 10.0
BUSY_AGE_SECONDS = 2.0
#: Seconds between two looks at the fleets that there are.
LIST_SECONDS = 60.0
#: Seconds for which news are gathered before a turn, and after which a turn is given up.
GATHER_SECONDS = 0.2
TURN_SECONDS = 120.0

Body = Mapping[str, Any]


@dataclass
class _Loop:
    """One fleet: the newest that is known of it, and what its turns remember."""

    ref: ObjectRef
    body: Body
    failures: FailureBackoff
    evictor: Evictor
    log: ObjectLogger
    wake: asyncio.Event
    checks: SelfChecks
    gone: bool = False
    #: The fleet that the body is, once somebody has asked for it.
    parsed: PoCFleet | None = None
    #: Objects that do not look as wanted after they were applied, with their versions then.
    settled: dict[Key, str] = field(default_factory=dict)
    refused: Refusal | None = None
    #: Why an object that nothing asks for any more could not be deleted.
    left: Refusal | None = None
    #: Whether an update is under way that no watch tells of.
    moves: bool = False
    #: The last good revision of a fleet whose update has failed, and its template.
    good: tuple[str, Mapping[str, Any]] | None = None
    #: What the fleet was last known to serve.
    known: Known | None = None


class Fleets:
    """All fleets of the process. ``clock`` returns seconds of any monotonic clock."""

    def __init__(
        self,
        store: ObjectStore,
        objects: FleetObjects,
        *,
        options: FleetOptions,
        pods: PodCache,
        metrics: Metrics,
        may_act: Callable[[], bool],
        clients: ClientOf,
        judged: Callable[[PodView], None],
        gone: Callable[[PodView], None],
        events: EventPoster | None = None,
        health: FleetHealth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clients`` is for self-checks, and asks pods whether they compute before they are evicted.

        ``judged`` is told of each pod of which a check has found something else, and ``gone`` of each that the watch
        still has and that does not exist any more. Without ``health`` nobody looks whether pods get on.
        """
        self._store = store
        self._health = health
        self._objects = objects
        self._clients = clients
        self._judged = judged
        self._gone = gone
        self._checks = asyncio.Semaphore(CHECKS)
        self._pods = pods
        self._metrics = metrics
        self._may_act = may_act
        self._events = events
        self._options = options
        self._work = WorkOnFleets()
        self._clock = clock
        self._children = FleetChildren(objects, options.namespaces, clock)
        self._around = FleetSurroundings(objects, options, clock)
        self._loops: dict[str, _Loop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def selectors(self) -> Iterable[tuple[str, LabelSelector]]:
        """Namespace and selector of the pods of each fleet."""
        return [(loop.ref.namespace, fleet_selector(loop.ref.name)) for loop in self._loops.values()]

    def changed(self, body: Body) -> None:
        """Begin to keep a fleet, or let its loop see what changed."""
        metadata = body["metadata"]
        uid = str(metadata["uid"])
        known = self._loops.get(uid)
        if known is None:
            if "deletionTimestamp" not in metadata:
                self._begin(uid, body)
            return
        if int(metadata["resourceVersion"]) < int(known.body["metadata"]["resourceVersion"]):
            return
        before, known.body, known.parsed = known.body, body, None
        known.gone = "deletionTimestamp" in metadata
        if known.gone or before["metadata"]["generation"] != metadata["generation"]:
            known.refused = known.left = None
            known.failures.spec_changed.set()
            known.wake.set()

    def deleted(self, uid: str) -> None:
        """End the loop of a fleet that is gone; its objects go with it, or stay if they were orphaned."""
        known = self._loops.get(uid)
        if known is not None:
            known.gone = True
            known.failures.spec_changed.set()
            known.wake.set()

    def pod_changed(self, pod: PodView) -> None:
        """Let the fleet of a pod see that it changed."""
        name = pod.labels.get(FLEET_LABEL)
        if name is None:
            return
        for known in self._loops.values():
            if (known.ref.namespace, known.ref.name) == (pod.namespace, name):
                known.wake.set()

    def work_changed(self, kind: str, body: Body) -> None:
        """Remember work, and let the fleets of its namespace see that it began or ended."""
        if self._work.put(kind, body):
            self._wake_all(str(body["metadata"].get("namespace", "")))

    def work_deleted(self, uid: str) -> None:
        """Forget work that is gone, and let the fleets of its namespace see it."""
        namespace = self._work.forget(uid)
        if namespace is not None:
            self._wake_all(namespace)

    def _wake_all(self, namespace: str) -> None:
        for known in self._loops.values():
            if known.ref.namespace == namespace:
                known.wake.set()

    def find(self, namespace: str, name: str) -> PoCFleet | None:
        """Return a fleet by its name, as the watch has told of it; None if there is none, or it makes no sense."""
        for known in self._loops.values():
            if (known.ref.namespace, known.ref.name) == (namespace, name) and not known.gone:
                with contextlib.suppress(UnreadableObject):
                    return self._parsed(known)
        return None

    @staticmethod
    def _parsed(known: _Loop) -> PoCFleet:
        if known.parsed is None:
            known.parsed = parse_object(PoCFleet, known.body)
        return known.parsed

    async def run(self) -> None:
        """Look now and then whether the watch has told of all fleets, for ever."""
        while True:
            await asyncio.sleep(LIST_SECONDS)
            try:
                bodies = await self._store.list_bodies(PoCFleet, self._options.namespaces)
            except StoreError as error:
                self._metrics.api_server_failed(error)
                log.warning("API server: %s; the fleets are listed later", error)
                continue
            for body in bodies:
                self.changed(body)
            for uid in self._loops.keys() - {str(body["metadata"]["uid"]) for body in bodies}:
                self.deleted(uid)

    async def stop(self) -> None:
        """End all loops; the pods go on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._health is not None:
            await self._health.stop()

    def _begin(self, uid: str, body: Body) -> None:
        ref = ObjectRef(str(body["metadata"]["namespace"]), str(body["metadata"]["name"]), uid)
        logger = ObjectLogger(log, PoCFleet.KIND, ref)
        failures = FailureBackoff(
            PoCFleet, ref, store=self._store, metrics=self._metrics, emit=self._emitter(ref), log=logger
        )
        wake = asyncio.Event()
        checks = SelfChecks(self._clients, wake=wake, shared=self._checks, may_act=self._may_act, log=logger)
        evictor = Evictor(self._store, self._clients, logger, self._gone, self._clock)
        self._loops[uid] = loop = _Loop(
            ref=ref, body=body, failures=failures, evictor=evictor, log=logger, wake=wake, checks=checks
        )
        self._tasks[uid] = task = supervised(f"the loop of fleet {uid}", self._drive(loop), forever=False)
        task.add_done_callback(lambda _: self._ended(uid))

    def _ended(self, uid: str) -> None:
        self._loops.pop(uid, None)
        self._tasks.pop(uid, None)
        self._metrics.forget(uid)
        if self._health is not None:
            self._health.forget(uid)

    def _emitter(self, ref: ObjectRef) -> Callable[[WorkEvent], None]:
        def emit(event: WorkEvent) -> None:
            if self._events is not None:
                told = self._events.post_on_object(
                    PoCFleet.KIND, ref.namespace, ref.name, ref.uid, event.reason, event.message, warning=event.warning
                )
                supervised(f"an Event of fleet {ref.uid}", told, forever=False)

        return emit

    async def _drive(self, loop: _Loop) -> None:
        """Keep one fleet until it is gone. A cancellation is safe at any moment."""
        try:
            await self._keep(loop)
        finally:
            await loop.checks.cancel()

    async def _keep(self, loop: _Loop) -> None:
        while not loop.gone:
            loop.wake.clear()
            loop.failures.spec_changed.clear()
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    pause = await self._turn(loop) if self._may_act() else BUSY_SECONDS
                loop.failures.succeeded()
            except StoreError as error:
                pause = BUSY_SECONDS
                self._metrics.api_server_failed(error)
                loop.log.log(
                    logging.DEBUG if isinstance(error, StaleObject) else logging.WARNING,
                    "API server: %s; trying again",
                    error,
                )
                if isinstance(error, StaleObject):
                    await self._read_anew(loop)
            except Exception as error:
                await loop.failures.failed(error, int(loop.body["metadata"]["generation"]))
                await loop.failures.pause()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await loop.wake.wait()
            await asyncio.sleep(GATHER_SECONDS)

    async def _read_anew(self, loop: _Loop) -> None:
        """Let a loop see its fleet as the API server has it: a watch may be late, or have missed a change."""
        with contextlib.suppress(StoreError):
            for body in await self._store.list_bodies(PoCFleet, [loop.ref.namespace]):
                if body["metadata"]["uid"] == loop.ref.uid:
                    self.changed(body)

    async def _turn(self, loop: _Loop) -> float:
        """Bring the fleet's objects to what they should be, as far as they differ. Return the seconds to rest."""
        fleet = self._parsed(loop)
        ready = fleet.status.own_conditions.get(ConditionType.READY)
        settled = (
            ready is not None
            and (ready.status == "True" or ready.reason in _WAKING)
            and ready.observed_generation == fleet.metadata.generation
        )
        age = REST_AGE_SECONDS if settled and not loop.moves else BUSY_AGE_SECONDS
        seen = await self._observe(loop, fleet, age)
        step = plan(seen)
        applied = bool(step.apply or step.delete)
        if applied and not await self._exists(fleet):
            loop.gone = True
            return BUSY_SECONDS
        before, loop.refused, loop.left = (loop.refused, loop.left), None, None
        if step.needs_token:
            await self._ensure_token(loop, fleet)
        for body in step.delete:
            await self._delete(loop, body)
        for body in step.apply:
            await self._apply(loop, fleet, body, seen)
        if applied or (loop.refused, loop.left) != before:
            step = plan(await self._observe(loop, fleet, float("inf")))
        await self._record(loop, fleet, step)
        loop.checks.keep(step.checks, {pod.uid for pod in step.status.pods})
        loop.moves, loop.known = step.moves, step.known
        if step.evict:
            await loop.evictor.evict(fleet, step.evict, labels_of(fleet, seen.stateful_set, seen.own))
            if fleet.spec.kubernetes_nodes > 1:
                return 0.0  # before the pod is made anew, its LeaderWorkerSet must know by which template
        return REST_SECONDS if _rests(step.status) and not applied and not step.moves else BUSY_SECONDS

    async def _good_template(self, loop: _Loop, fleet: PoCFleet) -> Mapping[str, Any] | None:
        """Return the template of the last good revision, if an update has failed. A revision never changes."""
        update = fleet.status.update
        if not update.failed or not update.good_revision:
            return None
        if loop.good is None or loop.good[0] != update.good_revision:
            found = await self._objects.template(fleet.metadata.namespace, update.good_revision)
            loop.good = (update.good_revision, found) if found is not None else None
        return loop.good[1] if loop.good is not None else None

    async def _exists(self, fleet: PoCFleet) -> bool:
        """Whether the fleet is there to stay: what names an owner that is gone is deleted, and its pods with it.

        The watch may tell late, and a fleet that was deleted with ``--cascade=orphan`` leaves objects without owner.
        """
        metadata = fleet.metadata
        found = await self._store.get(PoCFleet, metadata.namespace, metadata.name)
        return found is not None and found.id == fleet.id and found.metadata.deletion_timestamp is None

    async def _observe(self, loop: _Loop, fleet: PoCFleet, age: float) -> FleetSnapshot:
        namespace, name, uid = fleet.metadata.namespace, fleet.metadata.name, fleet.metadata.uid
        pods = self._pods.selected(namespace, fleet_selector(name))
        own = [pod for pod in pods if not is_stranger(name, pod)]
        if self._health is not None:
            self._health.see(uid, own, fleet.spec.port)
        objects: Mapping[Key, Body] = {}
        around = await self._around.of(fleet)  # first: the kinds that it finds are listed
        with contextlib.suppress(StoreForbidden):  # what is applied is refused too, and that is told
            objects = await self._children.of(namespace, name, age)
        return FleetSnapshot(
            fleet=fleet,
            around=around,
            now=datetime.now(UTC).replace(microsecond=0),
            objects=objects,
            pods=pods,
            settled=loop.settled,
            refused=loop.refused,
            left=loop.left,
            answers=loop.checks.answers,
            health=self._health.found(uid) if self._health is not None else {},
            gpu_errors=self._health.gpu_errors(uid) if self._health is not None else {},
            download=await self._download(fleet, objects),
            work=self._work.on(fleet, labels_of(fleet, objects.get(("StatefulSet", name)), own)),
            busy=loop.evictor.busy,
            unevicted=loop.evictor.refused,
            evicted=loop.evictor.evicted,
            evicted_names=loop.evictor.evicted_names,
            good_template=await self._good_template(loop, fleet),
            nodes=await self._around.nodes(fleet, own),
            known=loop.known,
        )

    async def _download(self, fleet: PoCFleet, objects: Mapping[Key, Body]) -> DownloadSeen:
        under_way = fleet.status.download
        if not fleet.spec.cache.download:
            return DownloadSeen()
        claim = await self._around.claim(fleet, objects)
        if under_way is None or self._health is None or under_way.state is DownloadState.DOWNLOADED:
            return DownloadSeen(claim=claim)
        selector = LabelSelector(match_labels={DOWNLOAD_LABEL: under_way.job})
        seen = await self._health.download_seen(self._pods.selected(fleet.metadata.namespace, selector))
        return replace(seen, claim=claim)

    async def _ensure_token(self, loop: _Loop, fleet: PoCFleet) -> None:
        try:
            await self._around.ensure_token(fleet)
        except (StoreForbidden, ObjectInvalid) as error:
            loop.refused = _refusal(f'Secret "{self._options.token_secret}"', error)

    async def _apply(self, loop: _Loop, fleet: PoCFleet, body: Body, seen: FleetSnapshot) -> None:
        """Apply one object, unless another that is not the fleet's has its name."""
        key = key_of(body)
        try:
            if key not in seen.objects:
                found = await self._objects.get(key[0], fleet.metadata.namespace, key[1])
                stranger = foreign(fleet, found) if found is not None else None
                if stranger is not None:
                    loop.refused = loop.refused or stranger
                    return
            applied = await self._objects.apply(body)
        except (StoreForbidden, ObjectInvalid) as error:
            loop.refused = loop.refused or _refusal(f'{key[0]} "{key[1]}"', error)
            return
        loop.log.info("%s %s is applied", *key)
        self._children.put(applied)
        if covers(applied, body):
            loop.settled.pop(key, None)
        else:
            loop.settled[key] = str(applied["metadata"]["resourceVersion"])

    async def _delete(self, loop: _Loop, body: Body) -> None:
        """Delete one object. It counts as on its way out until a list tells that it is gone."""
        key = key_of(body)
        try:
            await self._objects.delete(body)
        except (StoreForbidden, ObjectInvalid) as error:
            loop.left = loop.left or _refusal(f'the deletion of {key[0]} "{key[1]}"', error)
            return
        loop.log.info("%s %s is deleted", *key)
        self._children.put({**body, "metadata": {**body["metadata"], "deletionTimestamp": "now"}})

    async def _record(self, loop: _Loop, fleet: PoCFleet, step: FleetStep) -> None:
        """Write the status if it differs, and post an Event if something is wrong that was not."""
        self._metrics.fleet_planned(loop.ref.uid, step.status)
        if step.status.stored() == fleet.status.stored():
            return
        version = await self._store.write_status(fleet, step.status)
        if version is not None and loop.body["metadata"]["resourceVersion"] == fleet.metadata.resource_version:
            metadata = {**loop.body["metadata"], "resourceVersion": version}
            loop.body = {**loop.body, "metadata": metadata, "status": step.status.stored()}
            loop.parsed = None
        self._tell_judged(loop.ref, fleet.status, step.status)
        for event in [*step.events, *_news(fleet.status, step.status)]:
            self._emitter(loop.ref)(event)

    def _tell_judged(self, ref: ObjectRef, old: FleetStatus, new: FleetStatus) -> None:
        before = {pod.uid: (pod.server, pod.result) for pod in old.pods}
        changed = {pod.uid for pod in new.pods if before.get(pod.uid) != (pod.server, pod.result)}
        for pod in self._pods.selected(ref.namespace, fleet_selector(ref.name)) if changed else ():
            if pod.uid in changed:
                self._judged(pod)


#: What the fleet waits for wakes its loop.
_WAKING = (Reason.SELF_CHECKS_PENDING, Reason.SELF_CHECK_FAILED)


def _rests(status: FleetStatus) -> bool:
    """Whether nothing comes or goes: all replicas are ready, at least for chat, or the fleet is stalled."""
    found = status.own_conditions
    if ConditionType.READY in found and found[ConditionType.READY].reason in _WAKING:
        return True
    if status.download is not None and status.download.state is DownloadState.DOWNLOADING:
        return False
    return any(kind in found and found[kind].status == "True" for kind in (ConditionType.READY, ConditionType.STALLED))


def _refusal(what: str, error: StoreError) -> Refusal:
    remedy = "; install the chart with fleets.enabled=true" if isinstance(error, StoreForbidden) else ""
    return Refusal(Reason.OBJECT_REFUSED, f"{what} is refused: {error}{remedy}")


def _news(old: FleetStatus, new: FleetStatus) -> list[WorkEvent]:
    """Return the Events for pods that are to be replaced, and for a fleet degraded for another reason than before."""
    known = {restart.uid for restart in old.restarts}
    found = [restarted(one) for one in new.restarts if one.uid not in known]
    now, before = (status.own_conditions.get(ConditionType.DEGRADED) for status in (new, old))
    if now is None or now.status != "True" or any(event.reason == now.reason for event in found):
        return found
    if now.reason == Reason.UPDATE_FAILED:
        return found  # the update's own Event says it
    if before is not None and (before.status, before.reason) == (now.status, now.reason):
        return found
    return [*found, WorkEvent(reason=now.reason, message=now.message, warning=True)]
