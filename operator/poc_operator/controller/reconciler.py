# SPDX-License-Identifier: Apache-2.0
"""The loop of one object, whatever its kind: read, observe, plan, record, act.

The order is what makes a killed operator harmless. A plan is recorded in the status before its
actions are taken, and each action is safe to repeat, so the next process reads the status, polls
the pods and goes on.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic

from poc_operator.apis.v1alpha1.status import State, WorkStatus
from poc_operator.clients.errors import ObjectGone, StaleObject, UnreadableObject
from poc_operator.clients.pods.client import ClientOf
from poc_operator.controller.actions import Emit, PodActions, PodAsks
from poc_operator.controller.event_loop import MANY, MOST_ORDERS, Computing, FewRequests
from poc_operator.controller.failing_objects import RELEASE_SECONDS, FailureBackoff, pods_left
from poc_operator.controller.fleet_refs import missing_fleet, with_fleet
from poc_operator.controller.kinds import Planner, Sources, WorkT
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache, PodPoller, ProgressWatch, selects
from poc_operator.controller.other_rounds import OtherRounds
from poc_operator.controller.stored_object import ObjectReader, StatusRecorder
from poc_operator.controller.untold_pods import UntoldPods
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.snapshot import AskPod, DeleteWork, Snapshot, Step, Work

#: Seconds between two turns of an object that runs or waits.
POLL_SECONDS = 2.0
#: What a turn costs beside its polls, the plan and the status above all, in polls.
POLLS_PER_TURN = 6
#: Seconds between two turns of an object that is suspended.
SUSPENDED_SECONDS = 30.0
#: Seconds between two looks whether a watch has told of the pods that work: at first, as the watches of a new process
#: tell of all within moments of each other, and at most.
FIRST_UNTOLD_SECONDS = 0.1
UNTOLD_SECONDS = 0.5


def _rest_seconds(work: Work, status: WorkStatus, now: datetime) -> float:
    """Return for how long the object needs no turn: what is finished, until its time to live has passed.

    What is suspended waits for another spec, and looks now and then whether that is all.
    """
    if status.state is State.SUSPENDED:
        return SUSPENDED_SECONDS
    if not status.state.finished:
        return 0.0
    ttl, finished = work.spec.ttl_seconds_after_finished, status.completion_time
    if ttl is None or finished is None:
        return math.inf
    return max(0.0, ttl - (now - finished).total_seconds())


class Reconciler(Generic[WorkT]):
    """Takes one object from what is to what should be, as long as it exists. Its deletion is an end as any other."""

    def __init__(
        self,
        kind: type[Planner[WorkT]],
        ref: ObjectRef,
        *,
        sources: Sources,
        clients: ClientOf,
        ask_clients: ClientOf | None = None,
        poller: PodPoller,
        pods: PodCache,
        metrics: Metrics,
        emit: Emit,
        others: OtherRounds | None = None,
        untold: UntoldPods | None = None,
        computing: Computing | None = None,
        orders: FewRequests | None = None,
    ) -> None:
        self._resource = kind.resource
        self._ref = ref
        self._store = sources.store
        self._fleets = sources.fleets
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
        resource: Any = kind.resource
        self._computing = computing or Computing()
        self._reader = ObjectReader[WorkT](resource, ref, self._store, time.monotonic, self._computing)
        self._recorder = StatusRecorder[WorkT](self._store, time.monotonic, self._computing)
        self._watch = ProgressWatch(time.monotonic)
        #: How many pods the last turn polled.
        self.polls = 0
        #: For how many seconds only another spec would give it something to do: until its time to live has passed.
        self.rest_seconds = 0.0
        #: Set when there is news; whoever calls `reconcile` in a loop waits for it, and clears it.
        self.wake = asyncio.Event()
        few = orders or FewRequests(MOST_ORDERS)
        self._actions = PodActions(sources=sources, clients=clients, few=few, emit=emit, wake=self.wake, log=self.log)
        self._asks = PodAsks(clients=ask_clients or clients, wake=self.wake, may_act=sources.may_act)
        self._deleted_since: float | None = None  # by the monotonic clock
        self._others = others or OtherRounds(time.monotonic)
        self._untold = untold or UntoldPods(sources.store, pods)
        self._knows_pods = False  # whether the watch has told of all that mattered when this began

    def concerns(self, pod: PodView) -> bool:
        """Whether the pod may matter to the object."""
        work = self._work
        return work is None or selects(work, pod) or any(share.uid == pod.uid for share in work.status.shares)

    def enter_queue(self) -> None:
        """Let the other rounds of the namespace wait for the first plan of this one, if it queues with them."""
        if self._planner.queues:
            self._others.expect(self._ref.uid, self._ref.namespace, self.wake)

    @property
    def load(self) -> int:
        """What a turn costs, in polls of a pod; nothing while there are hardly any turns."""
        return self.polls + (POLLS_PER_TURN if self.rest_seconds == 0 and self.generation is not None else 0)

    def tell(self, body: Mapping[str, Any]) -> None:
        """Let the next turn see what the watch tells of the object."""
        self._reader.tell(body)

    def read_anew(self) -> None:
        """Let the next turn read the object, which is not what is known of it."""
        self._reader.forget()

    async def reconcile(self) -> bool:
        """Take the object one step further. Return False when it is gone, or deleted and its pods have stopped."""
        stored = await self._read()
        if stored is None:
            return False
        self._work = work = self._recorder.newest(stored)
        if self._deleted and work.status.state.finished:
            return False
        work, missing = await self._with_fleet(work)
        seen = await self._observe(work, missing)
        step = await self._planned(seen)
        if not await self._record(stored, step.status):  # nothing is ordered that is not recorded
            return False
        self._planner.recorded(step)
        self._metrics.planned(seen, step.status, step.events)
        for event in step.events:
            self._emit(event)
        if any(isinstance(action, DeleteWork) for action in step.actions):
            await self._delete(work)
            return False
        self._asks.keep(work.spec.port, (action for action in step.actions if isinstance(action, AskPod)))
        self._actions.begin(work.spec.port, step.actions)
        self.rest_seconds = _rest_seconds(work, step.status, seen.now)
        if self._deleted and step.status.state.finished:
            self._tell_of_silent(seen)
            return False
        return True

    async def _delete(self, work: WorkT) -> None:
        """Delete the object as this turn has left it."""
        try:
            await self._store.delete(self._reader.known or work)
        except StaleObject:
            self._reader.forget()  # perhaps it is to be kept
            raise

    async def _with_fleet(self, work: WorkT) -> tuple[WorkT, str | None]:
        """Return the work with what it takes from its fleet, and what to say if there is no such fleet."""
        fleets, ref = self._fleets, work.spec.fleet_ref
        if ref is None or fleets is None:
            return work, None
        fleet = await fleets.find(work.metadata.namespace, ref.name)
        return with_fleet(work, fleet, self._pods.matching(work)), missing_fleet(work, fleet)

    async def _planned(self, seen: Snapshot[WorkT]) -> Step[Any]:
        """Return the plan, of which the other rounds of the namespace know by then.

        One after the other, each with what the last one made of it, so that no two plan with the same pod. What is
        planned in the event loop's thread needs the lock of the namespace only while one plans in another thread.
        """
        turn, size = self._others.turn(self._ref.namespace), len(seen.pods) + len(seen.work.status.shares)

        def unless_locked() -> Step[Any] | None:
            return None if turn.locked() else self._told(seen, self._plan(seen))

        step = await self._computing.done(unless_locked, size) if size < MANY else None
        if step is not None:
            return step
        async with turn:
            others = seen.known_rounds  # in this thread, since the loops of all namespaces change what it is taken from
            seen = dataclasses.replace(seen, find_other_rounds=lambda: others)
            return self._told(seen, await self._computing.done(partial(self._plan, seen), size))

    def _plan(self, seen: Snapshot[WorkT]) -> Step[Any]:
        with self._metrics.plan_seconds.time():
            return self._planner.plan(seen)

    def _told(self, seen: Snapshot[WorkT], step: Step[Any]) -> Step[Any]:
        """Tell the other rounds what the plan has made of it; return the plan."""
        if (told := self._planner.told_others(seen, step)) is not None:
            self._others.put(self._ref.uid, told)
        return step

    async def _record(self, stored: WorkT, status: WorkStatus) -> bool:
        """Record the status; False if the object is gone."""
        try:
            self._reader.remember(await self._recorder.record(stored, status))
        except StaleObject:
            self._reader.forget()
            raise
        except ObjectGone as error:
            self.log.info("%s any more", error)
            return False
        return True

    def seconds_to_release(self) -> float:
        """Return for how many seconds its pods may hold the object; infinity unless it is being deleted."""
        if self._deleted_since is None:
            return math.inf
        return self._deleted_since + RELEASE_SECONDS - time.monotonic()

    def tell_of_pods_left(self) -> None:
        """Tell that the object is released although pods have not confirmed that they stopped."""
        left = sum(share.state.active for share in self._work.status.shares) if self._work is not None else 0
        self._emit(pods_left(left))

    def _tell_of_silent(self, seen: Snapshot[WorkT]) -> None:
        """Tell how many pods are not waited for any longer, if any."""
        active = [share for share in seen.work.status.shares if share.state.active and seen.pod_of(share) is not None]
        silent = [share for share in active if seen.report_of(share).status is None]
        if silent:
            self._emit(pods_left(len(silent)))

    async def close(self) -> None:
        """Give up what is under way; the next process finds out what became of it."""
        await self._asks.cancel()
        await self._actions.cancel()
        await self._planner.close()
        self._metrics.forget(self._ref.uid)

    @property
    def _deleted(self) -> bool:
        return self._deleted_since is not None

    async def _read(self) -> WorkT | None:
        """Return the object as it is now; None if it is gone, or is going and cannot be understood."""
        try:
            work = await self._reader.read()
        except UnreadableObject as error:
            metadata = error.body["metadata"]
            if metadata.get("uid", self._ref.uid) != self._ref.uid:  # another object has the name by now
                return None
            self._note(error.generation, deleted="deletionTimestamp" in metadata)
            if not self._deleted:
                raise
            self.log.warning(
                "the deleted object cannot be read: %s; what pods compute for it is stopped after it", error
            )
            return None
        if work is None:
            self.generation = None
            return None
        self._note(work.metadata.generation, deleted=work.metadata.deletion_timestamp is not None)
        return work

    def _note(self, generation: int, *, deleted: bool) -> None:
        self.generation = generation
        if deleted and self._deleted_since is None:
            # By a clock of its own: that of the API server may go wrong.
            self._deleted_since = time.monotonic()

    async def _observe(self, work: WorkT, missing: str | None) -> Snapshot[WorkT]:
        pods, others = await self._pods_of(work)
        if self._fleets is not None and not work.status.state.finished:
            pods = await self._fleets.with_bars(pods)
        reports: dict[str, PodReport] = {}
        if not work.status.state.finished:
            reports, _ = await asyncio.gather(self._poll([*pods, *others], work), self._planner.ask(work))
            await self._planner.compare(work, reports)
        self.polls = len(reports)
        self._watch.forget_others(reports)
        self._actions.forget_others(reports)
        if work.status.stop_time is not None:
            self._actions.forget_refusals()
        measured = await self._computing.done(partial(self._measured, reports), len(reports))
        return Snapshot(
            work=work,
            pods=pods,
            others=others,
            reports={uid: self._with_answers(uid, report) for uid, report in measured.items()},
            now=datetime.now(UTC).replace(microsecond=0),
            find_other_rounds=partial(self._others.beside, self._ref.uid, self._ref.namespace),
            missing_fleet=missing,
        )

    async def _pods_of(self, work: WorkT) -> tuple[Sequence[PodView], Sequence[PodView]]:
        """Return the object's pods, and others that may compute for it, once the watch has told of all that matter."""
        pause = FIRST_UNTOLD_SECONDS
        while not self._knows_pods:
            self._knows_pods = not await self._is_untold(work)
            if not self._knows_pods:
                await asyncio.sleep(pause)
                pause = min(2 * pause, UNTOLD_SECONDS)
        return self._pods.matching(work), self._pods.holding(work)

    async def _is_untold(self, work: WorkT) -> bool:
        """Whether the watch has yet to tell of a pod that exists and matters now.

        Of a new process the watch may not have told yet of those that work: a pod that it does not know would count as
        lost. And before the slots are fixed, which happens once, every pod matters: it would get none.
        """
        namespace, selector = work.metadata.namespace, work.spec.pods
        begins = not (work.status.shares or work.status.stop_time or work.status.state.finished or self._deleted)
        if begins:
            return await self._untold.exist(namespace, selector)
        working = (share for share in work.status.shares if share.state.active)
        untold = {share.uid: share.pod or "" for share in working if share.uid and not self._pods.knows(share.uid)}
        return bool(untold) and await self._untold.include(namespace, selector, untold)

    async def _poll(self, pods: Sequence[PodView], work: WorkT) -> dict[str, PodReport]:
        with self._metrics.poll_seconds.time():
            return await self._poller.poll(pods, work, self._metrics.poll_failed, self._planner.renewal(work))

    def _measured(self, reports: Mapping[str, PodReport]) -> dict[str, PodReport]:
        return {uid: self._watch.measured(uid, report) for uid, report in reports.items()}

    def _with_answers(self, uid: str, report: PodReport) -> PodReport:
        answered, answer = self._actions.with_answer(uid, report), self._asks.answer_of(uid)
        return answered if answer is None else dataclasses.replace(answered, answer=answer)
