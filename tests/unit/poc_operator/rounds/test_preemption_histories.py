# SPDX-License-Identifier: Apache-2.0
"""Random histories in which rounds take pods from each other and no pod is at fault: no round is charged for that.

The round that takes a pod may be deleted, suspended or over before the other one looks, or that one be raised above it;
pods may refuse it; the operator may be killed meanwhile.
"""

from enum import Enum, auto
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from poc_operator.apis.v1alpha1.status import SlotState
from tests.unit.poc_operator.build import HISTORIES
from tests.unit.poc_operator.rounds.namespace_histories import MOST_ROUNDS, SPECS, Histories

#: Nothing but a pod's fault may end a round, or cost it a retry.
_PATIENT = {
    "stall": {"afterSeconds": 86_400, "unreachableSeconds": 86_400},
    "startDeadlineSeconds": 86_400,
    "pollFailureSeconds": 86_400,
    "activeDeadlineSeconds": None,
}


class Fate(Enum):
    """What becomes of a round that takes pods."""

    DELETED = auto()
    SUSPENDED = auto()
    FINISHED = auto()
    OVERTAKEN = auto()
    FORGOTTEN = auto()


class PreemptionHistories(Histories):
    """What happens where all pods are well, and may refuse work."""

    @staticmethod
    def spec(drawn: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a round's spec, without a retry where one is allowed at all."""
        never = drawn["retry"]["policy"] == "Never"
        policy = "Resume" if never else drawn["retry"]["policy"]
        retry = {"policy": policy, "backoffLimitPerSlot": 0, "backoffLimit": 0}
        return {**Histories.spec(drawn), **_PATIENT, "retry": retry}

    @rule(data=st.data(), refuses=st.booleans())
    @precondition(lambda self: self.world.pods)
    def pod_refuses_or_not(self, data: st.DataObject, refuses: bool) -> None:
        self._pod(data).refuses = refuses

    @rule(spec=SPECS, steps=st.integers(0, 2), fate=st.sampled_from(Fate), late=st.booleans(), refused=st.booleans())
    @precondition(lambda self: len(self.world.store.rounds) < MOST_ROUNDS)
    def a_round_comes_and_goes(self, spec: dict[str, Any], steps: int, fate: Fate, late: bool, refused: bool) -> None:
        """It takes what it may, as far as it gets, and has met its fate before the others look."""
        for _ in range(3):
            self._turns(2, nonces=1)
        world, before = self.world, sorted(self.world.store.rounds)
        world.add_round(**self.spec({**spec, "concurrencyPolicy": "Replace", "priority": 1}))
        taker = next(uid for uid in world.store.rounds if uid not in before)
        for pod in world.pods.values():
            pod.refuses = refused
        for _ in range(steps):
            self._acts(taker)
        if late:  # orders are on their way
            world.operator.loops[taker].finish_turn()
        self._meet(taker, before, fate)
        self._acts(taker)
        for uid in before:
            self._acts(uid)

    def _acts(self, uid: str) -> None:
        """Let a round take a turn, and its orders arrive."""
        self.world.pass_time(1)
        if (loop := self.world.operator.loops.get(uid)) is None:
            return
        loop.finish_turn()
        for order in list(self.world.orders):
            if order.loop.uid == uid:
                self.world.arrive(order)

    def _meet(self, taker: str, before: list[str], fate: Fate) -> None:
        match fate:
            case Fate.DELETED:
                self.world.delete(taker)
            case Fate.SUSPENDED:
                self.world.change(taker, suspend=True)
            case Fate.FINISHED:
                self.world.change(taker, finish=True)
            case Fate.OVERTAKEN:
                for uid in before:
                    self.world.change(uid, priority=2)
            case Fate.FORGOTTEN:
                self.world.delete(taker)
                self.world.release(taker)
                self.world.replace_operator(0)

    @invariant()
    def nobody_is_charged(self) -> None:
        for uid, round_ in self.world.store.rounds.items():
            for slot in round_.status.assignments:
                assert slot.state is not SlotState.FAILED, f"{uid}: {slot.error}"
                assert max(slot.attempts, 1) - slot.disruptions <= 1, f"{uid} is charged: {slot.error}"


TestPreemptionHistories = PreemptionHistories.TestCase
TestPreemptionHistories.settings = settings(max_examples=HISTORIES, stateful_step_count=20, deadline=None)
