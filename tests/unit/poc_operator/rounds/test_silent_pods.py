# SPDX-License-Identifier: Apache-2.0
"""Pods that fall silent and compute on: their slots move, their rounds end and their work is stopped in time.

Everything else goes well here. `test_namespace_histories` has such pods among all that may happen.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from tests.unit.poc_operator.build import HISTORIES
from tests.unit.poc_operator.rounds.namespace_checks import CheckedWorld
from tests.unit.poc_operator.rounds.namespace_operator import LEASE_SECONDS
from tests.unit.poc_operator.rounds.namespace_pods import NamespacePod

ONE_SLOT: dict[str, Any] = {"first": 0, "last": 0, "count": 1, "groups": 1}
TURN = 5
#: By how much an operator's clock may be off, and a poll be late: at most 60 s apart, all together.
SKEWS, DELAYS = st.sampled_from([-20, 0, 20]), st.sampled_from([0, 10, 20])


def turn(world: CheckedWorld, *, nonces: int = 5) -> None:
    """Let time pass, every loop take a turn, every order arrive, and every pod compute."""
    world.pass_time(TURN)
    for loop in list(world.operator.loops.values()):
        loop.finish_turn()
    for order in list(world.orders):
        if world.awaits(order):
            world.arrive(order)
    for pod in world.pods.values():
        pod.compute(nonces)
        world.deliver(pod, pod.next)
    world.check_pods()


def turns_until(world: CheckedWorld, happened: Callable[[], bool], seconds: float) -> None:
    """Take turns until something has happened, which it must within so many seconds."""
    began = world.seconds
    while not happened():
        assert world.seconds - began <= seconds
        turn(world)


def a_world(pods: int = 2, **spec: Any) -> tuple[CheckedWorld, str]:  # noqa: ANN401 - fields of the spec
    """A world with a round that runs, and its uid."""
    world = CheckedWorld()
    for _ in range(pods):
        world.add_pod(None)
    world.add_round(**{"nodes": ONE_SLOT, "stop": None, "stall": {"unreachableSeconds": 10}, **spec})
    (uid,) = world.store.rounds
    turns_until(world, lambda: slot_state(world, uid) is SlotState.RUNNING, 30)
    return world, uid


def round_of(world: CheckedWorld, uid: str) -> PoCRound:
    """The round as it is stored."""
    return world.store.rounds[uid]


def slot_state(world: CheckedWorld, uid: str) -> SlotState | None:
    """The state of the round's only slot."""
    return next((slot.state for slot in round_of(world, uid).status.assignments), None)


def holder(world: CheckedWorld, uid: str) -> NamespacePod:
    """The pod that has the round's only slot."""
    (slot,) = round_of(world, uid).status.assignments
    return world.pods[slot.uid or ""]


def fall_silent(pod: NamespacePod) -> None:
    """Compute on, out of reach."""
    pod.hears = pod.answers = False


@settings(max_examples=HISTORIES // 5)
@given(before=SKEWS, after=SKEWS, late=DELAYS, turns=st.integers(0, 12))
def test_a_silent_pod_has_stopped_before_its_slot_moves(before: int, after: int, late: int, turns: int) -> None:
    """Another operator waits for the lease to end, by its own clock, and the pod's last poll came late."""
    world, uid = a_world()
    world.replace_operator(before)
    world.late_seconds = late
    for _ in range(turns):
        turn(world)
    silent = holder(world, uid)
    fall_silent(silent)
    turns_until(world, lambda: slot_state(world, uid) is SlotState.STALLED, 30)
    world.replace_operator(after)
    turns_until(world, lambda: holder(world, uid) is not silent, 2 * LEASE_SECONDS + 120)
    turns_until(world, lambda: slot_state(world, uid) is SlotState.RUNNING, 30)


@given(gateway=st.booleans(), deadline=st.sampled_from([300, 3600]), skew=SKEWS)
def test_a_round_ends_without_its_silent_pod(gateway: bool, deadline: int, skew: int) -> None:
    """Long before `spec.stopDeadlineSeconds`, which is for pods that answer."""
    world, uid = a_world(stopDeadlineSeconds=deadline)
    world.has_gateway = gateway
    fall_silent(holder(world, uid))
    world.replace_operator(skew)
    world.change(uid, finish=True)
    turns_until(world, lambda: round_of(world, uid).status.state.finished, 90 + 5 + 2 * TURN)


@given(away=st.integers(20, 24), ends=st.sampled_from(["finished", "deleted"]))
def test_a_silent_pod_that_comes_back_after_the_end_is_stopped(away: int, ends: str) -> None:
    """It may have a lease for some time yet."""
    world, uid = a_world()
    silent = holder(world, uid)
    fall_silent(silent)
    if ends == "finished":
        world.change(uid, finish=True)
    else:
        world.delete(uid)
    for _ in range(away):
        turn(world)
    silent.hears = silent.answers = True
    assert silent.slot is not None or silent.lease_end is None or silent.lease_end <= world.seconds
    world.reap()
    assert silent.slot is None
