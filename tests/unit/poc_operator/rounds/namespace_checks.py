# SPDX-License-Identifier: Apache-2.0
"""What must hold in a namespace whose rounds share pods, whatever happens there and in whatever order.

Nothing here asks the code under test: who goes first, which work may be stopped, and by when a round must have ended is
worked out anew, from the specs and the documentation of their fields.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RetryPolicy, RoundSpec, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.apis.v1alpha1.work import ConcurrencyPolicy
from poc_operator.controller.other_rounds import KNOWN_SECONDS, UNREAD_SECONDS
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import StartPod
from poc_operator.rounds.end import DECISION_PATIENCE
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from tests.unit.poc_operator.rounds.namespace_operator import LEASE_SECONDS, RoundLoop
from tests.unit.poc_operator.rounds.namespace_pods import FOREIGN, STARTUP_SECONDS, NamespacePod
from tests.unit.poc_operator.rounds.namespace_world import NamespaceWorld
from tests.unit.poc_operator.rounds.world import key, slot_of, valid_below
from vllm_poc.wire.answers import PowState

#: A pod is asked to compute on until it counts as silent; then its lease runs out, if it has one.
ORPHANED_SECONDS = LEASE_SECONDS + 300 + 60
#: Of the time between two turns no more counts: what happened meanwhile is seen step by step.
TURN_SECONDS = 40.0
SLACK_SECONDS = 5 * TURN_SECONDS
#: So long a round that ends waits for pods that do not answer, and then for the gateway's last word.
SILENT_END_SECONDS = 90 + 5


def goes_before(one: PoCRound, other: PoCRound) -> bool:
    """Whether a round goes before another in the queue, by what the documentation says."""

    def place(round_: PoCRound) -> tuple[int, int, int, datetime, str]:
        replaces = round_.spec.concurrency_policy is ConcurrencyPolicy.REPLACE
        born, name = round_.metadata.creation_timestamp, round_.metadata.name
        return -round_.spec.priority, not replaces, -round_.spec.block_height if replaces else 0, born, name

    return place(one) < place(other)


def may_stop(one: PoCRound, other: PoCRound) -> bool:
    """Whether a round may stop the work of another."""
    if one.spec.concurrency_policy is not ConcurrencyPolicy.REPLACE:
        return False
    return (one.spec.priority, one.spec.block_height) > (other.spec.priority, other.spec.block_height)


def holds(status: RoundStatus, uid: str) -> bool:
    """Whether the round has given the pod a slot."""
    return any(slot.uid == uid and slot.state.active for slot in status.assignments)


def asks_for_pods(round_: PoCRound, status: RoundStatus) -> bool:
    """Whether the round would take pods."""
    return not (round_.spec.suspend or status.stop_time or status.state.finished)


class CheckedWorld(NamespaceWorld):
    """A namespace in which each plan, each write, and each moment is checked."""

    def __init__(self) -> None:
        super().__init__()
        #: For how long the operator has looked at a round in which nothing gets on, and nothing is in its way.
        self.stuck_seconds: dict[str, float] = {}
        self.planned_at: dict[str, float] = {}
        #: Round, pod and the round that has taken the pod from the first one.
        self.taken: set[tuple[str, str, str]] = set()

    def _others(self, loop: RoundLoop) -> Iterator[tuple[PoCRound, RoundLoop, RoundStatus]]:
        """Yield the other rounds whose last plan is current, as they were then. A changed spec counts from the next."""
        for uid, other in self.operator.loops.items():
            fresh = self.seconds - other.planned_at < KNOWN_SECONDS
            if other is loop or uid not in self.store.rounds or not fresh:
                continue
            if other.planned is not None and other.status is not None:
                yield other.planned, other, other.status

    # Each plan.

    def planned(self, loop: RoundLoop, snapshot: RoundSnapshot, step: RoundStep) -> None:
        """Check a plan before it is recorded."""
        if snapshot.round.status.state.finished:
            return
        assert self.liars or Reason.REPORT_CONTRADICTORY not in {event.reason for event in step.events}
        held = {slot.uid for slot in snapshot.round.status.assignments if slot.state.active}
        active = {slot.uid for slot in step.status.assignments if slot.state.active and slot.uid is not None}
        self._check_turn(loop, snapshot, active - held, active & held)
        self._forget_taken(loop, active)
        self._note_taken(loop, active - held)
        for start in (action for action in step.actions if isinstance(action, StartPod)):
            if start.pod.uid not in loop.in_flight:
                self._check_start(loop, snapshot, step, start)
        self._check_end(loop, snapshot, step.status)

    def _check_turn(self, loop: RoundLoop, snapshot: RoundSnapshot, bound: set[str], kept_by_it: set[str]) -> None:
        """A round takes no pod that a round needs which goes before it, nor one that another has.

        A pod that it gives up with this plan is as good for the other one.
        """
        idle = {uid for uid, report in snapshot.reports.items() if uid in loop.usable and _computes_nothing(report)}
        for round_, other, status in self._others(loop):
            kept = {uid for uid in bound if holds(status, uid)}
            assert not kept or may_stop(snapshot.round, round_), f"{loop.uid} takes {kept} from {round_.id}"
            if goes_before(snapshot.round, round_) or not asks_for_pods(round_, status):
                continue
            slots = status.assignments
            needs = sum(slot.state is SlotState.WAITING for slot in slots) if slots else len(other.usable)
            held = {uid for _, _, found in self._others(loop) for uid in idle if holds(found, uid)}
            wanted = (idle & other.usable) - held - kept_by_it
            left = wanted - bound
            assert not wanted & bound or len(left) >= min(needs, len(wanted)), f"{loop.uid} goes before {round_.id}"

    def _note_taken(self, loop: RoundLoop, bound: set[str]) -> None:
        """Note which of the pods that a round takes another one has, which it may stop, or which nobody waits for."""
        for uid, other in self.operator.loops.items():
            unread = other.planned_at < other.driven_at and self.seconds - other.driven_at < UNREAD_SECONDS
            if uid in self.store.rounds and uid != loop.uid and not unread:
                taken = (pod for pod in bound if holds(self.store.rounds[uid].status, pod))
                self.taken.update((uid, pod, loop.uid) for pod in taken)

    def _forget_taken(self, loop: RoundLoop, active: set[str]) -> None:
        """Forget what was noted of pods that one of both rounds has given up."""
        self.taken = {
            (uid, pod, taker) for uid, pod, taker in self.taken if loop.uid not in (uid, taker) or pod in active
        }

    def _check_start(self, loop: RoundLoop, snapshot: RoundSnapshot, step: RoundStep, start: StartPod) -> None:
        """A start is recorded first, can be repeated, and neither its pod nor its slot is anybody else's."""
        uid, wanted = start.pod.uid, slot_of(start)
        assert start.request.round_id == loop.uid
        recorded = next(slot for slot in step.status.assignments if key(slot) == wanted)
        assert (recorded.uid, recorded.start) == (uid, start.request.start_index)
        for pod in self.pods.values():
            report = snapshot.reports.get(pod.uid)
            computed = pod.uid != uid and (pod.round_id, pod.slot) == (loop.uid, wanted)
            assert not computed or pod.astray or report is None or report.status is None
        others = {other: action for other, action in loop.in_flight.items() if other != uid}
        assert wanted not in {slot_of(action) for action in others.values() if isinstance(action, StartPod)}
        for round_, _, status in self._others(loop):
            both_have_it = {(loop.uid, uid, round_.id), (round_.id, uid, loop.uid)} & self.taken
            if both_have_it and goes_before(snapshot.round, round_):
                continue  # the other one gives the pod back, unless its own start arrives first
            assert not holds(status, uid) or may_stop(snapshot.round, round_), f"{uid} is for {round_.id}"

    def _check_end(self, loop: RoundLoop, snapshot: RoundSnapshot, after: RoundStatus) -> None:
        """A round that is to end does so within the times that its spec names."""
        spec, now, planned_at = snapshot.round.spec, snapshot.now, self.planned_at.get(loop.uid, self.seconds)
        self.planned_at[loop.uid] = self.seconds
        if after.outcome is not None and after.stop_time is not None:
            ending, patience = (now - after.stop_time).total_seconds(), DECISION_PATIENCE.total_seconds()
            assert after.state.finished or ending < spec.stop_deadline_seconds + patience
            heard = any(_is_heard(snapshot, slot) for slot in snapshot.round.status.assignments)
            assert after.state.finished or heard or ending < SILENT_END_SECONDS + patience, f"{loop.uid} waits on"
            return
        if spec.active_deadline_seconds is not None and after.start_time is not None and after.stop_time is None:
            assert (now - after.start_time).total_seconds() < spec.active_deadline_seconds
        stuck = self.stuck_seconds.get(loop.uid, 0.0) + min(TURN_SECONDS, self.seconds - planned_at)
        self.stuck_seconds[loop.uid] = 0.0 if self._gets_on(loop, snapshot, after) else stuck
        assert self.stuck_seconds[loop.uid] < longest_without_progress(spec), f"{loop.uid} gets nowhere"

    def replace_operator(self, skew: float) -> None:
        """Kill the operator: the next one measures anew for how long pods are silent."""
        super().replace_operator(skew)
        self.stuck_seconds, self.planned_at = {}, {}
        rounds = self.store.rounds
        self.taken = {
            (uid, pod, taker)
            for uid, pod, taker in self.taken
            if all(one in rounds and holds(rounds[one].status, pod) for one in (uid, taker))
        }

    def _gets_on(self, loop: RoundLoop, snapshot: RoundSnapshot, after: RoundStatus) -> bool:
        """Whether a round gets on, or waits for what no deadline is for: its user, its turn, a receiver."""
        before, now = snapshot.round.status, {key(slot): slot for slot in after.assignments}
        new = after.assignments and not before.assignments
        moved = any(_moved(slot, now[key(slot)]) for slot in before.assignments)
        waits = any(_waits_for_receiver(slot) for slot in after.assignments)
        in_the_way = any(
            holds(status, uid) or (asks_for_pods(round_, status) and goes_before(round_, snapshot.round))
            for round_, _, status in self._others(loop)
            for uid in loop.usable
        )
        return bool(new or moved or waits or in_the_way or after.stop_time is not None)

    # Each write.

    def recorded(self, before: PoCRound, after: PoCRound) -> None:
        """Check what stands in the API server."""
        super().recorded(before, after)
        old, new = before.status, after.status
        if old.state.finished:
            assert _work_of(new) == _work_of(old), "a round that is over has changed"
        if old.slots:
            assert (new.slots, new.groups) == (old.slots, old.groups)
            assert [key(slot) for slot in new.assignments] == [key(slot) for slot in old.assignments]
        given = Counter(slot.uid for slot in new.assignments if slot.state.active)
        assert not given or max(given.values()) == 1, "a pod has two slots"
        if after.spec.retry.policy is RetryPolicy.RESUME:
            for one, other in zip(old.assignments, new.assignments, strict=bool(old.slots)):
                assert other.next >= other.delivered >= one.delivered
            assert new.totals.delivered >= old.totals.delivered
        self._check_counts(after)

    def _check_counts(self, round_: PoCRound) -> None:
        """Nothing counts as delivered that the receiver does not have."""
        for slot in round_.status.assignments:
            received = self.received[round_.id, key(slot)]
            assert set(range(slot.delivered)) <= received, f"{round_.id} counts what was not delivered"
            assert slot.valid <= (len(received) if round_.spec.artifact else valid_below(max(received, default=-1) + 1))
        totals = round_.status.totals
        assert totals.delivered <= sum(len(found) for (uid, _), found in self.received.items() if uid == round_.id)

    # Each moment.

    def pass_time(self, seconds: float) -> None:
        """Let time pass, after which no pod may have computed for nobody for too long."""
        super().pass_time(seconds)
        self.check_orphans()

    def reap(self) -> None:
        """Stop what nobody needs, after which no pod that answers computes for a round that is over or gone."""
        super().reap()
        for pod in self.known_pods():
            round_ = self.store.rounds.get(pod.round_id or "")
            over = pod.round_id not in (None, FOREIGN) and (round_ is None or round_.status.state.finished)
            answers = pod.hears and pod.answers and pod.serves(self.seconds)
            assert not (over and answers), f"{pod.uid} computes {pod.round_id} on, which is over"

    def check_orphans(self) -> None:
        """No pod that knows leases computes on for longer than its own after it lost its slot."""
        for pod in self.pods.values():
            if not self._is_orphan(pod):
                pod.orphan_since = None
                continue
            pod.orphan_since = self.seconds if pod.orphan_since is None else pod.orphan_since
            age = self.seconds - pod.orphan_since
            assert age <= ORPHANED_SECONDS or not pod.knows_leases, f"{pod.uid} computes for nobody for {age} s"

    def _is_orphan(self, pod: NamespacePod) -> bool:
        if pod.round_id in (None, FOREIGN):
            return False
        round_ = self.store.rounds.get(pod.round_id or "")
        if round_ is None or round_.status.state.finished:
            return True
        slots = (slot for slot in round_.status.assignments if slot.state.active and slot.uid == pod.uid)
        return pod.slot not in {key(slot) for slot in slots}

    def check_pods(self) -> None:
        """No slot is computed by two pods. Only a start that nobody waits for any more may lead a pod astray."""
        computed = [(pod.round_id, pod.slot) for pod in self.pods.values() if not pod.astray and pod.slot is not None]
        twice = {slot for slot, count in Counter(computed).items() if count > 1 and slot[0] != FOREIGN}
        assert not twice, f"two pods compute {twice}"


def longest_without_progress(spec: RoundSpec) -> float:
    """Return the seconds after which a round is over in which nothing gets on."""
    silent = max(spec.stall.unreachable_seconds, spec.poll_failure_seconds, spec.stall.after_seconds)
    startup = max(spec.pod_startup_seconds, STARTUP_SECONDS)
    return silent + spec.start_deadline_seconds + startup + SLACK_SECONDS


def _computes_nothing(report: PodReport) -> bool:
    return report.status is not None and report.status.state is not PowState.GENERATING


def _moved(before: Assignment, after: Assignment) -> bool:
    """Whether the slot has got on, or was given to a pod, which its budget limits."""
    begun = after.state is SlotState.RUNNING and before.state is not SlotState.RUNNING
    return begun or after.delivered > before.delivered


def _waits_for_receiver(slot: Assignment) -> bool:
    """Whether the slot's pod has computed what it may, and delivers it."""
    at_end = slot.end is not None and slot.next >= slot.end
    return slot.state is SlotState.RUNNING and at_end and slot.delivered < slot.next


def _is_heard(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the slot's pod answers, or a request to it is on its way."""
    report = snapshot.reports.get(slot.uid or "", PodReport())
    return slot.state.active and (report.status is not None or report.in_flight)


def _work_of(status: RoundStatus) -> RoundStatus:
    """Return what does not change any more once a round is over; of its spec the newest version is observed."""
    seen = status.with_own_conditions(observed_generation=0)
    return status.model_copy(update={"observed_generation": 0, "conditions": seen})
