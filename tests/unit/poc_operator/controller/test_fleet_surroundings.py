# SPDX-License-Identifier: Apache-2.0
"""What fleets read of the cluster, and how often: their objects, GPU products, and Kubernetes nodes."""

import asyncio
from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, GROUPS_KIND
from poc_operator.clients.errors import StoreForbidden
from poc_operator.controller.fleet_surroundings import (
    CLAIM_SECONDS,
    NODE_SECONDS,
    SURROUNDINGS_SECONDS,
    FleetChildren,
    FleetOptions,
    FleetSurroundings,
)
from poc_operator.fleets.resolve import Refusal, resolve
from poc_operator.fleets.stages import KubernetesNode
from poc_operator.observed import REVISION_LABEL, PodView
from tests.unit.poc_operator.fleets.build import a_fleet

ROLLING = {"update": {"phase": "Rolling"}}
AWAY = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}


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
    nodes, now = Nodes(b=AWAY), 0.0
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


class SlowNodes(Nodes):
    """Kubernetes nodes of which one is told only when a test lets it."""

    def __init__(self, slow: str, **found: Any) -> None:  # noqa: ANN401
        super().__init__(**found)
        self.slow = slow
        self.waits, self.goes_on = asyncio.Event(), asyncio.Event()

    async def node(self, name: str) -> Any:  # noqa: ANN401
        found = await super().node(name)
        if name == self.slow:
            self.waits.set()
            await self.goes_on.wait()
        return found


async def test_fleets_that_ask_at_the_same_time_do_not_disturb_each_other() -> None:
    nodes, now = SlowNodes("b", a=AWAY, b=AWAY), 0.0
    around = FleetSurroundings(cast(Any, nodes), FleetOptions(), lambda: now)
    fleet, pods = a_fleet(status=ROLLING), [a_pod("one", "a"), a_pod("two", "b")]
    await around.nodes(fleet, pods[:1])
    asks = asyncio.create_task(around.nodes(fleet, pods))
    await nodes.waits.wait()
    now += 10 * SURROUNDINGS_SECONDS  # what another fleet finds too old, it forgets
    await around.nodes(fleet, [])
    nodes.goes_on.set()
    assert (await asks).keys() == {"a", "b"}


async def test_the_age_of_a_node_counts_from_its_answer() -> None:
    nodes, now = SlowNodes("a", a=AWAY), 0.0
    around = FleetSurroundings(cast(Any, nodes), FleetOptions(), lambda: now)
    asks = asyncio.create_task(around.nodes(a_fleet(status=ROLLING), [a_pod("one", "a")]))
    await nodes.waits.wait()
    now += 2 * NODE_SECONDS
    nodes.goes_on.set()
    await asks
    await around.nodes(a_fleet(status=ROLLING), [a_pod("one", "a")])
    assert nodes.asked == ["a"]


async def test_of_many_nodes_a_few_are_asked_for_at_a_time() -> None:
    names = [f"n{number:02}" for number in range(50)]
    nodes, now = Nodes(**dict.fromkeys(names, AWAY)), 0.0
    around = FleetSurroundings(cast(Any, nodes), FleetOptions(), lambda: now)
    fleet, pods = a_fleet(status=ROLLING), [a_pod(name, name) for name in names]
    known = []
    for _ in range(4):
        known.append(len(await around.nodes(fleet, pods)))
        now += NODE_SECONDS
    # What is known stays so until each has had its turn again.
    assert known == [20, 40, 50, 50]
    assert nodes.asked == [*names, *names[:10], *names[10:30]]


async def test_whoever_may_not_read_nodes_asks_only_now_and_then() -> None:
    class Refused(Nodes):
        async def node(self, name: str) -> Any:  # noqa: ANN401
            await super().node(name)
            raise StoreForbidden("HTTP 403: Forbidden")

    nodes, now = Refused(), 0.0
    around = FleetSurroundings(cast(Any, nodes), FleetOptions(), lambda: now)
    pods = [a_pod("one", "a"), a_pod("two", "b")]
    for later, asked in ((0, 1), (NODE_SECONDS, 1), (SURROUNDINGS_SECONDS, 2)):
        now += later
        assert await around.nodes(a_fleet(status=ROLLING), pods) == {}
        assert len(nodes.asked) == asked


class Products(Nodes):
    """A cluster with one GPU product and no presets of its own; it counts how often it was asked."""

    async def presets(self) -> list[Any]:
        return []

    async def products(self) -> list[str]:
        self.asked.append("products")
        return ["NVIDIA-H200"]


@pytest.mark.parametrize("others", [[], [{}], [{"product": "NVIDIA-H200"}]])
async def test_a_products_part_is_refused_whatever_other_fleets_there_are(others: list[Any]) -> None:
    cluster, preset = Products(), {"preset": "minimax-m2.7"}
    around = FleetSurroundings(cast(Any, cluster), FleetOptions(image="a"), lambda: 0.0)
    for gpu in [*others, {"product": "H200"}]:
        fleet = a_fleet(model=preset, gpu=gpu)
        found = resolve(fleet.spec, await around.of(fleet))
    assert isinstance(found, Refusal)
    assert 'set gpu.product to "NVIDIA-H200"' in found.message
    assert cluster.asked == ["products"]


OWN_PRESET = """
name: qwen3-0.6b
model: own/model
seqLen: 64
kDim: 12
gpus: [{product: any, count: 1, tensor: 1}]
"""


class OwnPresets(Products):
    """A cluster with a ConfigMap that replaces a packaged preset, and perhaps without the right to read it."""

    def __init__(self, *, refused: bool = False) -> None:
        super().__init__()
        self.refused = refused

    async def presets(self) -> list[Any]:
        if self.refused:
            raise StoreForbidden("HTTP 403: Forbidden")
        return [("presets", "qwen3-0.6b.yaml", OWN_PRESET)]


async def _model(around: FleetSurroundings, fleet: PoCFleet) -> str:
    found = resolve(fleet.spec, await around.of(fleet))
    return found.message if isinstance(found, Refusal) else found.model


async def test_presets_that_may_not_be_read_any_more_are_those_of_before(caplog: pytest.LogCaptureFixture) -> None:
    cluster, now = OwnPresets(), 0.0
    around = FleetSurroundings(cast(Any, cluster), FleetOptions(image="a"), lambda: now)
    fleet = a_fleet(model={"preset": "qwen3-0.6b"})
    assert await _model(around, fleet) == "own/model"
    cluster.refused = True
    for _ in range(3):
        now += SURROUNDINGS_SECONDS
        assert await _model(around, fleet) == "own/model"
    assert [one.getMessage() for one in caplog.records] == [
        "ConfigMaps with presets cannot be read (HTTP 403: Forbidden): presets stay as they were read last"
    ]


async def test_presets_that_may_not_be_read_at_the_start_change_no_fleet_that_runs() -> None:
    """A packaged preset need not be the one that its pods have."""
    cluster, now = OwnPresets(refused=True), 0.0
    around = FleetSurroundings(cast(Any, cluster), FleetOptions(image="a"), lambda: now)
    runs = a_fleet(model={"preset": "qwen3-0.6b"}, status={"updateRevision": "demo-1"})
    assert await _model(around, runs) == (
        'preset "qwen3-0.6b" cannot be used: the operator may not read ConfigMaps, which may have another one '
        "(HTTP 403: Forbidden): install the chart with fleets.enabled=true"
    )
    # Nothing changes for one that is new, or that names a path.
    assert await _model(around, a_fleet(model={"preset": "qwen3-0.6b"})) == "Qwen/Qwen3-0.6B"
    cluster.refused = False
    now += SURROUNDINGS_SECONDS
    assert await _model(around, runs) == "own/model"


async def test_nobody_asks_for_products_for_a_path() -> None:
    cluster = Products()
    await FleetSurroundings(cast(Any, cluster), FleetOptions()).of(a_fleet(gpu={"product": "H200", "count": 1}))
    assert not cluster.asked


class Listed:
    """A cluster that is found out to have LeaderWorkerSets."""

    kinds = frozenset({"StatefulSet"})

    async def list_all(self, namespaces: object) -> list[Any]:
        labels = {FLEET_LABEL: "demo"}
        return [
            {"kind": kind, "metadata": {"namespace": "ns", "name": "demo", "labels": labels}} for kind in self.kinds
        ]


async def test_a_list_without_a_kind_that_the_cluster_has_is_no_list() -> None:
    """As at the operator's start: the list for another fleet knew no LeaderWorkerSets, and is as new as can be."""
    objects = Listed()
    children = FleetChildren(cast(Any, objects), (), lambda: 0.0)
    assert (await children.of("ns", "demo", 60.0)).keys() == {("StatefulSet", "demo")}
    objects.kinds |= {GROUPS_KIND}
    assert (await children.of("ns", "demo", 60.0)).keys() == {("StatefulSet", "demo"), (GROUPS_KIND, "demo")}


class Claims:
    """PVCs by their names, and how often they were asked for."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.refused = False
        self.asked = 0

    async def get(self, kind: str, namespace: str, name: str) -> Any:  # noqa: ANN401
        assert (kind, namespace) == ("PersistentVolumeClaim", "ns")
        self.asked += 1
        if self.refused:
            raise StoreForbidden("HTTP 403")
        return self.found.get(name)


async def test_the_pvc_that_a_fleet_names_is_read_now_and_then() -> None:
    claims, now = Claims(), 0.0
    around = FleetSurroundings(cast(Any, claims), FleetOptions(), lambda: now)
    fleet = a_fleet(cache={"existingClaim": "weights", "download": True})
    for found, expected in ((None, ""), ({"metadata": {"uid": "pvc-1"}}, "pvc-1")):
        claims.found["weights"] = found
        for _ in range(3):
            assert await around.claim(fleet, {}) == expected
        now += CLAIM_SECONDS
    claims.refused = True
    assert (await around.claim(fleet, {}), claims.asked) == (None, 3)


async def test_the_pvc_of_a_fleet_is_among_its_objects() -> None:
    claims = Claims()
    around = FleetSurroundings(cast(Any, claims), FleetOptions())
    fleet = a_fleet(cache={"size": "1Gi", "download": True})
    assert await around.claim(fleet, {}) is None
    found = {("PersistentVolumeClaim", "demo-cache"): {"metadata": {"uid": "pvc-1"}}}
    assert (await around.claim(fleet, found), claims.asked) == ("pvc-1", 0)


class Secrets:
    """A namespace with or without the Secret of its pods' token."""

    def __init__(self) -> None:
        self.is_there = True
        self.looks = 0

    async def ensure_token(self, namespace: str, name: str) -> bool:
        assert (namespace, name) == ("ns", "vllm-poc-token")
        made, self.is_there, self.looks = not self.is_there, True, self.looks + 1
        return made


PODS = {"pods": [{"name": "demo-0", "uid": "a", "server": "a/1", "result": "Passed"}]}


@pytest.mark.parametrize(
    ("status", "before", "told"),
    [(None, False, False), (PODS, False, True), (None, True, True)],
    ids=["a new fleet", "a fleet with pods, a new process", "a Secret that was there"],
)
async def test_a_secret_that_is_made_anew_is_told_of(
    status: Any,  # noqa: ANN401
    before: bool,
    told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secrets, now = Secrets(), 0.0
    around = FleetSurroundings(cast(Any, secrets), FleetOptions(), lambda: now)
    fleet = a_fleet(status=status)
    if before:
        await around.ensure_token(fleet)
        now += SURROUNDINGS_SECONDS
    secrets.is_there = False
    for _ in range(3):
        await around.ensure_token(fleet)
    assert caplog.text.count('namespace "ns": the Secret "vllm-poc-token" with the token of its pods was gone') == told
    assert secrets.looks == before + 1
