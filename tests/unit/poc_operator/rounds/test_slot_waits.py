# SPDX-License-Identifier: Apache-2.0
"""How long slots had no pod, as the message of a round's end tells."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import MAX_WAITS, Assignment, RoundStatus, SlotWait
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.planning.snapshot import Step
from poc_operator.rounds.plan import plan
from poc_operator.rounds.slots import note_waits
from tests.unit.poc_operator.build import NOW, a_config, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState

SECONDS = 100
SPEC: Mapping[str, Any] = {"nodes": {"first": 0, "last": 1, "count": 2}, "stop": {"afterSeconds": SECONDS}}
WORKS = a_slot(next=8, delivered=8, valid=8, leased=False)
LOST = a_slot(None, SlotState.WAITING, node=1)


def after(status: RoundStatus, seconds: float, *pods: str, ended: bool = False, **spec: Any) -> RoundStatus:  # noqa: ANN401
    """The round so many seconds after its start: pod a has the first slot, the others may take the second one."""
    counts: dict[str, Any] = {"next_index": 8, "delivered_index": 8, "delivered_valid": 8}
    config = a_config(node_count=2)
    state = PowState.STOPPED if ended else PowState.GENERATING
    reports = [(a_pod("a"), says(state, config=config, **counts))]
    reports += [(a_pod(pod), says()) for pod in pods]
    seen = look(a_round(status, **{**SPEC, **spec}), *reports, after=seconds)
    found: RoundStatus = plan(seen).status
    return RoundStatus.model_validate(found.stored())


def begun(*slots: Assignment) -> RoundStatus:
    return a_status(*slots, slots=2, groups=1, start_time=NOW)


def waits(status: RoundStatus) -> list[tuple[int, int, float | None]]:
    """Node, seconds, and since when it waits in seconds after the start."""
    return [
        (wait.node, wait.seconds, (wait.since - NOW).total_seconds() if wait.since else None)
        for wait in status.slot_waits
    ]


def test_what_a_slot_had_no_pod_for_is_told_at_the_end() -> None:
    status = after(begun(WORKS, LOST), 10)
    assert waits(status) == [(1, 0, 10)]
    assert after(status, 60).slot_waits == status.slot_waits, "nothing is written while nothing changes"
    over = after(after(status, SECONDS), SECONDS + 1, ended=True)
    assert (over.state, waits(over)) == (State.COMPLETE, [(1, 90, None)])
    told = "spec.stop.afterSeconds of 100 reached; slots without a pod for a part of the 100 s: node 1 group 0 (90 s)"
    assert over.message == told
    assert next(one.message for one in over.own_conditions if one.type == "Complete") == told


def test_it_ends_when_a_pod_takes_the_slot_and_goes_on_when_that_is_gone() -> None:
    taken = after(after(begun(WORKS, LOST), 10), 40, "b")
    assert [slot.pod for slot in taken.assignments] == ["a", "b"]
    assert waits(taken) == [(1, 30, None)]
    lost = after(taken, 60)
    assert waits(lost) == [(1, 30, 60)]
    assert waits(after(lost, 75, suspend=True)) == [(1, 45, None)], "what is suspended waits for nothing"


@pytest.mark.parametrize(("of", "least"), [(SECONDS, 60), (1_000, 100)])
@pytest.mark.parametrize("less", [1, 0])
def test_a_short_wait_is_not_told(of: int, least: int, less: int) -> None:
    wait, told = SlotWait(node=1, group=0, seconds=least - less), not less
    ending = begun(WORKS, LOST).model_copy(update={"slot_waits": [wait]})
    stop = {"afterSeconds": of}
    over = after(after(ending, of, stop=stop), of + 1, ended=True, stop=stop)
    assert over.state is State.COMPLETE
    assert ("without a pod" in over.message) is told


def test_before_the_start_slots_wait_for_nothing() -> None:
    status = a_status(LOST.model_copy(update={"node": 0}), LOST, slots=2, groups=1, start_time=None)
    assert after(status, 10).slot_waits == []


MANY = [a_slot(None, SlotState.WAITING, node=node) for node in range(2 * MAX_WAITS)]


def noted(status: RoundStatus, seconds: float) -> RoundStatus:
    found: RoundStatus = note_waits(look(a_round(status), after=seconds), Step(status=status)).status
    return found


def test_a_long_wait_is_kept_while_many_wait_for_a_moment() -> None:
    long, short = SlotWait(node=99, group=0, seconds=500), SlotWait(node=98, group=0, seconds=3)
    status = noted(a_status(*MANY, start_time=NOW, slot_waits=[short, long]), 1)
    assert len(status.slot_waits) == MAX_WAITS
    assert status.slot_waits[0] == long
    assert all(wait.since is not None for wait in status.slot_waits[1:])
    assert noted(status, 9) == status, "nothing is written while they wait"


def test_what_waits_takes_the_place_of_moments_that_are_over() -> None:
    moments = [SlotWait(node=node, group=1, seconds=5) for node in range(MAX_WAITS)]
    status = noted(a_status(MANY[0], start_time=NOW, slot_waits=moments), 1)
    assert (len(status.slot_waits), status.slot_waits[0].since) == (MAX_WAITS, NOW + timedelta(seconds=1))


def test_of_more_than_are_kept_the_number_is_not_claimed() -> None:
    waits = [SlotWait(node=node, group=0, seconds=90) for node in range(MAX_WAITS)]
    ending = begun(WORKS, LOST).model_copy(update={"slot_waits": waits})
    over = after(after(ending, SECONDS), SECONDS + 1, ended=True)
    assert "; 20 or more slots without a pod for a part of the 100 s: node 0 group 0 (90 s), " in over.message
