# SPDX-License-Identifier: Apache-2.0
"""Random histories of pods, receivers and operators against ``plan()``: whatever happens, in whatever
order, these hold. hypothesis prints the shortest history that breaks one.

What the plan cannot know excuses two pods on one slot, and only these two things do: a start whose
sender died or gave up and that arrives afterwards, and a pod that computes on although it has not
answered for so long that its slot was settled. Both pods must be down to one once all is heard again.
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
from tests.unit.poc_operator.rounds.world import PodAction, SimPod, SlotKey, World, key, slot_of, valid_below
from vllm_poc.wire.answers import PowState

MOST_PODS = 4


class Histories(RuleBasedStateMachine):
    """What may happen, and what must hold after each of it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.unknowable: set[SlotKey] = set()

    @initialize(pods=st.integers(1, 3))
    def pods_exist(self, pods: int) -> None:
        for _ in range(pods):
            self.world.add_pod()

    # What the operator does.

    @rule(dies=st.booleans(), seconds=st.sampled_from([0, 2, 100]))
    def reconcile(self, dies: bool, seconds: int) -> None:
        self.world.seconds += seconds
        before = self.world.round.status
        waited_for = dict(self.world.in_flight)
        snapshot, step = self.world.reconcile(dies_before_acting=dies)
        self._check_record(before, step.status)
        assert Reason.REPORT_CONTRADICTORY not in {event.reason for event in step.events}
        for start in (action for action in step.actions if isinstance(action, StartPod)):
            self._check_start(snapshot, step, start, waited_for)
        self._note_settled_in_silence(step.status)

    @rule(ticks=st.integers(1, 3), seconds=st.sampled_from([2, 100]))
    def time_passes(self, ticks: int, seconds: int) -> None:
        """As on a good day: whoever answers polls gets his orders, too."""
        for _ in range(ticks):
            self.reconcile(dies=False, seconds=seconds)
            for name in list(self.world.in_flight):
                if name not in self.world.pods or self.world.pods[name].answers:
                    self.world.land(name)
                else:
                    self._give_up(name)

    @rule(answered=st.booleans(), data=st.data())
    @precondition(lambda self: self.world.in_flight)
    def request_arrives(self, answered: bool, data: st.DataObject) -> None:
        self.world.land(data.draw(st.sampled_from(sorted(self.world.in_flight))), answered=answered)

    @rule(data=st.data())
    @precondition(lambda self: self.world.in_flight)
    def request_times_out(self, data: st.DataObject) -> None:
        self._give_up(data.draw(st.sampled_from(sorted(self.world.in_flight))))

    def _give_up(self, name: str) -> None:
        action = self.world.in_flight.pop(name)
        if isinstance(action, StartPod):
            self.world.abandoned.append(action)

    @rule()
    def operator_is_replaced(self) -> None:
        self.world.replace_operator()

    @rule(late=st.booleans())
    @precondition(lambda self: self.world.abandoned)
    def abandoned_start_arrives(self, late: bool) -> None:
        start = self.world.abandoned.pop(0)
        pod = self.world.pods.get(start.pod.uid)
        if pod is None or not late:
            return
        if pod.start(start.request) is not None:
            self.unknowable.add(slot_of(start))

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

    @rule()
    @precondition(lambda self: len(self.world.pods) < MOST_PODS)
    def pod_appears(self) -> None:
        self.world.add_pod()

    @rule(data=st.data(), answers=st.booleans(), seconds=st.sampled_from([0, 1000]))
    @precondition(lambda self: self.world.pods)
    def pod_answers_or_not(self, data: st.DataObject, answers: bool, seconds: int) -> None:
        pod = self._a_pod(data)
        pod.answers, pod.silent_seconds = answers, 0.0 if answers else float(seconds)

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
            pod.answers, pod.silent_seconds, pod.stalled_seconds = True, 0.0, 0.0
        for _ in range(10):
            self.reconcile(dies=False, seconds=2)
            for name in list(self.world.in_flight):
                self.world.land(name)
        self.unknowable.clear()
        status = self.world.round.status
        running = {slot.uid: key(slot) for slot in status.assignments if slot.state is SlotState.RUNNING}
        assert {name: pod.slot for name, pod in self.world.pods.items() if pod.slot is not None} == running
        if not (status.state.finished or self.world.round.spec.suspend):
            assert len(running) == min(len(status.assignments), len(self.world.pods))

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
                assert snapshot.reports[name].status is None or pod.slot != wanted
                other = waited_for.get(name)
                assert not isinstance(other, StartPod) or slot_of(other) != wanted

    def _note_settled_in_silence(self, status: RoundStatus) -> None:
        bound = {slot.uid: key(slot) for slot in status.assignments if slot.state.active}
        for name, pod in self.world.pods.items():
            if pod.slot is not None and not pod.answers and bound.get(name) != pod.slot:
                self.unknowable.add(pod.slot)

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
TestHistories.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
