# SPDX-License-Identifier: Apache-2.0
"""Pods that do not come up, and show no crash: no update waits for a round on them, and no round for the update."""

from datetime import timedelta
from typing import Any

import pytest

from poc_operator.fleets.forecast import Spares
from poc_operator.fleets.plan import plan
from poc_operator.fleets.stages import PATIENCE_SECONDS
from poc_operator.observed import KubernetesNode, PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.test_forecast import work
from tests.unit.poc_operator.fleets.test_update import (
    FOUR,
    NEW,
    OLD,
    _snapshot,
    a_pod,
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
