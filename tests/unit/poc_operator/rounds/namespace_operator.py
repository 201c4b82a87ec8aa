# SPDX-License-Identifier: Apache-2.0
"""An operator process as it drives the rounds of one namespace: its loops, step by step, so that it may be killed
between any two, and other things may happen there.

What the process remembers is kept by the controller's own classes, with the clock of the world.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.clients.errors import ObjectGone, ObjectInvalid, StaleObject, StoreUnavailable
from poc_operator.controller.actions import Refusals
from poc_operator.controller.event_loop import Computing
from poc_operator.controller.failing_objects import FIRST_PAUSE_SECONDS, RELEASE_SECONDS
from poc_operator.controller.observing import PodCache, ProgressWatch, after_answer
from poc_operator.controller.other_rounds import OtherRounds
from poc_operator.controller.stored_object import READ_SECONDS, StatusRecorder
from poc_operator.leases import Renewal
from poc_operator.observed import GatewayReport, PodReport, PodView
from poc_operator.planning.eligibility import takeable_pods
from poc_operator.planning.queue import as_other
from poc_operator.planning.snapshot import DeletePod, DeleteWork, ExtendPod, StartPod, StopPod
from poc_operator.rounds.leaving import renewal
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from tests.unit.poc_operator.build import CALLBACK, NOW

T = TypeVar("T")
PodOrder = StartPod | StopPod | ExtendPod | DeletePod

#: The lease of all orders here.
LEASE_SECONDS = 120
NAMESPACE = "ns"
#: The name under which it gives orders.
OWNER = "this-cluster"


class Step(StrEnum):
    """After which step of a turn a loop stands."""

    POLLED = "polled"
    ASKED = "asked the gateway"
    PLANNED = "planned"
    RECORDED = "recorded"
    ORDERED = "ordered"


Turn = Generator[Step, None, None]


class _Inline(Computing):
    """Computes at once: there is no event loop."""

    async def done(self, compute: Callable[[], T], size: int) -> T:
        return compute()


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("it waits")


class Surroundings(Protocol):
    """What the operator reaches: the API server, the pods, the gateway."""

    @property
    def seconds(self) -> float:
        """The true time."""

    @property
    def store(self) -> Any:  # noqa: ANN401 - as much of an ObjectStore as is needed here
        """The API server's objects."""

    def read(self, uid: str) -> PoCRound | None:
        """Return a round; None if it is gone."""

    def delete(self, uid: str) -> None:
        """Delete a round, which its finalizer holds."""

    def release(self, uid: str) -> None:
        """Take the finalizer off."""

    def poll(self, pod: PodView, renewal: Renewal | None, now: datetime) -> PodReport:
        """Ask a pod for its status, and renew its lease."""

    def ask_gateway(self, round_: PoCRound, before: GatewayReport | None) -> GatewayReport | None:
        """Ask the gateway, if there is one."""

    def send(self, loop: "RoundLoop", order: PodOrder) -> None:
        """Put an order on its way."""

    def planned(self, loop: "RoundLoop", snapshot: RoundSnapshot, step: RoundStep) -> None:
        """Check a plan."""


@dataclass
class RoundLoop:
    """The loop of one round.

    ``planned`` is the round of its last plan, ``status`` what that made of it, ``usable`` the pods that it saw.
    ``planned`` is None while the operator fails on the round.
    """

    uid: str
    operator: "Operator"
    watch: ProgressWatch
    refusals: Refusals
    recorder: StatusRecorder[PoCRound]
    known: PoCRound | None = None
    turn: Turn | None = None
    in_flight: dict[str, PodOrder] = field(default_factory=dict)  # by pod uid
    started: dict[str, str] = field(default_factory=dict)
    start_errors: dict[str, str] = field(default_factory=dict)
    took: set[str] = field(default_factory=set)  # pods whose work was stopped for a start that is to follow
    gateway: GatewayReport | None = None
    deleted_since: float | None = None
    planned: PoCRound | None = None
    status: RoundStatus | None = None
    usable: frozenset[str] = frozenset()
    driven_at: float = float("-inf")
    planned_at: float = float("-inf")
    paused_until: float = float("-inf")
    read_at: float = float("-inf")
    step: Step | None = None

    def advance(self) -> bool:
        """Take the next step of its turn, and begin one if there is none. False once the turn is over."""
        if self.turn is None and self.operator.clock() < self.paused_until:
            return False
        self.turn = self.turn or self._turn()
        try:
            self.step = next(self.turn)
            return True
        except StaleObject:
            self.known = None
        except ObjectInvalid:
            self.known, self.paused_until = None, self.operator.clock() + FIRST_PAUSE_SECONDS
            self.planned = None  # nobody waits for it until it is planned anew
            self.operator.board.fail(self.uid)
        except (StoreUnavailable, StopIteration):
            pass
        self.turn, self.step = None, None
        return False

    def finish_turn(self) -> None:
        """Take all steps that are left of its turn, or of a whole one."""
        while self.advance():
            pass

    def _turn(self) -> Turn:
        """As `Reconciler.reconcile`."""
        world = self.operator.world
        stored = self._read()
        if stored is None:
            self.operator.drop(self.uid)
            return
        work = self.recorder.newest(stored)
        if work.metadata.deletion_timestamp is not None and work.status.state.finished:
            self._released()
            return
        pods, others = self.operator.pods.matching(work), self.operator.pods.holding(work)
        polled = {} if work.status.state.finished else self._poll([*pods, *others], work)
        yield Step.POLLED
        if not work.status.state.finished:
            self._ask(work, polled)
        yield Step.ASKED
        reports = {uid: self._with_answer(uid, self.watch.measured(uid, report)) for uid, report in polled.items()}
        snapshot = self._snapshot(work, pods, others, reports)
        step = self._plan(snapshot)
        world.planned(self, snapshot, step)
        yield Step.PLANNED
        try:
            self.known = run_now(self.recorder.record(stored, step.status))
        except ObjectGone:
            self.operator.drop(self.uid)
            return
        self.gateway = self.gateway and replace(self.gateway, fallen=frozenset())
        yield Step.RECORDED
        for action in step.actions:
            if isinstance(action, DeleteWork):
                world.delete(self.uid)
                self.operator.drop(self.uid)
                return
            if isinstance(action, PodOrder) and action.pod.uid not in self.in_flight:
                self.in_flight[action.pod.uid] = action
                world.send(self, action)
                yield Step.ORDERED
        self._rest(work, step.status)

    def _rest(self, work: PoCRound, status: RoundStatus) -> None:
        finished, deleted = status.state.finished, work.metadata.deletion_timestamp is not None
        waited = self.deleted_since is not None and self.operator.clock() >= self.deleted_since + RELEASE_SECONDS
        if deleted and (finished or waited):
            self._released()
        elif finished and work.spec.ttl_seconds_after_finished is None:
            self.operator.drop(self.uid)

    def _read(self) -> PoCRound | None:
        if self.known is None or self.operator.clock() - self.read_at >= READ_SECONDS:
            self.known, self.read_at = self.operator.world.read(self.uid), self.operator.clock()
        if self.known is not None and self.known.metadata.deletion_timestamp and self.deleted_since is None:
            self.deleted_since = self.operator.clock()
        return self.known

    def _released(self) -> None:
        self.operator.drop(self.uid)
        self.operator.world.release(self.uid)

    def _poll(self, pods: list[PodView], work: PoCRound) -> dict[str, PodReport]:
        renewed, world = renewal(work, LEASE_SECONDS), self.operator.world
        return {pod.uid: world.poll(pod, renewed, self.operator.now) for pod in pods if not pod.gone}

    def _with_answer(self, uid: str, report: PodReport) -> PodReport:
        return replace(
            report,
            started=self.started.pop(uid, None),
            start_error=self.start_errors.pop(uid, None),
            refusal=self.refusals.of(uid),
            spared=self.refusals.spares(uid),
            in_flight=uid in self.in_flight,
        )

    def _ask(self, work: PoCRound, polled: dict[str, PodReport]) -> None:
        self.watch.forget_others(polled)
        self.refusals.keep(polled if work.status.stop_time is None else ())
        heard = {uid: report.status for uid, report in polled.items() if report.status is not None}
        answer = self.operator.world.ask_gateway(work, self.gateway)
        if answer is not None and not answer.error:
            answer = after_answer(self.gateway or a_gateway(), answer.collected, self.operator.now, heard)
        self.gateway = answer

    def _snapshot(
        self, work: PoCRound, pods: list[PodView], others: list[PodView], reports: dict[str, PodReport]
    ) -> RoundSnapshot:
        return RoundSnapshot(
            work=work,
            pods=pods,
            others=others,
            reports=reports,
            now=self.operator.now,
            find_other_rounds=lambda: self.operator.board.beside(self.uid, NAMESPACE),
            gateway=self.gateway,
            lease_seconds=LEASE_SECONDS,
            owner=OWNER,
        )

    def _plan(self, snapshot: RoundSnapshot) -> RoundStep:
        """Plan, and tell the other rounds."""
        step = plan(snapshot)
        told = as_other(snapshot.work, step.status, lambda: takeable_pods(snapshot), blocked=False)
        self.operator.board.put(self.uid, told)
        able = (pod.uid for pod, report in snapshot.answering if report.refusal is None)
        self.planned, self.status, self.usable = snapshot.round, step.status, frozenset(able)
        self.planned_at = self.operator.clock()
        return step


class Operator:
    """One process. ``skew`` is by how many seconds its clock is wrong."""

    def __init__(self, world: Surroundings, skew: float = 0.0) -> None:
        self.world = world
        self.skew = skew
        self.board = OtherRounds(self.clock)
        self.pods = PodCache(self.clock)
        self.loops: dict[str, RoundLoop] = {}
        self.named: dict[str, set[str]] = {}  # the uids of the pods that each round's status has named

    def clock(self) -> float:
        """Seconds of a monotonic clock."""
        return self.world.seconds

    @property
    def now(self) -> datetime:
        """The time by its own clock."""
        return NOW + timedelta(seconds=int(self.world.seconds + self.skew))

    def drive(self, uid: str) -> None:
        """Begin the loop of a round."""
        recorder = StatusRecorder[PoCRound](self.world.store, self.clock, _Inline())
        watch, refusals, now = ProgressWatch(self.clock), Refusals(self.clock), self.clock()
        self.loops[uid] = RoundLoop(uid, self, watch, refusals, recorder, driven_at=now)
        self.board.expect(uid, NAMESPACE, asyncio.Event())

    def drop(self, uid: str) -> None:
        """Let the loop of a round end."""
        self.loops.pop(uid, None)
        self.board.forget(uid)


def a_gateway() -> GatewayReport:
    """Return what is known of a gateway that was not asked yet."""
    return GatewayReport(callback=CALLBACK)
