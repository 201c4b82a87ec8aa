# SPDX-License-Identifier: Apache-2.0
"""Events: few, however many slots they are about."""

from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.planning.snapshot import MOST_ALIKE, Loss, WorkEvent, condensed
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import a_pod, a_round, a_slot, a_status, has, look, says
from vllm_poc.wire.answers import PowState


def test_a_thousand_lost_slots_post_one_event() -> None:
    slots = [a_slot(f"p{group}", group=group) for group in range(1000)]
    step = plan(look(a_round(a_status(*slots), stop=None, retry={"backoffLimit": 100_000})))
    assert {slot.state for slot in step.status.assignments} == {SlotState.WAITING}
    assert [(event.reason, event.loss, event.count) for event in step.events] == [("WorkLost", Loss.POD_GONE, 1000)]
    assert step.events[0].message.startswith("1000 slots, the first: node 0 group 0: pod p0 is gone; starts again at")


def test_few_events_stay_as_they_are() -> None:
    events = [WorkEvent(reason="WorkLost", message=str(number), loss=Loss.STOPPED) for number in range(MOST_ALIKE)]
    others = [WorkEvent(reason="Started", message="x"), WorkEvent(reason="WorkLost", message="y", warning=True)]
    assert condensed([*others, *events]) == [*others, *events]


def test_a_finding_is_told_by_an_event_once() -> None:
    """Slots and pods have Events of their own; what is about the whole round has none otherwise."""
    status = a_status(a_slot(), stop_time=None)
    rejecting = says(PowState.GENERATING, next_index=9, delivered_index=9, delivered_rejected=3)
    first = plan(look(a_round(status, stop=None), (a_pod("a"), rejecting)))
    assert [(event.reason, event.warning) for event in first.events] == [("ResultsRejected", True)]
    assert first.status.degraded == "ResultsRejected"
    again = plan(look(a_round(first.status, stop=None), (a_pod("a"), rejecting)))
    assert again.events == []


def test_every_new_finding_has_an_event() -> None:
    away = has((9, 9), error="gateway http://gateway:8080: no answer within 5 s")
    rejecting = says(PowState.GENERATING, next_index=9, delivered_index=9, delivered_rejected=3)
    step = plan(look(a_round(a_status(a_slot()), stop=None), (a_pod("a"), rejecting), gateway=away))
    found = [event.reason for event in step.events]
    assert found == ["GatewayUnreachable", "ResultsRejected"] == step.status.degraded.split(",")
