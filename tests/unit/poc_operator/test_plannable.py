# SPDX-License-Identifier: Apache-2.0
"""Accepted means plannable: whatever the schema lets in can be planned from its creation to its end.

No plan raises, each takes bounded time and memory, every order is a message that a pod accepts, what is stored can be
read back and fits into etcd, and tools that follow kstatus read it right.
"""

import json
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hack.generate.__main__ import WORK
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, PoCRound
from poc_operator.apis.v1alpha1.status import State
from poc_operator.planning.snapshot import AskPod, ExtendPod, StartPod, Step
from tests.support.builders.lives import Life
from tests.support.builders.specs import FULL, edges, specs
from tests.support.checks.admission import admitted
from tests.support.checks.kstatus import kstatus

_KIND = pytest.mark.parametrize("kind", WORK, ids=lambda kind: kind.KIND.kind)

#: CPU seconds of one plan, bytes of one object as etcd takes it, and bytes of memory beside what is kept.
PLAN_SECONDS = 5.0
OBJECT_BYTES = 1_500_000
PLAN_BYTES = 200_000_000


def live(kind: type[Resource], spec: Mapping[str, Any]) -> list[State]:
    """Plan an object's whole life, and check each plan; return the states that it went through."""
    life, states = Life(kind, spec), list[State]()
    steps = life.steps()
    began = time.process_time()
    for step in steps:
        assert time.process_time() - began < PLAN_SECONDS
        _check_orders(step)
        _check_object(life)
        states.append(step.status.state)
        began = time.process_time()
    return states


def _check_orders(step: Step[Any]) -> None:
    for action in step.actions:
        if isinstance(action, StartPod | ExtendPod | AskPod):
            sent = action.request.model_dump_json(exclude_none=True)
            assert type(action.request).model_validate_json(sent) == action.request


def _check_object(life: Life) -> None:
    work: Any = life.kind.parse(life.body)
    readings = {State.COMPLETE: "Current", State.FAILED: "Failed"}
    assert kstatus(life.body) == readings.get(work.status.state, "InProgress")
    assert len(json.dumps(life.body)) < OBJECT_BYTES


@_KIND
@pytest.mark.timeout(300)
def test_every_accepted_edge_is_plannable(kind: type[Resource]) -> None:
    lived = 0
    for name, spec in edges(kind):
        stored, flaws = admitted(kind, spec)
        if not flaws:
            lived += 1
            try:
                assert live(kind, stored)[-1].finished
            except Exception as error:
                error.add_note(name)
                raise
    assert lived > 30


@_KIND
@pytest.mark.timeout(300)
@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_accepted_spec_is_plannable(kind: type[Resource], data: st.DataObject) -> None:
    stored, flaws = admitted(kind, data.draw(specs(kind)))
    assert flaws == []
    assert live(kind, stored)[-1].finished


@_KIND
def test_a_life_has_its_stations(kind: type[Resource]) -> None:
    stored, _ = admitted(kind, {**FULL[kind][-1], "stop": {"afterNonces": 10**6}, "activeDeadlineSeconds": None})
    states = live(kind, stored)
    assert {State.RUNNING, State.SUSPENDED} & set(states)
    assert states[-1].finished


def test_the_largest_round_is_planned_in_bounded_memory() -> None:
    nodes = {"first": 0, "last": MAX_SLOTS - 1, "count": MAX_SLOTS}
    stored, flaws = admitted(PoCRound, {**FULL[PoCRound][0], "nodes": nodes})
    assert flaws == []
    life = Life(PoCRound, stored)
    tracemalloc.start()
    try:
        for _ in range(3):
            life.step()
        assert tracemalloc.get_traced_memory()[1] < PLAN_BYTES
    finally:
        tracemalloc.stop()
