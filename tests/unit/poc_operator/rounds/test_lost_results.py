# SPDX-License-Identifier: Apache-2.0
"""A gateway that comes back with less than it had acknowledged, as after a restore or the failover of its database.

The round ends all the same, and the gateway has as many results as the round asks for.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.status import State
from poc_operator.rounds.counters import is_doubted
from tests.unit.poc_operator.rounds.namespace_world import NamespaceWorld

NONCES = 400
SLOTS = 2
#: Seconds within which the round must be over: it computes for about a minute, and waits a few times for what is lost.
MOST_SECONDS = 1_800
#: What pods may deliver beyond that: what was dealt before the loss, and once more after it.
MOST_OVERSHOOT = 400
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


PROTOCOLS: dict[str, dict[str, Any]] = {"artifact": {"artifact": {"kDim": 4}, "rTarget": None}, "distance": {}}
_lost = st.lists(st.integers(0, 200), min_size=SLOTS, max_size=SLOTS)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(ticks=st.integers(2, 25), lost=_lost, again=_lost, restarts=st.booleans(), nonces=st.sampled_from([5, 20]))
def test_a_round_makes_up_for_what_the_gateway_has_lost(
    protocol: str, ticks: int, lost: list[int], again: list[int], restarts: bool, nonces: int
) -> None:
    """A pod may restart in the same moment, and the gateway lose twice."""
    world = LossyWorld(PROTOCOLS[protocol])
    for results in (lost, again):
        for _ in range(ticks):
            world.tick(nonces)
        if world.store.rounds[world.uid].status.stop_time is not None:
            return  # it had all by then
        world.lose(results)
        if restarts:
            world.restart(world.pods["p1"])
            world.tell_of_pods()
    stored = world.end(nonces)
    found = world.store.rounds[world.uid].status
    assert found.state is State.COMPLETE, found.outcome
    charged = sum(max(1, slot.attempts) - slot.disruptions - 1 for slot in found.assignments)
    assert charged <= 2 * restarts + SLOTS, "once for each pod whose word was not that of the gateway"
    if protocol == "artifact":
        assert NONCES <= stored <= NONCES + MOST_OVERSHOOT
        assert found.totals.delivered <= stored, "no more is counted than there is"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_is_blamed_for_what_a_restored_gateway_has_lost(protocol: str) -> None:
    """It had told of more, so that it is known to have lost some."""
    world = LossyWorld(PROTOCOLS[protocol])
    for _ in range(10):
        world.tick(5)
    world.lose([30, 200])
    for _ in range(20):
        world.tick(5)
        slots = world.store.rounds[world.uid].status.assignments
        assert not any(is_doubted(slot) for slot in slots)
    assert [slot.attempts - slot.disruptions for slot in slots] == [1, 1], "no retry"
    assert world.end(20) >= (NONCES if protocol == "artifact" else 1)


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(ticks=st.integers(2, 25), lost=_lost, restarts=st.booleans())
def test_so_does_one_whose_operator_was_replaced_meanwhile(
    protocol: str, ticks: int, lost: list[int], restarts: bool
) -> None:
    """What the gateway had told, its process does not know. What was counted before counts."""
    world = LossyWorld(PROTOCOLS[protocol])
    for _ in range(ticks):
        world.tick(10)
    world.lose(lost)
    world.replace_operator(0)
    if restarts:
        world.restart(world.pods["p1"])
        world.tell_of_pods()
    world.end(20)
    assert world.store.rounds[world.uid].status.state is State.COMPLETE
