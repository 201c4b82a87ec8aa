# SPDX-License-Identifier: Apache-2.0
"""Random histories of pods, receivers and operators against ``plan()``: whatever happens, in whatever
order, these hold. hypothesis prints the shortest history that breaks one.

What the plan cannot know excuses two pods on one slot, and only one thing does: a start whose sender died
or gave up and that arrives afterwards. Pods must be down to one once all is heard again. A pod that is
being deleted, is not selected any more, or cannot be reached, computes on: its slot is its own until it
has stopped or its lease has run out.

`make histories` runs 10 000 of them, and as many of each kind in the other modules that take HISTORIES.
"""

from collections import Counter
from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.planning.snapshot import StartPod
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from tests.unit.poc_operator.build import HISTORIES
from tests.unit.poc_operator.rounds.world import PodAction, SimPod, SlotKey, World, key, slot_of, valid_below
from vllm_poc.wire.answers import PowState

MOST_PODS = 4
#: Seconds between two turns. A lease runs out in the longest.
TIMES = st.sampled_from([0, 2, 100, 900])


class Histories(RuleBasedStateMachine):
    """What may happen, and what must hold after each of it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.unknowable: set[SlotKey] = set()
        self.stray: set[str] = set()  # pods that nobody looks at, and that a late start has reached

    @initialize(pods=st.integers(1, 4), spares=st.integers(0, 2))
    def pods_exist(self, pods: int, spares: int) -> None:
        """Those that come after the slots are fixed take what others lose."""
        for _ in range(pods):
            self.world.add_pod()
        if spares:
            self.time_passes(ticks=3, seconds=2)
        for _ in range(spares):
            self.world.add_pod()

    # What the operator does.

    @rule(dies=st.booleans(), writes=st.sampled_from([True, True, True, False]), seconds=TIMES)
    def reconcile(self, dies: bool, seconds: int, writes: bool = True) -> None:
        self.world.pass_time(seconds)
        before = self.world.round.status
        waited_for = dict(self.world.in_flight)
        snapshot, step = self.world.reconcile(dies_before_acting=dies, writes=writes)
        self._check_record(before, step.status)
        assert Reason.REPORT_CONTRADICTORY not in {event.reason for event in step.events}
        for start in (action for action in step.actions if isinstance(action, StartPod)):
            self._check_start(snapshot, step, start, waited_for)

    @rule(ticks=st.sampled_from([1, 2, 3, 12]), seconds=st.sampled_from([2, 100]))
    def time_passes(self, ticks: int, seconds: int) -> None:
        """As on a good day: whoever answers polls gets his orders, too."""
        for _ in range(ticks):
            self.reconcile(dies=False, seconds=seconds)
            for name in list(self.world.in_flight):
                pod = self.world.pods.get(name)
                if pod is None or pod.hears:
                    self.world.land(name, answered=pod is None or pod.answers)
                else:
                    self.world.give_up(name)

    @rule(answered=st.booleans(), data=st.data())
    @precondition(lambda self: self.world.in_flight)
    def request_arrives(self, answered: bool, data: st.DataObject) -> None:
        self.world.land(data.draw(st.sampled_from(sorted(self.world.in_flight))), answered=answered)

    @rule(data=st.data())
    @precondition(lambda self: self.world.in_flight)
    def request_times_out(self, data: st.DataObject) -> None:
        self.world.give_up(data.draw(st.sampled_from(sorted(self.world.in_flight))))

    @rule(skew=st.sampled_from([-20, 0, 20]))
    def operator_is_replaced(self, skew: int) -> None:
        """Another one, on another machine: its clock is another one too."""
        self.world.replace_operator()
        self.world.skew = skew

    @rule(late=st.booleans())
    @precondition(lambda self: self.world.abandoned)
    def abandoned_start_arrives(self, late: bool) -> None:
        start = self.world.abandoned.pop(0)
        pod = self.world.pods.get(start.pod.uid)
        if pod is None or not late:
            return
        if pod.start(start.request, self.world.seconds) is not None:
            self.unknowable.add(slot_of(start))
            self.stray.add(pod.name)

    # What pods and people do.

    def _a_pod(self, data: st.DataObject) -> SimPod:
        return self.world.pods[data.draw(st.sampled_from(sorted(self.world.pods)))]

    @rule(data=st.data(), nonces=st.integers(1, 20), lag=st.integers(0, 15))
    @precondition(lambda self: self.world.pods)
    def pod_computes(self, data: st.DataObject, nonces: int, lag: int) -> None:
        pod = self._a_pod(data)
        if pod.slot is not None:
            pod.next, pod.stalled_seconds = pod.next + nonces, 0.0
            self.world.deliver(pod, max(pod.delivered, pod.next - lag))

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_restarts(self, data: st.DataObject) -> None:
        self._a_pod(data).restart()

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_fails(self, data: st.DataObject) -> None:
        pod = self._a_pod(data)
        if pod.slot is not None:
            pod.state = PowState.FAILED

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_vanishes(self, data: st.DataObject) -> None:
        del self.world.pods[self._a_pod(data).name]

    @rule(knows_leases=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: len(self.world.pods) < MOST_PODS)
    def pod_appears(self, knows_leases: bool) -> None:
        self.world.add_pod(knows_leases=knows_leases)

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_is_deleted(self, data: st.DataObject) -> None:
        """It computes on until it ends: for its grace period, or for ever on a Kubernetes node that is cut off."""
        self._a_pod(data).terminating = True

    @rule(data=st.data(), hears=st.booleans(), ticks=st.sampled_from([0, 2, 12]))
    @precondition(lambda self: self.world.pods)
    def kubernetes_node_is_cut_off(self, data: st.DataObject, hears: bool, ticks: int) -> None:
        """Its pod is deleted, which nobody there learns of, and computes on."""
        pod = self._a_pod(data)
        pod.hears, pod.answers, pod.terminating, pod.silent_seconds = hears, False, True, 1000.0
        self.time_passes(ticks=ticks, seconds=100)

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_is_relabelled(self, data: st.DataObject) -> None:
        pod = self._a_pod(data)
        pod.selected = not pod.selected

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def selector_changes(self, data: st.DataObject) -> None:
        for pod in self.world.pods.values():
            pod.selected = data.draw(st.booleans())

    @rule(data=st.data(), hears=st.booleans(), answers=st.booleans(), seconds=st.sampled_from([0, 1000]))
    @precondition(lambda self: self.world.pods)
    def pod_can_be_reached_or_not(self, data: st.DataObject, hears: bool, answers: bool, seconds: int) -> None:
        """It may compute all the same, and deliver; and what it is asked may reach it although no answer comes back."""
        pod = self._a_pod(data)
        pod.hears, pod.answers, pod.silent_seconds = hears, answers, 0.0 if hears and answers else float(seconds)

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_hangs(self, data: st.DataObject) -> None:
        pod = self._a_pod(data)
        if pod.slot is not None:
            pod.stalled_seconds = 1000.0

    @rule(suspend=st.booleans())
    def user_suspends_or_resumes(self, suspend: bool) -> None:
        spec = self.world.round.spec.model_copy(update={"suspend": suspend})
        self.world.round = self.world.round.model_copy(update={"spec": spec})

    @rule()
    def all_is_heard_again(self) -> None:
        """Everything arrives and answers: the round gets where it should be, and orphans are stopped."""
        self.world.abandoned.clear()
        self.world.gateway_answers = True
        for pod in self.world.pods.values():
            pod.hears, pod.answers, pod.silent_seconds, pod.stalled_seconds = True, True, 0.0, 0.0
        for _ in range(10):  # longer than the clocks of two operators differ
            self.reconcile(dies=False, seconds=5)
            for name in list(self.world.in_flight):
                self.world.land(name)
        self.world.reap()
        self.unknowable.clear()
        status = self.world.round.status
        running = {slot.uid: key(slot) for slot in status.assignments if slot.state is SlotState.RUNNING}
        computed = {name: pod.slot for name, pod in self.world.pods.items() if pod.slot is not None}
        # Nobody looks at a pod that is not selected and has no slot.
        lost = {name for name in computed if not self.world.pods[name].selected} & self.stray
        self.unknowable |= {slot for name, slot in computed.items() if name in lost}
        assert {name: slot for name, slot in computed.items() if name not in lost} == running
        if not (status.state.finished or self.world.round.spec.suspend):
            usable = [pod for pod in self.world.pods.values() if pod.selected and not pod.terminating]
            assert len(running) == min(len(status.assignments), len(usable))

    # What must hold.

    def _check_record(self, before: RoundStatus, after: RoundStatus) -> None:
        if before.state.finished:
            assert after == before
        if before.slots:
            assert (after.slots, after.groups) == (before.slots, before.groups)
            assert [key(slot) for slot in after.assignments] == [key(slot) for slot in before.assignments]
        for old, new in zip(before.assignments, after.assignments, strict=bool(before.slots)):
            assert new.delivered >= old.delivered
            assert new.next >= old.delivered
        assert after.totals.delivered >= before.totals.delivered
        assert after.totals.checked >= before.totals.delivered

    def _check_start(
        self, snapshot: RoundSnapshot, step: RoundStep, start: StartPod, waited_for: Mapping[str, PodAction]
    ) -> None:
        """A start is recorded first, can be repeated, and no other pod is known to compute its slot."""
        wanted = slot_of(start)
        assert start.request.round_id == self.world.round.id
        recorded = next(slot for slot in step.status.assignments if key(slot) == wanted)
        assert (recorded.uid, recorded.start) == (start.pod.uid, start.request.start_index)
        for name, pod in self.world.pods.items():
            if name != start.pod.uid:
                report = snapshot.reports.get(name)
                assert report is None or report.status is None or pod.slot != wanted
                other = waited_for.get(name)
                assert not isinstance(other, StartPod) or slot_of(other) != wanted

    @invariant()
    def no_two_pods_compute_one_slot(self) -> None:
        computed = Counter(pod.slot for pod in self.world.pods.values() if pod.slot is not None)
        assert {slot for slot, pods in computed.items() if pods > 1} <= self.unknowable

    @invariant()
    def what_counts_as_delivered_was_delivered(self) -> None:
        for slot in self.world.round.status.assignments:
            assert set(range(slot.delivered)) <= self.world.received[key(slot)]
            assert slot.valid == valid_below(slot.delivered)
            assert slot.delivered <= slot.next


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=HISTORIES, stateful_step_count=50, deadline=None)
