# SPDX-License-Identifier: Apache-2.0
"""The loop of one object, whatever its kind: read, observe, plan, record, act.

The order is what makes a killed operator harmless. A plan is recorded in the status before its
actions are taken, and each action is safe to repeat, so the next process reads the status, polls
the pods and goes on.

A write for every turn of every round would be most of the API server's work. So a status in which only counters moved
is held back for some seconds. It is lost with the process, and the next one asks the pods anyway.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import WorkStatus
from poc_operator.clients.errors import UnreadableObject
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.actions import Emit, PodActions, PodAsks
from poc_operator.controller.failing_objects import RELEASE_SECONDS, FailureBackoff, pods_left, stop_unreadable
from poc_operator.controller.kinds import Planner, Sources, WorkT
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache, PodPoller, ProgressWatch, selects
from poc_operator.controller.other_rounds import OtherRounds
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.snapshot import AskPod, DeleteWork, Snapshot

#: Seconds between two turns of an object that runs or waits.
POLL_SECONDS = 2.0
#: Seconds between two looks whether a watch has told of the pods that work.
UNTOLD_SECONDS = 0.5
#: Seconds between two writes of a status in which only counters moved.
COUNTERS_SECONDS = 5.0


class StatusRecorder(Generic[WorkT]):
    """Writes the status of one object. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._written = float("-inf")
        # The newest status, with the stored one that it was made from or is stored as: what is stored has its errors
        # cut, and may lag behind by what was held back.
        self._known: tuple[WorkStatus, WorkStatus] | None = None
        self._held_back = False  # whether the newest status is still to be written

    def newest(self, stored: WorkT) -> WorkT:
        """Return the object with the status that was recorded last, unless somebody has written another one since."""
        if self._known is None or self._known[0] != stored.status:
            return stored
        newest: Any = stored.model_copy(update={"status": self._known[1]})
        found: WorkT = newest
        return found

    async def record(self, stored: WorkT, status: WorkStatus) -> None:
        """Write the status, or hold it back. Errors as from `ObjectStore.write_status`."""
        if status == self.newest(stored).status and not self._held_back:
            return
        written = _as_stored(status)
        fresh = self._clock() - self._written < COUNTERS_SECONDS
        if written == stored.status or (fresh and _differ_in_counters(written, stored.status)):
            self._known, self._held_back = (stored.status, status), written != stored.status
            return
        await self._store.write_status(stored, status)
        self._written, self._known, self._held_back = self._clock(), (written, status), False


def _as_stored(status: WorkStatus) -> WorkStatus:
    """Return the status as it will be read again."""
    return type(status).model_validate(status.stored())


def _differ_in_counters(one: WorkStatus, other: WorkStatus) -> bool:
    """Whether only counters differ, which are held back for rounds alone: the others have few."""
    if not isinstance(one, RoundStatus) or not isinstance(other, RoundStatus):
        return False
    return one.without_counters() == other.without_counters()


class Reconciler(Generic[WorkT]):
    """Takes one object from what is to what should be, as long as it exists."""

    def __init__(
        self,
        kind: type[Planner[WorkT]],
        ref: ObjectRef,
        *,
        sources: Sources,
        client: PodClient,
        poller: PodPoller,
        pods: PodCache,
        metrics: Metrics,
        emit: Emit,
        others: OtherRounds | None = None,
    ) -> None:
        self._resource = kind.resource
        self._ref = ref
        self._store = sources.store
        self._client = client
        self._poller = poller
        self._pods = pods
        self._metrics = metrics
        self._emit = emit
        self.log = ObjectLogger(logging.getLogger(__name__), kind.resource.KIND, ref)
        self._planner = kind(sources, ref, self.log)
        self._work: WorkT | None = None  # as seen last
        #: Which version of the spec was seen last; None before the first turn.
        self.generation: int | None = None
        self.failures = FailureBackoff(kind.resource, ref, store=self._store, metrics=metrics, emit=emit, log=self.log)
        self._recorder = StatusRecorder[WorkT](self._store, time.monotonic)
        self._watch = ProgressWatch(time.monotonic)
        #: Whether only another spec would give it something to do.
        self.resting = False
        #: Set when there is news; whoever calls `reconcile` in a loop waits for it, and clears it.
        self.wake = asyncio.Event()
        self._actions = PodActions(sources=sources, client=client, emit=emit, wake=self.wake, log=self.log)
        self._asks = PodAsks(client=client, wake=self.wake)
        self._others = others or OtherRounds(time.monotonic)
        self._knows_pods = False  # whether the watch has told of those that worked when this process began

    def concerns(self, pod: PodView) -> bool:
        """Whether the pod may matter to the object."""
        return self._work is None or selects(self._work, pod)

    def enter_queue(self) -> None:
        """Let the other rounds of the namespace wait for the first plan of this one, if it queues with them."""
        if self._planner.queues:
            self._others.expect(self._ref.uid, self._ref.namespace, self.wake)

    async def reconcile(self) -> bool:
        """Take the object one step further. Return False when it is gone, or is going."""
        stored = await self._read()
        if stored is None or stored.metadata.deletion_timestamp is not None:
            return False
        self._work = work = self._recorder.newest(stored)
        seen = await self._observe(work)
        with self._metrics.plan_seconds.time():
            step = self._planner.plan(seen)
        # At once, so that no other round plans with the same pod while this status is written.
        if (told := self._planner.told_others(seen, step)) is not None:
            self._others.put(self._ref.uid, told)
        await self._recorder.record(stored, step.status)
        self._planner.recorded(step)
        self._metrics.planned(seen, step.status, step.events)
        for event in step.events:
            self._emit(event)
        if any(isinstance(action, DeleteWork) for action in step.actions):
            await self._store.delete(work)
            return False
        self._asks.keep(work.spec.port, (action for action in step.actions if isinstance(action, AskPod)))
        self._actions.begin(work.spec.port, step.actions)
        self.resting = step.status.state.finished and work.spec.ttl_seconds_after_finished is None
        return True

    async def close(self) -> None:
        """Give up what is under way; the next process finds out what became of it."""
        await self._asks.cancel()
        await self._actions.cancel()
        await self._planner.close()
        self._metrics.forget(self._ref.uid)

    async def stop_deleted(self, waited: float) -> int:
        """Stop the pods of a deleted object, which has waited for so many seconds; return 0 if it can be released."""
        left = await self.stop_all()
        if left and waited >= RELEASE_SECONDS:
            self._emit(pods_left(left))
            return 0
        return left

    async def stop_all(self) -> int:
        """Stop every pod that computes for the object; return how many still do. For one that is being deleted."""
        try:
            work = await self._read()
        except UnreadableObject as error:
            self.log.warning("the deleted object cannot be read: %s; pods that say that they compute it stop", error)
            return await stop_unreadable(error, self._ref.uid, self._client, self._pods)
        if work is None:
            return 0
        seen = await self._observe(work)
        self._actions.begin(work.spec.port, self._planner.stop_orders(seen, self._planner.computing(seen)))
        await self._actions.finish()
        return len(self._planner.computing(await self._observe(work)))

    async def _read(self) -> WorkT | None:
        try:
            found: Any = await self._store.get(self._resource, self._ref.namespace, self._ref.name)
        except UnreadableObject as error:
            if error.body["metadata"].get("uid", self._ref.uid) != self._ref.uid:
                return None
            self.generation = error.generation
            raise
        # Another object may have its name by now.
        work: WorkT | None = found if found is not None and found.metadata.uid == self._ref.uid else None
        self.generation = work.metadata.generation if work is not None else None
        return work

    async def _observe(self, work: WorkT) -> Snapshot[WorkT]:
        pods = await self._pods_of(work)
        reports: dict[str, PodReport] = {}
        if not work.status.state.finished or work.metadata.deletion_timestamp is not None:
            reports, _ = await asyncio.gather(self._poll(pods, work), self._planner.ask(work))
            await self._planner.compare(work, reports)
        self._watch.forget_others(reports)
        self._actions.forget_others(reports)
        if work.status.stop_time is not None:
            self._actions.forget_refusals()
        measured = {uid: self._watch.measured(uid, report) for uid, report in reports.items()}
        return Snapshot(
            work=work,
            pods=pods,
            reports={uid: self._with_answers(uid, report) for uid, report in measured.items()},
            now=datetime.now(UTC).replace(microsecond=0),
            find_other_rounds=partial(self._others.beside, self._ref.uid, self._ref.namespace),
        )

    async def _pods_of(self, work: WorkT) -> Sequence[PodView]:
        """Return the object's pods. Of a new process the watch may not have told yet of those that work: they are
        waited for, since a pod that it does not know would count as lost.
        """
        while not self._knows_pods:
            known = {pod.uid for pod in self._pods.matching(work)}
            untold = {share.uid for share in work.status.shares if share.state.active and share.uid} - known
            if untold:
                listed = await self._store.list_pods(work.metadata.namespace, work.spec.selector)
                untold.intersection_update(pod.uid for pod in listed)
            if untold:
                await asyncio.sleep(UNTOLD_SECONDS)
            self._knows_pods = not untold
        return self._pods.matching(work)

    async def _poll(self, pods: Sequence[PodView], work: WorkT) -> dict[str, PodReport]:
        with self._metrics.poll_seconds.time():
            return await self._poller.poll(pods, work, self._metrics.poll_failed)

    def _with_answers(self, uid: str, report: PodReport) -> PodReport:
        return dataclasses.replace(self._actions.with_answer(uid, report), answer=self._asks.answer_of(uid))
