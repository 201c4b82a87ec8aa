# SPDX-License-Identifier: Apache-2.0
"""Histories of a namespace, as far as pods do what they are told: several rounds whose selectors overlap, what users
do to them, writes that fail, and an operator that is killed between any two steps.

`namespace_checks` has what must hold in each moment. At the end of a history all goes well again: then every round
ends that somebody has not suspended, and no pod computes for nobody.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from tests.unit.poc_operator.build import LABELS
from tests.unit.poc_operator.rounds.namespace_checks import CheckedWorld, asks_for_pods, may_stop
from tests.unit.poc_operator.rounds.namespace_operator import RoundLoop
from tests.unit.poc_operator.rounds.namespace_pods import FOREIGN, GROUP, NamespacePod
from tests.unit.poc_operator.rounds.namespace_world import Order, Write
from tests.unit.poc_operator.rounds.world import SlotKey, key

#: What a pod computes: round and slot.
Work = tuple[str | None, SlotKey | None]

MOST_ROUNDS = 4
#: Turns after which every namespace is in order in which all goes well: more than a refusal counts.
MOST_TURNS = 40
#: Turns after which all rounds are over in which all goes well.
MOST_TURNS_TO_END = 120
#: Turns between two sweeps of the reaper.
REAPS = 6
GROUPS = st.sampled_from(["a", "b", None])
_selectors = [LABELS, LABELS, {GROUP: "a"}, {GROUP: "b"}]
SPECS = st.fixed_dictionaries(
    {
        "selector": st.sampled_from([{"matchLabels": labels} for labels in _selectors]),
        "nodes": st.sampled_from(
            [
                {"first": 0, "last": last, "count": last + 1, "groups": groups}
                for last in (0, 1)
                for groups in (1, 2, None)
            ]
        ),
        "blockHeight": st.integers(6, 8),
        "priority": st.integers(-1, 1),
        "concurrencyPolicy": st.sampled_from(["Wait", "Wait", "Replace", "Replace", "Fail"]),
        "stop": st.sampled_from([{"afterNonces": 40}, {"afterNonces": 200}, {"afterSeconds": 60}]),
        "startDeadlineSeconds": st.sampled_from([20, 100, 900]),
        "pollFailureSeconds": st.sampled_from([10, 60, 300]),
        "activeDeadlineSeconds": st.sampled_from([None, None, 60, 600]),
        "stopDeadlineSeconds": st.sampled_from([20, 300]),
        "podStartupSeconds": st.sampled_from([30, 300]),
        "ttlSecondsAfterFinished": st.sampled_from([None, None, 0, 60]),
        "retry": st.fixed_dictionaries(
            {
                "policy": st.sampled_from(["Resume", "Resume", "Restart", "Never"]),
                "backoffLimitPerSlot": st.integers(0, 2),
                "backoffLimit": st.integers(0, 4),
            }
        ),
        "stall": st.fixed_dictionaries(
            {
                "afterSeconds": st.sampled_from([10, 120]),
                "unreachableSeconds": st.sampled_from([10, 300]),
                "action": st.sampled_from(["Retry", "DeletePod"]),
            }
        ),
        "artifact": st.sampled_from([None, {"kDim": 4}]),
    }
)


class Histories(RuleBasedStateMachine):
    """What the operator and its users do."""

    @staticmethod
    def spec(drawn: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a round's spec."""
        return drawn if drawn["artifact"] is None else {**drawn, "rTarget": None}

    def __init__(self) -> None:
        super().__init__()
        self.world = CheckedWorld()

    @initialize(
        gateway=st.booleans(),
        pods=st.lists(GROUPS, min_size=1, max_size=4),
        specs=st.lists(SPECS, min_size=1, max_size=3),
    )
    def there_are_pods_and_rounds(self, gateway: bool, pods: list[str | None], specs: list[dict[str, Any]]) -> None:
        self.world.has_gateway = gateway
        for group in pods:
            self.world.add_pod(group)
        for spec in specs:
            self.world.add_round(**self.spec(spec))

    # What the operator does.

    def _loop(self, data: st.DataObject) -> RoundLoop:
        return self.world.operator.loops[data.draw(st.sampled_from(sorted(self.world.operator.loops)))]

    def _turns(self, seconds: float, *, backwards: bool = False, nonces: int = 0) -> None:
        """Let every loop take a turn, and every order arrive."""
        self.world.pass_time(seconds)
        for uid in sorted(self.world.operator.loops, reverse=backwards):
            if (loop := self.world.operator.loops.get(uid)) is not None:
                loop.finish_turn()
        for order in list(self.world.orders):
            if self.world.awaits(order):
                self.world.arrive(order)
        for pod in self.world.pods.values():
            pod.compute(nonces)
            self.world.deliver(pod, pod.next)

    @rule(data=st.data(), steps=st.integers(1, 4))
    @precondition(lambda self: self.world.operator.loops)
    def loop_takes_steps(self, data: st.DataObject, steps: int) -> None:
        loop = self._loop(data)
        for _ in range(steps):
            if not loop.advance():
                break

    @rule(
        ticks=st.sampled_from([1, 2, 4]),
        seconds=st.sampled_from([2, 5, 40]),
        backwards=st.booleans(),
        nonces=st.sampled_from([0, 15]),
    )
    def time_passes(self, ticks: int, seconds: int, backwards: bool, nonces: int) -> None:
        """As on a good day."""
        for _ in range(ticks):
            self._turns(seconds, backwards=backwards, nonces=nonces)

    @rule(seconds=st.sampled_from([3, 35, 150, 700]))
    def nobody_looks(self, seconds: int) -> None:
        self.world.pass_time(seconds)

    @rule(skew=st.sampled_from([-20, 0, 20]))
    def operator_is_killed(self, skew: int) -> None:
        """Another one begins, on another machine: its clock is another one too."""
        self.world.replace_operator(skew)

    @rule()
    def reaper_looks(self) -> None:
        self.world.reap()

    def _order(self, data: st.DataObject) -> Order:
        return self.world.orders[data.draw(st.integers(0, len(self.world.orders) - 1))]

    @rule(data=st.data(), answered=st.booleans())
    @precondition(lambda self: self.world.orders)
    def order_arrives(self, data: st.DataObject, answered: bool) -> None:
        self.world.arrive(self._order(data), answered=answered)

    @rule(data=st.data())
    @precondition(lambda self: self.world.orders)
    def order_times_out(self, data: st.DataObject) -> None:
        """Or its connection breaks, and it is lost."""
        order = self._order(data)
        if self.world.awaits(order):
            self.world.give_up(order)
        else:
            self.world.orders.remove(order)

    @rule(write=st.sampled_from(Write))
    def next_write_fails(self, write: Write) -> None:
        self.world.store.next_write = write

    @rule(lags=st.booleans())
    def watch_lags_or_not(self, lags: bool) -> None:
        self.world.watch_lags = lags
        self.world.tell_of_pods()

    @rule(seconds=st.sampled_from([0, 15]))
    def polls_come_late_or_not(self, seconds: int) -> None:
        self.world.late_seconds = seconds

    @rule(answers=st.booleans())
    def gateway_answers_or_not(self, answers: bool) -> None:
        self.world.gateway_answers = answers

    # What users do.

    def _round(self, data: st.DataObject) -> PoCRound:
        return self.world.store.rounds[data.draw(st.sampled_from(sorted(self.world.store.rounds)))]

    @rule(spec=SPECS)
    @precondition(lambda self: len(self.world.store.rounds) < MOST_ROUNDS)
    def round_is_created(self, spec: dict[str, Any]) -> None:
        self.world.add_round(**self.spec(spec))

    @rule(
        data=st.data(),
        change=st.sampled_from(
            [{"suspend": True}, {"suspend": False}, {"finish": True}, {"priority": 2}, {"active_deadline_seconds": 30}]
        ),
    )
    @precondition(lambda self: self.world.store.rounds)
    def user_changes_a_round(self, data: st.DataObject, change: dict[str, Any]) -> None:
        self.world.change(self._round(data).id, **change)

    @rule(data=st.data(), by_force=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.world.store.rounds)
    def user_deletes_a_round(self, data: st.DataObject, by_force: bool) -> None:
        """By force: its finalizer is taken off too."""
        uid = self._round(data).id
        self.world.delete(uid)
        if by_force:
            self.world.release(uid)

    def _pod(self, data: st.DataObject) -> NamespacePod:
        return self.world.pods[data.draw(st.sampled_from(sorted(self.world.pods)))]

    @rule(
        data=st.data(), nonces=st.integers(1, 20), lag=st.integers(0, 15), answered=st.sampled_from([True, True, False])
    )
    @precondition(lambda self: self.world.pods)
    def pod_computes(self, data: st.DataObject, nonces: int, lag: int, answered: bool) -> None:
        """Not all may be delivered yet, and the answer to a delivery may be lost."""
        pod = self._pod(data)
        pod.compute(nonces)
        delivered = pod.delivered
        self.world.deliver(pod, max(pod.delivered, pod.next - lag))
        pod.delivered = pod.delivered if answered else delivered

    # All goes well again.

    def _heal(self) -> None:
        world = self.world
        world.orders.clear()
        world.gateway_answers, world.watch_lags, world.store.next_write = True, False, Write.DONE
        for loop in world.operator.loops.values():
            loop.in_flight.clear()
            loop.known = None
        for pod in list(world.pods.values()):
            pod.heal(world.seconds)
            world.stop(pod, FOREIGN)
            if pod.terminating:
                world.remove_pod(pod)
        world.tell_of_pods()

    @rule()
    def all_goes_well_again(self) -> None:
        """Rounds get where they should be, and what nobody needs is stopped."""
        self._heal()
        for turn in range(MOST_TURNS):
            self._turns(5, nonces=1)
            if turn % REAPS == 0:
                self.world.reap()
            amiss = self._amiss()
            if amiss is None:
                break
        assert amiss is None
        for pod in self.world.known_pods():
            pod.astray = False

    def _amiss(self) -> str | None:
        """Say which pod computes what the record does not say, or is idle while a round waits that may have it."""
        rounds, known = self.world.store.rounds, {pod.uid for pod in self.world.known_pods()}
        running = {slot.uid: (uid, key(slot)) for uid, found in rounds.items() for slot in _running(found)}
        computed = {pod.uid: (pod.round_id, pod.slot) for pod in self.world.pods.values() if pod.slot is not None}
        lost = {uid: work for uid, work in computed.items() if uid not in known}  # nobody looks at them
        if {uid: work for uid, work in computed.items() if uid in known} != running:
            return f"pods compute {computed}, and the record has {running}; nobody knows of {lost}"
        waiting = [found for found in rounds.values() if _waits(found)]
        return next((why for found in waiting if (why := self._kept_from(found, computed)) is not None), None)

    def _kept_from(self, waiting: PoCRound, computed: Mapping[str, Work]) -> str | None:
        """Say which pod a round may have that waits for one."""
        selected = [uid for uid, pod in self.world.pods.items() if waiting.spec.pods.matches(pod.labels)]
        holders = {uid: self.world.store.rounds.get(str(computed[uid][0])) for uid in selected if uid in computed}
        idle = [uid for uid in selected if uid not in computed]
        to_take = [uid for uid, holder in holders.items() if holder is not None and may_stop(waiting, holder)]
        refusals = self.world.operator.loops[waiting.id].refusals
        to_take = [uid for uid in to_take if computed[uid][0] != waiting.id and not refusals.spares(uid)]
        return f"round {waiting.id} waits and may have {idle + to_take}" if idle or to_take else None

    @rule()
    def all_rounds_come_to_their_end(self) -> None:
        """Where all goes well no round starves, and in the end no pod computes for nobody."""
        self._heal()
        for turn in range(MOST_TURNS_TO_END):
            self._turns(5, nonces=60)
            if turn % REAPS == 0:
                self.world.reap()
            left = self._unfinished() + [pod.uid for pod in self.world.known_pods() if pod.slot is not None]
            if not left:
                break
        assert left == []

    def _unfinished(self) -> list[str]:
        return [
            uid
            for uid, round_ in self.world.store.rounds.items()
            if not (round_.status.state.finished or round_.spec.suspend)
            if any(round_.spec.pods.matches(pod.labels) for pod in self.world.pods.values())
        ]

    @invariant()
    def no_slot_is_computed_twice(self) -> None:
        self.world.check_pods()


def _running(round_: PoCRound) -> list[Assignment]:
    return [slot for slot in round_.status.assignments if slot.state is SlotState.RUNNING]


def _waits(round_: PoCRound) -> bool:
    """Whether a round waits for pods."""
    slots = round_.status.assignments
    wants = not slots or any(slot.state is SlotState.WAITING for slot in slots)
    return wants and asks_for_pods(round_, round_.status)
