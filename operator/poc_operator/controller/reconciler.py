# SPDX-License-Identifier: Apache-2.0
"""The loop of one round: read, observe, plan, record, act.

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

from poc_operator.clients.errors import UnreadableRound
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.kube.rounds import RoundStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.actions import Emit, PodActions, PodAsks
from poc_operator.controller.logs import RoundLogger, RoundRef
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import GatewayObserver, PodCache, ProgressWatch, poll
from poc_operator.model.checks import Proof
from poc_operator.model.round import Round
from poc_operator.model.spec import Mode
from poc_operator.model.status import RoundStatus, SlotState
from poc_operator.observed.gateway import GatewayReport
from poc_operator.observed.pods import PodReport, PodView
from poc_operator.rounds.conditions import internal_error
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import AskPod, DeleteRound, Snapshot
from poc_operator.rounds.stop import running_pods, stop_orders

#: Seconds between two writes of a status in which only counters moved.
COUNTERS_SECONDS = 5.0


class StatusRecorder:
    """Writes the status of one round. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, store: RoundStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._written = float("-inf")
        # The status that was held back, with the stored one that it is to replace.
        self._held: tuple[RoundStatus, RoundStatus] | None = None

    def newest(self, stored: Round) -> Round:
        """Return the round with the status that was held back, unless somebody has written another one since."""
        if self._held is None or self._held[0] != stored.status:
            return stored
        return stored.model_copy(update={"status": self._held[1]})

    async def record(self, stored: Round, status: RoundStatus) -> None:
        """Write the status, or hold it back. Errors as from `RoundStore.write_status`."""
        if status == stored.status:
            self._held = None
            return
        fresh = self._clock() - self._written < COUNTERS_SECONDS
        if fresh and status.without_counters() == stored.status.without_counters():
            self._held = stored.status, status
            return
        await self._store.write_status(stored, status)
        self._written, self._held = self._clock(), None


#: Seconds between two looks at a round that runs or waits.
POLL_SECONDS = 2.0


class Reconciler:
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
        gateway: GatewayClient | None = None,
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
        self._gateway_observer = (
            GatewayObserver(gateway, ref, self.log, time.monotonic) if gateway is not None else None
        )

    def concerns(self, pod: PodView) -> bool:
        """Whether the pod may matter to the round."""
        return self._round is None or self._round.selects(pod)

    async def reconcile(self) -> bool:
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
        snapshot = await self._observe(round_)
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
        conditions, event = internal_error(error, datetime.now(UTC).replace(microsecond=0), self.generation or 0)
        if event.message != self._trouble:
            self._trouble = event.message
            self._emit(event)
        await self._store.write_conditions(self._ref.namespace, self._ref.name, conditions, event.message)

    async def close(self) -> None:
        """Give up what is under way; the next process finds out what became of it."""
        await self._asks.cancel()
        await self._actions.cancel()
        if self._gateway_observer is not None:
            await self._gateway_observer.cancel()
        self._metrics.round_gone(self._ref.uid)

    async def stop_all(self) -> int:
        """Stop every pod that computes the round; return how many still do. For a round being deleted."""
        round_ = await self._store.get(self._ref.namespace, self._ref.name)
        if round_ is None:
            return 0
        snapshot = await self._observe(round_)
        self._actions.begin(round_.spec.port, stop_orders(snapshot, running_pods(snapshot)))
        await self._actions.finish()
        return len(running_pods(await self._observe(round_)))

    async def _observe(self, round_: Round) -> Snapshot:
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
        if self._gateway_observer is None or round_.spec.mode is not Mode.GENERATE:
            return None
        return await self._gateway_observer.observe()

    async def _proofs(self, round_: Round) -> Sequence[Proof] | str:
        source = round_.spec.proofs.round if round_.spec.proofs is not None else None
        if source is None:
            return await self._store.proofs(round_)
        if self._gateway_observer is None:
            return "spec.proofs.round needs a gateway: start the operator with --gateway-url"
        return await self._gateway_observer.proofs(source, round_.spec.protocol)

    def _with_answers(self, uid: str, report: PodReport) -> PodReport:
        return dataclasses.replace(self._actions.with_answer(uid, report), answer=self._asks.answer_of(uid))
