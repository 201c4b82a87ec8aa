# SPDX-License-Identifier: Apache-2.0
"""A gateway that comes back with less than it had acknowledged, as after a restore or the failover of its database.

The round ends all the same, and the gateway has as many results as the round asks for.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.status import State
from tests.unit.poc_operator.rounds.namespace_world import NamespaceWorld
from tests.unit.poc_operator.rounds.world import key

NONCES = 400
SLOTS = 2
#: Seconds within which the round must be over: it computes for about a minute, and waits a few times for what is lost.
MOST_SECONDS = 1_800
ROUND: dict[str, Any] = {
    "nodes": {"first": 0, "last": 0, "count": 1, "groups": SLOTS},
    "stop": {"afterNonces": NONCES},
    "startDeadlineSeconds": 300,
    "retry": {"policy": "Resume", "backoffLimitPerSlot": 1, "backoffLimit": 10},
}


class LossyWorld(NamespaceWorld):
    """A round of two pods that deliver to a gateway."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        for _ in range(SLOTS):
            self.add_pod(None)
        self.add_round(**ROUND, **spec)
        (self.uid,) = self.store.rounds

    def tick(self, nonces: int) -> None:
        """Let two seconds pass, orders arrive, and pods compute and deliver."""
        self.pass_time(2)
        for loop in list(self.operator.loops.values()):
            loop.finish_turn()
        for order in list(self.orders):
            self.arrive(order)
        for pod in self.pods.values():
            pod.compute(nonces)
            self.deliver(pod, pod.next)

    def lose(self, results: list[int]) -> None:
        """Let the gateway lose so many of the newest results of each slot."""
        for group, lost in enumerate(results):
            stored = self.received[self.uid, (0, group)]
            for index in sorted(stored)[len(stored) - min(lost, len(stored)) :]:
                stored.remove(index)

    def end(self, nonces: int) -> int:
        """Run until the round is over; return how many results the gateway has."""
        while not self.store.rounds[self.uid].status.state.finished:
            assert self.seconds < MOST_SECONDS, [
                (slot.state, slot.next, slot.delivered, slot.end, slot.error)
                for slot in self.store.rounds[self.uid].status.assignments
            ]
            self.tick(nonces)
        return sum(len(stored) for (uid, _), stored in self.received.items() if uid == self.uid)


@pytest.mark.parametrize("protocol", [{"artifact": {"kDim": 4}, "rTarget": None}, {}], ids=["artifact", "distance"])
@given(
    ticks=st.integers(2, 25),
    lost=st.lists(st.integers(0, 150), min_size=SLOTS, max_size=SLOTS),
    again=st.lists(st.integers(0, 20), min_size=SLOTS, max_size=SLOTS),
    restarts=st.booleans(),
    is_replaced=st.booleans(),
)
def test_a_round_makes_up_for_what_the_gateway_has_lost(
    protocol: dict[str, Any],
    ticks: int,
    lost: list[int],
    again: list[int],
    restarts: bool,
    is_replaced: bool,
) -> None:
    """One of the pods may restart and the operator be replaced in the same moment, and the gateway lose twice."""
    world = LossyWorld(protocol)
    for _ in range(ticks):
        world.tick(10)
    if world.store.rounds[world.uid].status.stop_time is not None:
        return
    world.lose(lost)
    if restarts:
        world.restart(world.pods["p1"])
        world.tell_of_pods()
    if is_replaced:
        world.replace_operator(0)
    for _ in range(5):
        world.tick(10)
    if world.store.rounds[world.uid].status.stop_time is not None:
        return
    world.lose(again)
    stored = world.end(20)
    found = world.store.rounds[world.uid].status
    assert found.state is State.COMPLETE, found.outcome
    if "artifact" in protocol:
        assert stored >= NONCES, [(key(slot), slot.delivered) for slot in found.assignments]
