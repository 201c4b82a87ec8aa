# SPDX-License-Identifier: Apache-2.0
"""Which Kubernetes nodes are asked for, and how often."""

from typing import Any, cast

from poc_operator.controller.fleet_surroundings import NODE_SECONDS, FleetOptions, FleetSurroundings
from poc_operator.observed import REVISION_LABEL, KubernetesNode, PodView
from tests.unit.poc_operator.fleets.build import a_fleet

ROLLING = {"update": {"phase": "Rolling"}}


class Nodes:
    """Kubernetes nodes by name, and which were asked for."""

    def __init__(self, **found: Any) -> None:  # noqa: ANN401
        self.found = found
        self.asked: list[str] = []

    async def node(self, name: str) -> Any:  # noqa: ANN401
        self.asked.append(name)
        return self.found.get(name)


def a_pod(name: str, node: str, revision: str = "old", **fields: Any) -> PodView:  # noqa: ANN401
    return PodView(name=name, namespace="ns", uid=name, node=node, labels={REVISION_LABEL: revision}, **fields)


async def test_nodes_of_pods_that_are_not_ready_are_asked_for_now_and_then() -> None:
    away = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    nodes, now = Nodes(b=away), 0.0
    around = FleetSurroundings(cast(Any, nodes), FleetOptions(), lambda: now)
    pods = [
        a_pod("ready", "a", ready=True),
        a_pod("loads", "b"),
        a_pod("beside", "b"),
        a_pod("unknown", "c"),
        a_pod("ends", "d", terminating=True),
        a_pod("waits", ""),
    ]
    fleet = a_fleet(status=ROLLING)
    for _ in range(2):
        assert await around.nodes(fleet, pods) == {"b": KubernetesNode(ready=False)}
    assert sorted(nodes.asked) == ["b", "c"]
    now += NODE_SECONDS
    await around.nodes(fleet, pods)
    assert len(nodes.asked) == 4


async def test_nobody_asks_for_nodes_while_all_pods_have_one_template() -> None:
    nodes = Nodes()
    around = FleetSurroundings(cast(Any, nodes), FleetOptions(), lambda: 0.0)
    await around.nodes(a_fleet(), [a_pod("one", "a"), a_pod("two", "b")])
    assert not nodes.asked
    await around.nodes(a_fleet(), [a_pod("one", "a"), a_pod("two", "b", "new")])
    assert sorted(nodes.asked) == ["a", "b"]
