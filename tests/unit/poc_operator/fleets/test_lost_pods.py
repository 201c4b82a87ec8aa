# SPDX-License-Identifier: Apache-2.0
"""Pods that do not come up, and show no crash: no update waits for a round on them, and no round for the update."""

from datetime import timedelta
from typing import Any

import pytest

from poc_operator.fleets.forecast import Spares
from poc_operator.fleets.plan import plan
from poc_operator.fleets.stages import PATIENCE_SECONDS, KubernetesNode
from poc_operator.observed import PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.test_forecast import work
from tests.unit.poc_operator.fleets.test_update import (
    FOUR,
    NEW,
    OLD,
    _snapshot,
    a_pod,
    after,
    evicted,
    failed_fleet,
    fleet_of,
    in_phase,
    look,
    objects_of,
    template_of,
)

AWAY = KubernetesNode(ready=False, since=NOW - timedelta(seconds=60))
NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
NO_LABEL = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
NO_LABEL_OR_ROOM = "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) didn't match Pod's node affinity/selector."
#: Pods that are not ready, and whether anything is lost with them.
LOST: dict[str, tuple[PodView, bool]] = {
    "loads": (a_pod(0, ready=False, age=3599), False),
    "never came up": (a_pod(0, ready=False, age=3601), True),
    "served a moment ago": (a_pod(0, ready=False, age=9000, not_ready_since=NOW - timedelta(seconds=9)), False),
    "served long ago": (a_pod(0, ready=False, age=9000, not_ready_since=NOW - timedelta(seconds=3601)), True),
    "is new": (a_pod(0, ready=False, age=PATIENCE_SECONDS - 1, node="", taken=None), False),
    "has no Kubernetes node": (a_pod(0, ready=False, age=PATIENCE_SECONDS, node="", taken=None), True),
}


@pytest.mark.parametrize(("pod", "lost"), LOST.values(), ids=LOST)
def test_a_pod_that_does_not_come_up_waits_for_no_round(pod: PodView, lost: bool) -> None:
    rolling, pods = fleet_of(in_phase("Rolling")), [pod, *FOUR[1:]]
    step = look(rolling, pods, work=[work()])
    assert [(one.pod.name, one.spares) for one in step.evict] == ([("demo-0", Spares.SLOTS)] if lost else [])
    slots = {"state": "Running", "assignments": [{"uid": pod.uid, "state": "Starting"}]}
    assert not look(rolling, pods, work=[work(status=slots)]).evict


def test_one_whose_kubernetes_node_is_away_may_come_back() -> None:
    pods = [a_pod(0, ready=False, age=9000), *FOUR[1:]]
    assert not look(fleet_of(in_phase("Rolling")), pods, work=[work()], nodes={"node-1": AWAY}).evict


def test_a_round_that_waits_for_pods_does_not_keep_them_from_flags_that_are_right() -> None:
    hang = [a_pod(n, ready=False, age=3601) for n in range(4)]
    step = look(fleet_of(in_phase("Complete", goodRevision="")), hang, work=[work(state="Pending")])
    assert (evicted(step), step.status.update.phase) == (["demo-3"], "Canary")
    rest = look(fleet_of(in_phase("Canary", goodRevision="")), [*hang[:3], a_pod(3, NEW)], work=[work()])
    assert evicted(rest) == ["demo-2", "demo-1", "demo-0"]


def test_a_canary_that_has_failed_leaves_in_a_round() -> None:
    """It was not ready in time, and shows nothing else."""
    spec: dict[str, Any] = {"engineArgs": ["--new"], "startupSeconds": 60}
    fleet, objects = failed_fleet(**spec), objects_of(fleet_of(startupSeconds=60), revision=OLD)
    for age in (59, 500):
        pods = [*FOUR[:3], a_pod(3, NEW, ready=False, age=age)]
        good = template_of(startupSeconds=60)
        step = plan(_snapshot(fleet, objects=objects, pods=pods, good_template=good, work=[work()]))
        assert evicted(step) == ["demo-3"]


def homeless(number: int, revision: str = NEW, *, age: float = 9000, says: str = NO_ROOM) -> PodView:
    """A pod that the scheduler has given to no Kubernetes node."""
    return a_pod(number, revision, ready=False, age=age, node="", taken=None, waiting_for=says)


WELL = KubernetesNode(ready=True)
CORDONED = KubernetesNode(ready=True, since=NOW - timedelta(days=9), cordoned=True)
NO_CLAIM = '0/3 nodes are available: persistentvolumeclaim "wieghts" not found.'


@pytest.mark.parametrize(
    ("age", "canary_node", "nodes", "says", "phase"),
    [
        (3601, "node-1", {"node-1": WELL}, NO_LABEL, "Failed"),  # the pod before it found a node
        (3599, "node-1", {"node-1": WELL}, NO_LABEL, "Canary"),
        (3601, "", {}, NO_LABEL, "Canary"),
        (3601, "node-1", {}, NO_LABEL, "Canary"),  # nodes may not be read
        (3601, "node-1", {"node-1": AWAY}, NO_LABEL, "Canary"),
        (3601, "node-1", {"node-1": CORDONED}, NO_LABEL, "Canary"),
        (3601, "node-1", {"node-1": WELL}, NO_ROOM, "Canary"),  # others may have taken it
        (3601, "node-1", {"node-1": WELL}, NO_LABEL_OR_ROOM, "Canary"),
        (3601, "", {}, NO_CLAIM, "Failed"),
        (3599, "", {}, NO_CLAIM, "Canary"),
    ],
)
def test_a_canary_that_gets_no_kubernetes_node_fails_if_its_template_is_at_fault(
    age: float, canary_node: str, nodes: dict[str, KubernetesNode], says: str, phase: str
) -> None:
    status = in_phase("Canary", canary="demo-3", canaryNode=canary_node)
    step = look(fleet_of(status), [*FOUR[:3], homeless(3, age=age, says=says)], nodes=nodes)
    assert (step.status.update.phase, evicted(step)) == (phase, [])
    assert says in step.status.update.message


def test_it_is_recorded_where_the_pod_before_the_canary_was() -> None:
    assert look(fleet_of(), FOUR).status.update.canary_node == "node-1"
    unwell = [a_pod(0, ready=False), *(a_pod(n, node="node-2") for n in range(1, 4))]
    assert look(fleet_of(update={"maxUnavailable": 2}), unwell, nodes={"node-1": AWAY}).status.update.canary == "demo-3"
    for nodes in ({"node-1": AWAY}, {}):
        alone = look(fleet_of(replicas=1), unwell[:1], nodes=nodes)
        assert (evicted(alone), alone.status.update.canary_node) == (["demo-0"], "")


def test_a_node_that_is_unwell_for_a_moment_lets_a_canary_fail_all_the_same() -> None:
    status = in_phase("Canary", canary="demo-3", canaryNode="node-1")
    for node in (WELL, AWAY, WELL):
        step = look(fleet_of(status), [*FOUR[:3], homeless(3, age=3000, says=NO_LABEL)], nodes={"node-1": node})
        status, update = after(step), step.status.update
        assert (update.canary, update.canary_node, evicted(step)) == ("demo-3", "node-1", [])
    late = look(fleet_of(status), [*FOUR[:3], homeless(3, age=3601, says=NO_LABEL)], nodes={"node-1": WELL})
    assert late.status.update.phase == "Failed"


def test_a_pod_that_runs_is_the_canary_rather_than_one_without_a_kubernetes_node() -> None:
    pods = [*FOUR[:3], homeless(3, OLD)]
    two = look(fleet_of(update={"maxUnavailable": 2}), pods)
    assert (evicted(two), two.status.update.canary_node) == (["demo-2"], "node-1")
    # No further pod may be away, and perhaps the new template lets this one run.
    assert evicted(look(fleet_of(), pods)) == ["demo-3"]


def test_another_pod_is_the_canary_if_the_first_gets_no_kubernetes_node() -> None:
    canary = in_phase("Canary", canary="demo-3")
    two = fleet_of(canary, update={"maxUnavailable": 2})
    assert not look(two, [*FOUR[:3], homeless(3, age=PATIENCE_SECONDS - 1)]).evict
    second = look(two, [*FOUR[:3], homeless(3)])
    assert (evicted(second), second.status.update.canary) == (["demo-2"], "demo-2")
    # Nobody else goes meanwhile, and it shows that the template works.
    three = fleet_of(in_phase("Canary", canary="demo-2", canaryNode="node-1"), update={"maxUnavailable": 3})
    for others in ([], [a_pod(2, NEW, ready=False, age=5)], [homeless(2, age=3599, says=NO_LABEL)]):
        assert not look(three, [*FOUR[:2], *others, homeless(3)], nodes={"node-1": WELL}).evict
    works = look(three, [*FOUR[:2], a_pod(2, NEW), homeless(3)])
    assert (evicted(works), works.status.update.phase) == (["demo-1", "demo-0"], "Rolling")
    # With one that may be away it waits, and says what for.
    one = look(fleet_of(canary), [*FOUR[:3], homeless(3)])
    assert not one.evict
    assert f"canary: waiting for demo-3 ({NO_ROOM})" in one.status.update.message


def test_another_pod_is_the_canary_if_the_first_cannot_end() -> None:
    ends = a_pod(3, ready=False, terminating=True)
    fleet = fleet_of(in_phase("Canary", canary="demo-3"), update={"maxUnavailable": 2})
    assert not look(fleet, [*FOUR[:3], ends]).evict
    others = [a_pod(n, node="node-2") for n in range(3)]
    assert evicted(look(fleet, [*others, ends], nodes={"node-1": AWAY})) == ["demo-2"]
