# SPDX-License-Identifier: Apache-2.0
"""Random histories of an update: pods and Kubernetes nodes that break, rounds that come and go, templates that fail.

Meanwhile somebody scales the fleet, and pauses the update. Whatever happens, an update takes no more than
``maxUnavailable`` pods away, and none that a live round may need. It never spreads a template whose canary failed,
blames no template for a node, and ends when nothing holds it up.
"""

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from tests.unit.poc_operator.build import HISTORIES
from tests.unit.poc_operator.fleets.world import (
    ASKED,
    BAD,
    BROKEN,
    CALM,
    MOST,
    REPLICAS,
    SET,
    TURNS,
    UPDATES,
    World,
    ask,
    finish,
    harm,
    prepared,
)


@given(data=st.data(), update=UPDATES, bad=st.lists(BAD, min_size=3, max_size=3))
@settings(max_examples=HISTORIES // 2, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_history_takes_more_than_it_may(data: st.DataObject, update: dict[str, Any], bad: list[str]) -> None:
    world = prepared(update, {f"v{n}": how for n, how in enumerate(bad, start=1) if how})
    for _ in range(data.draw(st.integers(1, TURNS))):
        action = data.draw(st.sampled_from([*ASKED, *BROKEN, *["nothing"] * 4]))
        if action in ASKED:
            ask(world, action, data)
        elif action in BROKEN:
            harm(world, action, data.draw(st.integers(0, MOST - 1)))
        world.turn()
    finish(world)


ABSENCES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, REPLICAS - 1), st.integers(1, 30)), max_size=6)


@given(absences=ABSENCES)
@settings(max_examples=HISTORIES // 4, deadline=None)
@example(absences=[(1, REPLICAS - 1, 30)])
@example(absences=[(6, REPLICAS - 1, 2)])
def test_a_good_template_is_not_blamed_for_kubernetes_nodes(absences: list[tuple[int, int, int]]) -> None:
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": 1, "canary": True}, {})
    world.value = "v1"
    for turn in range(CALM):
        world.turn_nodes(absences, turn)
        world.turn()
    assert "Failed" not in world.phases
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v1"}
    assert world.status["update"]["phase"] == "Complete"


@given(
    what=st.sampled_from(["gets no Kubernetes node", "never comes up", "lost its Kubernetes node"]),
    number=st.integers(0, REPLICAS - 1),
    turn=st.integers(0, 40),
    limit=st.integers(2, 3),
    ends=st.integers(0, 80),
)
@settings(max_examples=HISTORIES // 4, deadline=None)
@example(what="gets no Kubernetes node", number=REPLICAS - 1, turn=0, limit=2, ends=0)
@example(what="gets no Kubernetes node", number=REPLICAS - 1, turn=6, limit=2, ends=0)
@example(what="lost its Kubernetes node", number=REPLICAS - 1, turn=0, limit=2, ends=0)
def test_an_update_to_a_good_template_ends_whatever_happens_to_one_pod(
    what: str, number: int, turn: int, limit: int, ends: int
) -> None:
    """It does so between rounds. A pod that cannot end, with its Kubernetes node, keeps what it has."""
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": limit, "canary": True}, {})
    world.begin_round([])
    for now in range(CALM):
        if now == turn:
            strike(world, what, number)
        if now == 5:
            world.value = "v1"
        if now == ends:
            world.end_rounds()
        world.turn()
    assert {world.value_of(pod.revision) for pod in world.pods.values() if not pod.ends} == {"v1"}
    assert all(world.ready(other) for other in world.pods if other != number)


def strike(world: World, what: str, number: int) -> None:
    """Let something happen to one pod that is for good."""
    if what == "gets no Kubernetes node":
        world.cordoned.add(number)
        world.pods.pop(number, None)
    elif what == "lost its Kubernetes node":
        world.turn_node(number)
    elif number in world.pods:
        world.pods[number].hangs = world.fault_of(world.pods[number]) == "" and world.value == "v0"


@given(how=st.sampled_from(["crashes", "computes wrong vectors"]), limit=st.integers(1, 3), ends=st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_bad_template_gets_one_pod(how: str, limit: int, ends: bool) -> None:
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": limit, "canary": True}, {"v1": how})
    world.value, most = "v1", 0
    for turn in range(60):
        world.turn()
        most = max(most, sum(world.fault_of(pod) == how for pod in world.pods.values()))
        if ends and turn == 20:
            world.begin_round([])
    assert most == 1
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v0"}
    assert world.status["update"]["phase"] == "Failed"
    assert world.phases == {"Complete", "Waiting", "Canary", "Failed"}
    # It is not tried again, and another template is.
    world.value = "v2"
    world.end_rounds()
    assert any(world.rests(world.turn()) for _ in range(CALM))
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v2"}


@pytest.mark.parametrize("how", ["crashes", "computes wrong vectors"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_bad_template_fails_also_where_no_pod_was_left(how: str, replicas: int) -> None:
    """As after a drain: Kubernetes makes all pods with the newest template, and none of an old one is ever seen."""
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": 1, "canary": True}, {"v1": how})
    world.replicas = replicas
    assert any(world.rests(world.turn()) for _ in range(CALM))
    for number in list(world.pods):
        world.end(number)
    world.value = "v1"
    assert any(world.rests(world.turn()) for _ in range(CALM)), world.status["update"]["message"]
    assert "Failed" in world.phases
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v0"}


@pytest.mark.parametrize("then", ["works", "is refused", "undo"])
@pytest.mark.parametrize(("replicas", "limit"), [(REPLICAS, 1), (REPLICAS, 2), (1, 1)])
@pytest.mark.parametrize("turns", [2, 22])  # 22: almost until the first one has failed
def test_another_template_follows_one_whose_pod_is_refused(then: str, replicas: int, limit: int, turns: int) -> None:
    """As by a webhook or a quota: the pod that is missing comes with the newest template, or that has failed too."""
    update = {"strategy": "BetweenRounds", "maxUnavailable": limit, "canary": True}
    world = prepared(update, {"v1": "is refused", **({"v2": then} if then == "is refused" else {})})
    world.replicas, world.value = replicas, "v1"
    while SET in world.objects and len(world.pods) != replicas - 1:
        world.turn()
    for _ in range(turns):
        world.turn()
    assert "Failed" not in world.phases
    world.value = "v0" if then == "undo" else "v2"
    for _ in range(6):
        world.turn()
    assert len(world.pods) >= replicas - 1  # nobody else goes for the second one
    assert any(world.rests(world.turn()) for _ in range(CALM)), world.status["update"]["message"]
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v2" if then == "works" else "v0"}
    failed = then == "is refused"
    assert (world.status["update"]["phase"], len(world.pods)) == ("Failed" if failed else "Complete", replicas)
    assert ("Failed" in world.phases) is failed


def set_of(world: World) -> Any:  # noqa: ANN401
    """Return the StatefulSet's container as the API server has it."""
    return world.objects[SET]["spec"]["template"]["spec"]["containers"][0]


def test_a_round_without_another_template_changes_nothing() -> None:
    """The API server stores some fields otherwise, and somebody may edit the StatefulSet: that is no new template."""
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": 1, "canary": True}, {})
    world.told.clear()
    world.begin_round([])
    for turn in range(12):
        if turn % 3 == 0:
            world.objects[SET] = copy.deepcopy(world.objects[SET])
            set_of(world)["image"] = "somebody/else:1"
        step = world.turn()
        assert step.status.update.phase is UpdatePhase.COMPLETE
        assert step.status.updated_replicas == REPLICAS
        assert set_of(world)["image"] != "somebody/else:1"
    assert world.told == []


def test_no_template_is_complete_before_kubernetes_has_seen_it() -> None:
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": 1, "canary": True}, {})
    world.value = "v1"
    for _ in range(200):
        step = world.turn()
        newest = {world.value_of(pod.revision) for pod in world.pods.values()} == {"v1"}
        assert (step.status.update.phase is UpdatePhase.COMPLETE) <= newest
        if newest and step.status.update.phase is UpdatePhase.COMPLETE:
            return
    raise AssertionError("the update must end")
