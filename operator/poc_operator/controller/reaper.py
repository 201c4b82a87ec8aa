# SPDX-License-Identifier: Apache-2.0
"""The reaper asks every pod that may have worked for us, and stops what nobody needs any more.

A round's loop asks its pods as long as the round is under way. Whatever it cannot reach in that time is the reaper's:
pods that were silent when their round ended and come back, pods that lost their labels, rounds that went without
anybody who could wait. Which rounds there are, the API server says, and what a pod computes, the pod. So another
process goes on with what one has left. What is judged, and how, is in `poc_operator.planning.reaping`.

Pods of the reference implementation do not say for which round they compute. What a deleted round had ordered from them
only this process remembers, until they have stopped: a new process leaves them alone.

Nothing is stopped by what a watch has told: for each suspect the rounds are read anew, after the pod was asked. A slot
is recorded before its pod is told, so that a pod whose slot is not there has lost it.

::

    every 30 s, and for the pods of an object that has just gone at once:
    ask ──► known to be needed? ──no──► read the rounds ──► a cause to stop? ──yes──► stop, count, tell
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poc_operator.apis.v1alpha1.meta import WORKER_LABELS
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.work import DEFAULT_PORT
from poc_operator.clients.errors import PodBusy, PodError, StoreError
from poc_operator.clients.kube.events import EventPoster
from poc_operator.clients.kube.objects import ObjectStore, readable
from poc_operator.clients.pods.client import ClientOf, PodClient, base_url
from poc_operator.clients.pods.reference_pods import ReferenceStatus, as_ours
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache
from poc_operator.observed import PodView
from poc_operator.planning.reaping import EXPLAINED, Cause, WorkRecord, cause_to_stop, is_ours, proven_over
from vllm_poc.logs import bound
from vllm_poc.wire.answers import PowState, StatusResponse

log = logging.getLogger(__name__)

#: Seconds between two sweeps over all pods.
PERIOD_SECONDS = 30.0
#: Seconds after its start until the first sweep: the watches tell of everything first.
FIRST_SECONDS = 5.0
#: Pods that are asked at once; those that do not answer come last, so that they hold up no other.
ASKS = 32
#: Connections that this takes: for asks, and as many stops.
CONNECTIONS = 2 * ASKS
#: Seconds for which the pods of an object that is gone are remembered: a day. Pods that tell no round are remembered
#: until they have stopped.
MEMORY_SECONDS = 86_400.0
#: Seconds after which no order of a round that is gone is on its way any more.
LATE_SECONDS = 60.0


class WorkRecords:
    """The objects as the watches tell of them, and for a while those that are gone."""

    def __init__(self, clock: Callable[[], float], exists: Callable[[str], bool]) -> None:
        """``exists`` says whether there is a pod of this uid."""
        self._clock = clock
        self._exists = exists
        self._live: dict[str, WorkRecord] = {}
        self._gone: dict[str, tuple[WorkRecord, float]] = {}  # with the time at which they are forgotten

    def put(self, record: WorkRecord) -> None:
        """Remember an object as it is now."""
        known = self._live.get(record.uid)
        # A slot that was given to another pod leaves the first one's name nowhere else.
        if known is not None:
            record = replace(record, pods=record.pods | known.pods, nameless=record.nameless | known.nameless)
        self._live[record.uid] = record

    def retire(self, uid: str) -> WorkRecord | None:
        """Note that an object is gone; return what was known of it."""
        record = self._live.pop(uid, None)
        if record is not None:
            self._gone[uid] = (record, self._clock() + MEMORY_SECONDS)
        return record

    def live(self, uid: str | None) -> WorkRecord | None:
        """Return the object, unless it is gone or was never told of."""
        return self._live.get(uid or "")

    def all(self) -> Sequence[WorkRecord]:
        """Return all that are not forgotten."""
        for uid in [uid for uid, (record, moment) in self._gone.items() if self._is_past(record, moment)]:
            del self._gone[uid]
        return [*self._live.values(), *(record for record, _ in self._gone.values())]

    def _is_past(self, record: WorkRecord, moment: float) -> bool:
        return moment <= self._clock() and not any(self._exists(slot.pod) for slot in record.nameless)

    def gone_of(self, pod: PodView, session: str) -> Iterator[Mapping[str, Any]]:
        """Yield the rounds that are gone and that this pod may compute in this session, as if they were finished."""
        for record, _ in self._gone.values():
            over = record.as_over(pod.uid, session) if record.namespace == pod.namespace else None
            if over is not None:
                yield over

    def stopped(self, pod: PodView, *, late: float = 0.0) -> None:
        """Note that the pod computes nothing of what is gone, for so many seconds already. What comes is another's."""
        for uid, (record, moment) in self._gone.items():
            left = frozenset(slot for slot in record.nameless if slot.pod != pod.uid)
            if len(left) < len(record.nameless) and moment - MEMORY_SECONDS + late <= self._clock():
                self._gone[uid] = (replace(record, nameless=left), moment)


@dataclass(frozen=True)
class _Suspect:
    """A pod that computes what may not be needed, and the client that asked it."""

    pod: PodView
    port: int
    client: PodClient
    answer: StatusResponse | ReferenceStatus


_Targets = Mapping[tuple[str, int], PodView]  # by the pods' uid and port


class Reaper:
    """One per process. ``owners`` are the names under which our orders may have been given.

    ``strangers`` is the client for pods that no object selects and none names: it must not carry the pods' token.

    ``driven`` returns the uids of the objects that have a loop, ``may_act`` says whether this process may give orders.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        clients: ClientOf,
        strangers: ClientOf,
        events: EventPoster | None,
        pods: PodCache,
        metrics: Metrics,
        driven: Callable[[], Collection[str]],
        may_act: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._clients = clients
        self._strangers = strangers
        self._events = events
        self._pods = pods
        self._metrics = metrics
        self._driven = driven
        self._may_act = may_act
        self._clock = clock
        self._records = WorkRecords(clock, pods.knows)
        self._silent: dict[tuple[str, int], float] = {}  # when those that did not answer were asked last
        self._unknown = frozenset[tuple[str, int]]()  # the pods that no object selects or names, at the last sweep
        self._held = set[str]()  # uids of the pods that have a slot of a round under way, at the last sweep
        self._stopping = asyncio.Semaphore(ASKS)
        self._stops: dict[str, asyncio.Task[None]] = {}  # by the pods' uid
        self._just_gone: list[WorkRecord] = []
        self._news = asyncio.Event()
        self.owners: Collection[str] = ()

    def object_changed(self, body: Mapping[str, Any]) -> None:
        """Remember an object."""
        self._records.put(WorkRecord.parse(body))

    def object_gone(self, uid: str) -> None:
        """Ask the pods of an object that is gone at once."""
        record = self._records.retire(uid)
        if record is not None:
            self._just_gone.append(record)
            self._news.set()

    async def run(self) -> None:
        """Sweep for ever."""
        due = self._clock() + FIRST_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - self._clock())):
                    await self._news.wait()
            self._news.clear()
            gone, self._just_gone = self._just_gone, []
            everywhere = self._clock() >= due
            if everywhere:
                due = self._clock() + PERIOD_SECONDS
            if self._may_act():
                await self._try(None if everywhere else gone)

    async def close(self) -> None:
        """Give up what is under way; the next process finds out what became of it."""
        stops = list(self._stops.values())
        for stop in stops:
            stop.cancel()
        await asyncio.gather(*stops, return_exceptions=True)

    async def sweep(self, gone: Iterable[WorkRecord] | None = None) -> None:
        """Ask all pods that may have worked for us, or those of these objects, and stop what is not needed.

        StoreError if the rounds cannot be read.
        """
        targets = await self._targets(self._records.all() if gone is None else gone, everywhere=gone is None)
        if gone is None:
            self._silent = {key: asked for key, asked in self._silent.items() if key in targets}
        answering = [key for key in targets if key not in self._silent]
        silent = sorted(targets.keys() & self._silent.keys(), key=self._silent.__getitem__)
        await self._judge(await self._ask(targets, answering))
        await self._judge(await self._ask(targets, silent))

    async def _try(self, gone: Iterable[WorkRecord] | None) -> None:
        try:
            await self.sweep(gone)
        except StoreError as error:
            self._metrics.api_server_failed(error)
            log.warning("API server: %s; work that nobody needs is looked for later", error)
        except Exception:
            log.exception("work that nobody needs could not be looked for; it is later")

    async def _targets(self, records: Iterable[WorkRecord], *, everywhere: bool) -> _Targets:
        """Return the pods to ask. Those that compute a round under way are asked by its loop."""
        pods = [pod for pod in self._pods.everywhere() if pod.ip and not pod.gone]
        workers = {(pod.uid, port): pod for pod in pods if everywhere for port in _worker_ports(pod)}
        found = dict[tuple[str, int], PodView]()
        by_uid = {pod.uid: pod for pod in pods}
        selections = set[tuple[str, str, int | None]]()
        busy = set[str]()
        self._held = set[str]()
        for record in records:
            if self._is_driven(record):
                busy |= record.running
                self._held |= record.holders
            found |= {(uid, record.port_of(by_uid[uid])): by_uid[uid] for uid in record.pods & by_uid.keys()}
            key = (record.namespace, str(record.selector), record.port)
            if key not in selections:
                selections.add(key)
                selected = self._pods.selected(record.namespace, record.selector)
                found |= {(pod.uid, record.port_of(pod)): pod for pod in selected if pod.uid in by_uid}
                await asyncio.sleep(0)  # many pods for many selectors take a while
        self._unknown = frozenset(workers.keys() - found.keys())
        return {key: pod for key, pod in (workers | found).items() if pod.uid not in busy}

    def _is_driven(self, record: WorkRecord | None) -> bool:
        """Whether an object is under way, and has a loop: it reads the object again and again, and ends with it.

        One that is gone is not, although its loop may have yet to see it.
        """
        live = record is not None and self._records.live(record.uid) is not None
        return live and record is not None and not record.finished and record.uid in self._driven()

    async def _ask(self, targets: _Targets, keys: Iterable[tuple[str, int]]) -> list[_Suspect]:
        limit = asyncio.Semaphore(ASKS)
        suspects: list[_Suspect] = []

        async def ask(key: tuple[str, int]) -> None:
            pod, port = targets[key], key[1]
            clients: ClientOf = self._strangers if key in self._unknown else self._clients
            async with limit:
                self._silent[key] = self._clock()
                try:
                    client = await clients.of(pod.namespace)
                    answer = await client.status(base_url(pod.ip or "", port))
                except PodError:
                    return
                self._silent.pop(key, None)
            if isinstance(answer, ReferenceStatus) and answer.status is not PowState.GENERATING:
                self._records.stopped(pod, late=LATE_SECONDS)
            if self._is_suspect(pod, answer):
                suspects.append(_Suspect(pod, port, client, answer))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_SECONDS):
                await asyncio.gather(*(ask(key) for key in keys))
        return suspects

    def _is_suspect(self, pod: PodView, answer: StatusResponse | ReferenceStatus) -> bool:
        if isinstance(answer, ReferenceStatus):
            return answer.status is PowState.GENERATING and pod.uid not in self._held
        return is_ours(answer, self.owners) and not self._is_needed(pod, answer.round_id)

    def _is_needed(self, pod: PodView, round_id: str | None) -> bool:
        record = self._records.live(round_id)
        return record is not None and self._is_driven(record) and cause_to_stop(record, pod) is None

    async def _judge(self, suspects: Iterable[_Suspect]) -> None:
        by_namespace = defaultdict[str, list[_Suspect]](list)
        for suspect in suspects:
            if suspect.pod.uid not in self._stops:
                by_namespace[suspect.pod.namespace].append(suspect)
        for namespace, found in by_namespace.items():
            bodies = await self._store.list_bodies(PoCRound, [namespace])
            records = {record.uid: record for record in map(WorkRecord.parse, bodies)}
            for suspect in found:
                if isinstance(suspect.answer, StatusResponse):
                    self._judge_ours(suspect, suspect.answer, records)
                else:
                    self._judge_reference(suspect, suspect.answer, bodies, records)

    def _judge_ours(self, suspect: _Suspect, answer: StatusResponse, records: Mapping[str, WorkRecord]) -> None:
        round_id = answer.round_id or ""
        record = records.get(round_id)
        cause = cause_to_stop(record, suspect.pod)
        if cause is not None:
            self._begin_stop(suspect, round_id, cause, record)

    def _judge_reference(
        self,
        suspect: _Suspect,
        answer: ReferenceStatus,
        bodies: Iterable[Mapping[str, Any]],
        records: Mapping[str, WorkRecord],
    ) -> None:
        rounds = list(readable(PoCRound, bodies))
        if len(rounds) < len(records):
            return  # it may be of one that cannot be read
        gone = readable(PoCRound, self._records.gone_of(suspect.pod, suspect.pod.server(suspect.port)))
        rounds += [round_ for round_ in gone if round_.id not in records]
        told = ((round_, as_ours(answer, suspect.pod, suspect.port, round_)) for round_ in rounds)
        over = proven_over(suspect.pod, told)
        if over is not None:
            cause = Cause.FINISHED if over.id in records else Cause.DELETED
            self._begin_stop(suspect, over.id, cause, records.get(over.id))

    def _begin_stop(self, suspect: _Suspect, round_id: str, cause: Cause, record: WorkRecord | None) -> None:
        uid = suspect.pod.uid
        with bound(pod=suspect.pod.name, round=round_id):
            self._stops[uid] = stop = asyncio.create_task(self._stop(suspect, round_id, cause, record))
        stop.add_done_callback(lambda _: self._stops.pop(uid, None))

    async def _stop(self, suspect: _Suspect, round_id: str, cause: Cause, record: WorkRecord | None) -> None:
        pod = suspect.pod
        try:
            async with self._stopping:
                if not self._may_act():
                    return  # the process stood still meanwhile: another may act by now
                if self._is_needed(pod, round_id):
                    return  # it waited for other stops, and the round has given the pod a slot since
                await suspect.client.stop(base_url(pod.ip or "", suspect.port), round_id)
        except PodBusy:
            return  # it computes another round by now
        except PodError as error:
            log.warning("pod %s computes for a round %s, and cannot be stopped: %s", pod.name, EXPLAINED[cause], error)
            return
        self._records.stopped(pod)
        message = f"pod {pod.name} computed for round {round_id}, {EXPLAINED[cause]}: it is stopped"
        log.warning("%s", message)
        self._metrics.orphan_stopped(cause)
        if self._events is None:
            return
        await self._events.post_on_pod(pod, Reason.ORPHAN_STOPPED, message)
        if record is not None:
            about = (PoCRound.KIND, record.namespace, record.name, record.uid)
            await self._events.post_on_object(*about, Reason.ORPHAN_STOPPED, message)


def _worker_ports(pod: PodView) -> Collection[int]:
    """Return the ports at which a pod with the workers' label may serve, whether any object selects it or not."""
    if not WORKER_LABELS.items() <= pod.labels.items():
        return ()
    declared = {port for container in pod.containers for port in container.ports}
    return declared if declared and DEFAULT_PORT not in declared else {DEFAULT_PORT}
