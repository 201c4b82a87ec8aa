# SPDX-License-Identifier: Apache-2.0
"""The loop that drives one round: read, poll, plan, record, act.

The order is what makes a killed operator harmless. A plan is recorded in the status before its
actions are taken, and each action is safe to repeat, so the next process reads the status, polls
the pods and goes on.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from poc_operator.model.checks import Proof
from poc_operator.model.gateway import GatewayReport
from poc_operator.model.pods import PodReport, PodView
from poc_operator.model.round import Round
from poc_operator.model.spec import Mode
from poc_operator.model.status import SlotState
from poc_operator.plan.plan import plan
from poc_operator.plan.snapshot import AskPod, DeleteRound, Snapshot
from poc_operator.plan.stops import running_pods, stop_orders
from poc_operator.plan.trouble import trouble
from poc_operator.podapi.client import PodClient
from poc_operator.podapi.collector import CollectorClient
from poc_operator.runtime.actions import Emit, PodActions
from poc_operator.runtime.asks import PodAsks
from poc_operator.runtime.collection import Collection
from poc_operator.runtime.logs import RoundLogger, RoundRef
from poc_operator.runtime.metrics import Metrics
from poc_operator.runtime.pods import PodCache
from poc_operator.runtime.polling import poll
from poc_operator.runtime.progress import ProgressWatch
from poc_operator.runtime.recording import StatusRecorder
from poc_operator.store.errors import UnreadableRound
from poc_operator.store.rounds import RoundStore

#: Seconds between two looks at a round that runs or waits.
POLL_SECONDS = 2.0


class RoundDriver:
    """Drives one round as long as it exists."""

    def __init__(
        self,
        ref: RoundRef,
        *,
        store: RoundStore,
        client: PodClient,
        pods: PodCache,
        metrics: Metrics,
        emit: Emit,
        collector: CollectorClient | None = None,
    ) -> None:
        self._ref = ref
        self._store = store
        self._client = client
        self._pods = pods
        self._metrics = metrics
        self._emit = emit
        self.log = RoundLogger(logging.getLogger(__name__), ref)
        self._round: Round | None = None  # as seen last
        self._trouble = ""
        #: Which version of the spec was seen last; None before the first look.
        self.generation: int | None = None
        self._recorder = StatusRecorder(store, time.monotonic)
        self._watch = ProgressWatch(time.monotonic)
        #: Set when there is news; whoever calls `tick` in a loop waits for it, and clears it.
        self.wake = asyncio.Event()
        #: Set when the spec has changed.
        self.changed = asyncio.Event()
        self._actions = PodActions(store=store, client=client, emit=emit, wake=self.wake, log=self.log)
        self._asks = PodAsks(client=client, wake=self.wake)
        self._collection = Collection(collector, ref, self.log, time.monotonic) if collector is not None else None

    def concerns(self, pod: PodView) -> bool:
        """Whether the pod may matter to the round."""
        return self._round is None or self._round.selects(pod)

    async def tick(self) -> bool:
        """Take the round one step further. Return False when there is nothing left to drive."""
        try:
            stored = await self._store.get(self._ref.namespace, self._ref.name)
        except UnreadableRound as error:
            self.generation = error.generation
            raise
        if stored is None or stored.metadata.deletion_timestamp is not None:
            return False
        self.generation = stored.metadata.generation
        self._round = round_ = self._recorder.newest(stored)
        snapshot = await self._look(round_)
        with self._metrics.plan_seconds.time():
            step = plan(snapshot)
        self._trouble = ""
        await self._recorder.record(stored, step.status)
        self._metrics.planned(snapshot, step.status, step.events)
        for event in step.events:
            self._emit(event)
        if any(isinstance(action, DeleteRound) for action in step.actions):
            await self._store.delete(round_)
            return False
        self._asks.keep(round_.spec.port, (action for action in step.actions if isinstance(action, AskPod)))
        self._actions.begin(round_.spec.port, step.actions)
        ttl = round_.spec.ttl_seconds_after_finished
        return not (step.status.state.finished and ttl is None)

    async def report(self, error: Exception) -> None:
        """Tell the user, in the round's conditions and once by an Event, why the round cannot be taken further."""
        conditions, event = trouble(error, datetime.now(UTC).replace(microsecond=0), self.generation or 0)
        if event.message != self._trouble:
            self._trouble = event.message
            self._emit(event)
        await self._store.write_conditions(self._ref.namespace, self._ref.name, conditions, event.message)

    async def close(self) -> None:
        """Give up what is under way; the next process finds out what became of it."""
        await self._asks.cancel()
        await self._actions.cancel()
        if self._collection is not None:
            await self._collection.cancel()
        self._metrics.round_gone(self._ref.uid)

    async def stop_all(self) -> int:
        """Stop every pod that computes the round; return how many still do. For a round being deleted."""
        round_ = await self._store.get(self._ref.namespace, self._ref.name)
        if round_ is None:
            return 0
        snapshot = await self._look(round_)
        self._actions.begin(round_.spec.port, stop_orders(snapshot, running_pods(snapshot)))
        await self._actions.finish()
        return len(running_pods(await self._look(round_)))

    async def _look(self, round_: Round) -> Snapshot:
        pods = self._pods.matching(round_)
        finished = round_.status.state.finished and round_.metadata.deletion_timestamp is None
        reports, gateway = ({}, None) if finished else await asyncio.gather(self._poll(pods, round_), self._ask(round_))
        self._watch.forget_others(reports)
        slots = round_.status.assignments
        self._actions.forget_refusals({slot.uid for slot in slots if slot.state is SlotState.STARTING})
        measured = {uid: self._watch.measured(uid, report) for uid, report in reports.items()}
        return Snapshot(
            round=round_,
            pods=pods,
            reports={uid: self._with_answers(uid, report) for uid, report in measured.items()},
            now=datetime.now(UTC).replace(microsecond=0),
            proofs=() if finished else await self._proofs(round_),
            gateway=gateway,
        )

    async def _poll(self, pods: Sequence[PodView], round_: Round) -> dict[str, PodReport]:
        with self._metrics.poll_seconds.time():
            return await poll(self._client, pods, round_, self._metrics.poll_failed)

    async def _ask(self, round_: Round) -> GatewayReport | None:
        if self._collection is None or round_.spec.mode is not Mode.GENERATE:
            return None
        return await self._collection.look()

    async def _proofs(self, round_: Round) -> Sequence[Proof] | str:
        source = round_.spec.proofs.round if round_.spec.proofs is not None else None
        if source is None:
            return await self._store.proofs(round_)
        if self._collection is None:
            return "spec.proofs.round needs a gateway: start the operator with --gateway-url"
        return await self._collection.proofs(source, round_.spec.protocol)

    def _with_answers(self, uid: str, report: PodReport) -> PodReport:
        return dataclasses.replace(self._actions.with_answer(uid, report), answer=self._asks.answer_of(uid))
