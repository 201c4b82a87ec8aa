# SPDX-License-Identifier: Apache-2.0
"""The loop that drives one round: read, poll, plan, record, act.

The order is what makes a killed operator harmless. A plan is recorded in the status before its
actions are taken, and each action is safe to repeat, so the next process reads the status, polls
the pods and goes on. Actions run beside the loop, one at a time for each pod: a pod that is slow to
answer holds up no other.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

from poc_operator.model.conditions import Reason
from poc_operator.model.pods import PodReport, PodView
from poc_operator.model.round import Round
from poc_operator.model.status import SlotState
from poc_operator.plan.plan import plan
from poc_operator.plan.snapshot import Action, DeletePod, DeleteRound, RoundEvent, Snapshot, StartPod, StopPod
from poc_operator.plan.stops import running_pods, stop_orders
from poc_operator.podapi.client import PodClient, base_url
from poc_operator.podapi.errors import PodBusy, PodError, PodRefused
from poc_operator.runtime.pods import PodCache
from poc_operator.runtime.polling import poll
from poc_operator.runtime.progress import ProgressWatch
from poc_operator.store.errors import StoreError, StoreForbidden
from poc_operator.store.rounds import RoundStore
from vllm_poc.wire.responses import CommandResponse

log = logging.getLogger(__name__)

#: Seconds between two looks at a round that runs or waits.
POLL_SECONDS = 2.0

Emit = Callable[[RoundEvent], None]


class RoundDriver:
    """Drives the round ``namespace/name`` as long as it exists."""

    def __init__(
        self, namespace: str, name: str, *, store: RoundStore, client: PodClient, pods: PodCache, emit: Emit
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._store = store
        self._client = client
        self._pods = pods
        self._emit = emit
        # Answers to the starts of the last tick: what the pods' next reports cannot tell.
        self._started: dict[str, str] = {}
        self._refusals: dict[str, tuple[str, str]] = {}
        self._watch = ProgressWatch(time.monotonic)
        self._undeletable: set[str] = set()  # pod uids that the user was told of
        self._in_flight: dict[str, asyncio.Task[None]] = {}  # by pod uid
        #: Set when there is news; whoever calls `tick` in a loop waits for it, and clears it.
        self.wake = asyncio.Event()

    async def tick(self) -> bool:
        """Take the round one step further. Return False when there is nothing left to drive."""
        round_ = await self._store.get(self._namespace, self._name)
        if round_ is None or round_.metadata.deletion_timestamp is not None:
            return False
        snapshot = await self._look(round_)
        step = plan(snapshot)
        if step.status != round_.status:
            await self._store.write_status(round_, step.status)
        for event in step.events:
            self._emit(event)
        if any(isinstance(action, DeleteRound) for action in step.actions):
            await self._store.delete(round_)
            return False
        self._act(round_, step.actions)
        ttl = round_.spec.ttl_seconds_after_finished
        return not (step.status.state.finished and ttl is None)

    async def close(self) -> None:
        """Give up what is in flight; the next process finds out what became of it."""
        for task in self._in_flight.values():
            task.cancel()
        await asyncio.gather(*self._in_flight.values(), return_exceptions=True)

    async def stop_all(self) -> int:
        """Stop every pod that computes the round; return how many still do. For a round being deleted."""
        round_ = await self._store.get(self._namespace, self._name)
        if round_ is None:
            return 0
        snapshot = await self._look(round_)
        self._act(round_, stop_orders(snapshot, running_pods(snapshot)))
        await asyncio.gather(*self._in_flight.values(), return_exceptions=True)
        return len(running_pods(await self._look(round_)))

    async def _look(self, round_: Round) -> Snapshot:
        pods = self._pods.matching(round_)
        finished = round_.status.state.finished and round_.metadata.deletion_timestamp is None
        reports = {} if finished else await poll(self._client, pods, round_)
        self._watch.forget_others(reports)
        starting = {slot.uid for slot in round_.status.assignments if slot.state is SlotState.STARTING}
        self._refusals = {uid: refusal for uid, refusal in self._refusals.items() if uid in starting}
        return Snapshot(
            round=round_,
            pods=pods,
            reports={uid: self._with_answer(uid, report) for uid, report in reports.items()},
            now=datetime.now(UTC).replace(microsecond=0),
        )

    def _with_answer(self, uid: str, report: PodReport) -> PodReport:
        return dataclasses.replace(
            self._watch.measured(uid, report),
            started=self._started.pop(uid, None),
            refusal=self._refusals.get(uid),
            in_flight=uid in self._in_flight,
        )

    def _act(self, round_: Round, actions: Sequence[Action]) -> None:
        for action in actions:
            if not isinstance(action, DeleteRound) and action.pod.uid not in self._in_flight:
                task = asyncio.create_task(self._take(round_, action))
                self._in_flight[action.pod.uid] = task
                task.add_done_callback(partial(self._done, action.pod.uid))

    def _done(self, uid: str, task: asyncio.Task[None]) -> None:
        del self._in_flight[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an action failed", exc_info=error)

    async def _take(self, round_: Round, action: StartPod | StopPod | DeletePod) -> None:
        match action:
            case StartPod():
                await self._start(round_, action)
            case StopPod(pod=pod):
                await self._stop(_address(round_, pod), action)
            case DeletePod(pod=pod):
                await self._delete(pod)

    async def _start(self, round_: Round, start: StartPod) -> None:
        uid = start.pod.uid
        self._refusals.pop(uid, None)
        try:
            answer = await self._client.start(_address(round_, start.pod), start.request)
            self._started[uid] = (
                answer.pow_status.session_id
                if isinstance(answer, CommandResponse)
                else start.pod.server(round_.spec.port)
            )
            self.wake.set()
        except PodBusy as error:
            # What it computes is this slot, as after an answer that was lost, or other work: the next poll tells.
            log.info("start of pod %s: %s", start.pod.name, error)
        except PodRefused as error:
            self._refusals[uid] = (error.reason, str(error))
        except PodError as error:
            # The outcome is unknown; the next poll tells, and a repeated start is harmless.
            log.warning("start of pod %s: %s", start.pod.name, error)

    async def _delete(self, pod: PodView) -> None:
        try:
            await self._store.delete_pod(pod)
        except StoreForbidden as error:
            if pod.uid not in self._undeletable:
                self._undeletable.add(pod.uid)
                message = f"pod {pod.name} cannot be deleted ({error}): install the chart with rbac.deletePods=true"
                self._emit(RoundEvent(reason=Reason.STALLED, message=message, warning=True))
        except StoreError as error:
            log.warning("deletion of pod %s: %s", pod.name, error)

    async def _stop(self, address: str, stop: StopPod) -> None:
        try:
            await self._client.stop(address, stop.round_id)
            self.wake.set()
        except PodBusy:
            log.info("pod %s computes another round by now", stop.pod.name)
        except PodError as error:
            log.warning("stop of pod %s: %s", stop.pod.name, error)


def _address(round_: Round, pod: PodView) -> str:
    return base_url(pod.ip or "", round_.spec.port)
