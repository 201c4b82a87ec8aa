# SPDX-License-Identifier: Apache-2.0
"""Faults around fleets: what one of them meets harms no other, and is told where users look.

What goes well is in ``tests/cluster/test_fleets.py``, with a real API server.
"""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.conditions import Condition
from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.clients.errors import EvictionRefused, ObjectInvalid, StaleObject, StoreForbidden, StoreUnavailable
from poc_operator.controller import failing_objects, fleet_surroundings, fleet_updates, fleets
from poc_operator.controller.fleet_health import FleetHealth
from poc_operator.controller.fleet_surroundings import FleetOptions
from poc_operator.controller.fleets import Fleets
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache
from poc_operator.fleets import plan as planning
from poc_operator.fleets.plan import key_of
from poc_operator.fleets.progress import Watched
from poc_operator.observed import Container, PodView
from tests.unit.poc_operator.fleets.build import PATH
from tests.unit.poc_operator.fleets.test_healing import SERVER, STUCK

Body = dict[str, Any]


def body_of(name: str, **spec: Any) -> Body:  # noqa: ANN401
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-{name}",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": {**PATH, "image": "a", **spec}}


class Cluster:
    """Objects and statuses of a few fleets; ``faults`` has what is raised, by what is asked."""

    kinds = frozenset[str]()

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Body] = {}
        self.statuses: dict[str, Body] = {}
        self.internal: dict[str, str] = {}
        self.applied: list[tuple[str, str]] = []
        self.going: list[tuple[str, str]] = []
        self.faults: dict[str, Exception] = {}
        self.bodies: list[Body] = []
        self.versions = 1
        self.deleted: set[str] = set()
        self.evicted: list[str] = []
        self.events: list[tuple[str, str]] = []

    def _meet(self, what: str) -> None:
        if what in self.faults:
            raise self.faults[what]

    async def list_all(self, namespaces: object) -> list[Body]:
        self._meet("list")
        return list(self.objects.values())

    async def get(self, kind: Any, namespace: str, name: str) -> Any:  # noqa: ANN401 - of the store and of the objects
        if kind is PoCFleet:
            return None if name in self.deleted else PoCFleet.parse(body_of(name))
        self._meet(f"get {kind}/{name}")
        return self.objects.get((kind, name))

    async def apply(self, body: Body) -> Body:
        kind, name = key_of(body)
        self._meet(f"apply {kind}/{name}")
        self.versions += 1
        stored = copy.deepcopy(body)
        stored["metadata"]["resourceVersion"] = str(self.versions)
        self.objects[kind, name] = stored
        self.applied.append((kind, name))
        return stored

    async def delete(self, body: Body) -> None:
        kind, name = key_of(body)
        self._meet(f"delete {kind}")
        self.going.append((kind, name))

    async def ensure_token(self, namespace: str, name: str) -> bool:
        self._meet("token")
        return False

    async def write_status(self, fleet: PoCFleet, status: FleetStatus) -> str:
        name = fleet.metadata.name
        self._meet(f"status {name}")
        self.versions += 1
        self.statuses[name] = status.stored()
        return str(self.versions)

    async def write_conditions(
        self,
        resource: object,
        namespace: str,
        name: str,
        conditions: Iterable[Condition],
        **_: str,
    ) -> None:
        self.internal[name] = next(iter(conditions)).message

    async def evict_pod(self, pod: PodView) -> None:
        recorded = [one["uid"] for one in self.statuses[pod.labels[FLEET_LABEL]]["restarts"]]
        assert pod.uid in recorded
        self.evicted.append(pod.name)
        self._meet("evict")

    async def post_on_object(
        self, kind: str, namespace: str, name: str, uid: str, reason: str, message: str, *, warning: bool
    ) -> None:
        assert warning
        self.events.append((reason, message))

    async def list_bodies(self, resource: object, namespaces: object) -> list[Body]:
        self._meet("fleets")
        return self.bodies

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        found = next(one for one in self.statuses[name]["conditions"] if one["type"] == kind)
        return found["status"], found["reason"], found["message"]

    def reason(self, name: str) -> str:
        return str(self.statuses.get(name, {}).get("reason", ""))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REST_SECONDS", "BUSY_SECONDS", "GATHER_SECONDS", "LIST_SECONDS"):
        monkeypatch.setattr(fleets, name, 0.02)
    monkeypatch.setattr(fleet_surroundings, "SURROUNDINGS_SECONDS", 0.02)
    for name in ("REST_AGE_SECONDS", "BUSY_AGE_SECONDS"):
        monkeypatch.setattr(fleets, name, 0.0)
    monkeypatch.setattr(failing_objects, "FIRST_PAUSE_SECONDS", 0.1)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def kept(cluster: Cluster) -> AsyncIterator[Fleets]:
    store = cast(Any, cluster)
    found = Fleets(
        store,
        store,
        options=FleetOptions(),
        pods=PodCache(lambda: 0.0),
        metrics=Metrics(),
        may_act=lambda: True,
        clients=cast(Any, None),  # there are no pods to be asked
        judged=lambda _: None,
        gone=lambda _: None,
    )
    yield found
    await found.stop()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


async def test_a_fleet_that_makes_no_sense_harms_no_other(cluster: Cluster, kept: Fleets) -> None:
    kept.changed(body_of("bad", replicas="many"))
    kept.changed(body_of("good"))
    await until(lambda: ("StatefulSet", "good") in cluster.objects and "bad" in cluster.internal)
    assert "spec.replicas" in cluster.internal["bad"]
    assert kept.find("ns", "bad") is None
    assert kept.find("ns", "good") is not None
    # A spec that makes sense is tried at once.
    better = body_of("bad")
    better["metadata"] |= {"generation": 2, "resourceVersion": "9"}
    kept.changed(better)
    await until(lambda: ("StatefulSet", "bad") in cluster.objects)


async def test_an_exception_in_a_plan_pauses_one_fleet(
    cluster: Cluster, kept: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, turns = planning.plan, 0

    def plan(seen: Any) -> Any:  # noqa: ANN401
        nonlocal turns
        if seen.fleet.metadata.name == "bad":
            turns += 1
            raise RuntimeError("a defect")
        return real(seen)

    monkeypatch.setattr(fleets, "plan", plan)
    kept.changed(body_of("bad"))
    kept.changed(body_of("good"))
    await until(lambda: cluster.reason("good") and "bad" in cluster.internal)
    assert cluster.internal["bad"].startswith("RuntimeError: a defect; it stands still")
    await asyncio.sleep(0.5)
    assert turns <= 4


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("apply StatefulSet/demo", ObjectInvalid("spec: no"), 'StatefulSet "demo" is refused: spec: no'),
        ("apply Service/demo", StoreForbidden("HTTP 403"), "HTTP 403; install the chart with fleets.enabled=true"),
        ("get NetworkPolicy/demo", StoreForbidden("HTTP 403"), 'NetworkPolicy "demo" is refused'),
        ("token", StoreForbidden("HTTP 403"), 'Secret "vllm-poc-token" is refused: HTTP 403; install the chart'),
    ],
)
async def test_what_is_refused_is_told_and_the_rest_applied(
    cluster: Cluster, kept: Fleets, fault: str, error: Exception, says: str
) -> None:
    cluster.faults[fault] = error
    kept.changed(body_of("demo"))
    await until(lambda: cluster.reason("demo") == "ObjectRefused")
    assert says in cluster.statuses["demo"]["message"]
    assert len(cluster.objects) >= 4
    cluster.faults.clear()
    await until(lambda: cluster.reason("demo") == "ReplicasNotReady")
    assert len(cluster.objects) == 5


async def test_without_any_right_a_fleet_says_so(cluster: Cluster, kept: Fleets) -> None:
    kinds = ("StatefulSet/demo", "Service/demo", "Service/demo-pods", "PodDisruptionBudget/demo", "NetworkPolicy/demo")
    refused = StoreForbidden("HTTP 403")
    cluster.faults = {"list": refused, "token": refused, **{f"get {name}": refused for name in kinds}}
    kept.changed(body_of("demo"))
    await until(lambda: cluster.reason("demo") == "ObjectRefused")
    assert "fleets.enabled=true" in cluster.statuses["demo"]["message"]


@pytest.mark.parametrize("fault", ["list", "apply Service/demo", "status demo", "token"])
@pytest.mark.parametrize("error", [StoreUnavailable("away"), StaleObject("changed")])
async def test_an_api_server_that_is_away_is_asked_again(
    cluster: Cluster, kept: Fleets, fault: str, error: Exception
) -> None:
    cluster.faults[fault] = error
    kept.changed(body_of("demo"))
    await asyncio.sleep(0.2)
    assert not cluster.statuses
    cluster.faults.clear()
    await until(lambda: cluster.reason("demo") == "ReplicasNotReady")
    assert not cluster.internal


async def test_a_fleet_of_which_a_watch_has_missed_a_change_is_read_anew(cluster: Cluster, kept: Fleets) -> None:
    """Its status cannot be written over that of a newer version, which the watch may never tell of."""
    newer = body_of("demo", replicas=7)
    newer["metadata"] |= {"resourceVersion": "9", "generation": 2}
    cluster.bodies, cluster.faults["status demo"] = [newer], StaleObject("changed")
    kept.changed(body_of("demo", replicas=2))
    await asyncio.sleep(0.2)
    cluster.faults.clear()
    await until(lambda: cluster.statuses.get("demo", {}).get("ready") == "0/7")


async def test_what_is_as_it_should_be_is_not_applied_again(cluster: Cluster, kept: Fleets) -> None:
    kept.changed(body_of("demo"))
    await until(lambda: cluster.reason("demo"))
    await asyncio.sleep(0.5)
    assert len(cluster.applied) == 5


AHEAD = {"cache": {"existingClaim": "weights", "download": True}}


def changed(**spec: Any) -> Body:  # noqa: ANN401
    """The fleet with another image."""
    body = body_of("demo", **{**AHEAD, "image": "b", **spec})
    body["metadata"] |= {"generation": 2, "resourceVersion": "99"}
    return body


async def test_a_download_with_another_template_is_deleted_and_made_anew(cluster: Cluster, kept: Fleets) -> None:
    kept.changed(body_of("demo", **AHEAD))
    await until(lambda: cluster.reason("demo") == "Downloading")
    (job,) = (key for key in cluster.objects if key[0] == "Job")
    cluster.faults["delete Job"] = StoreForbidden("HTTP 403")
    kept.changed(changed())
    says = f'the deletion of Job "{job[1]}" is refused: HTTP 403; install the chart with fleets.enabled=true'
    await until(lambda: cluster.condition("demo", "Degraded") == ("True", "ObjectRefused", says))
    assert cluster.reason("demo") == "Downloading"
    cluster.faults.clear()
    await until(lambda: job in cluster.going)
    # While it is listed, another of its name cannot be made.
    await asyncio.sleep(0.1)
    assert cluster.applied.count(job) == 1
    del cluster.objects[job]
    await until(lambda: job in cluster.objects)
    assert cluster.objects[job]["spec"]["template"]["spec"]["containers"][0]["image"] == "b"
    await until(lambda: cluster.reason("demo") == "Downloading")


@pytest.mark.parametrize("error", [StoreForbidden("HTTP 403"), ObjectInvalid("denied")])
async def test_an_old_download_that_cannot_be_deleted_holds_up_nothing_else(
    cluster: Cluster, kept: Fleets, error: Exception
) -> None:
    kept.changed(body_of("demo", **AHEAD))
    await until(lambda: cluster.reason("demo") == "Downloading")
    cluster.faults["delete Job"] = error
    kept.changed(changed(cache={"existingClaim": "weights"}))
    await until(lambda: ("StatefulSet", "demo") in cluster.applied)
    await until(lambda: cluster.reason("demo") == "ReplicasNotReady")
    status, reason, message = cluster.condition("demo", "Degraded")
    assert (status, reason) == ("True", "ObjectRefused")
    assert "the deletion of Job" in message
    assert cluster.condition("demo", "Stalled")[0] == "False"
    cluster.faults.clear()
    await until(lambda: bool(cluster.going) and cluster.condition("demo", "Degraded")[0] == "False")


async def test_the_download_of_a_fleet_that_is_gone_is_left_alone(cluster: Cluster, kept: Fleets) -> None:
    kept.changed(body_of("demo", **AHEAD))
    await until(lambda: cluster.reason("demo") == "Downloading")
    cluster.deleted.add("demo")
    kept.changed(changed())
    await until(lambda: kept.find("ns", "demo") is None)
    assert not cluster.going


async def test_a_deleted_fleet_is_let_go(cluster: Cluster, kept: Fleets) -> None:
    kept.changed(body_of("demo"))
    await until(lambda: cluster.reason("demo"))
    going = body_of("demo")
    going["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:01Z", "resourceVersion": "99"}
    kept.changed(going)
    await until(lambda: kept.find("ns", "demo") is None)
    await asyncio.sleep(0.1)
    cluster.objects.clear()
    await asyncio.sleep(0.3)
    assert cluster.objects == {}
    kept.changed(going)  # nor does what is told late begin it anew
    await asyncio.sleep(0.1)
    assert cluster.objects == {}


@pytest.mark.parametrize("late", [False, True])
async def test_orphans_of_a_fleet_are_let_go_though_the_watch_does_not_tell(
    cluster: Cluster, kept: Fleets, late: bool
) -> None:
    """The garbage collector would delete what names an owner that is gone, and the pods with it."""
    kept.changed(body_of("demo"))
    await until(lambda: cluster.reason("demo"))
    cluster.deleted.add("demo")
    if late:  # and a list that is older tells of the fleet again
        kept.deleted("uid-demo")
        await until(lambda: kept.find("ns", "demo") is None)
        kept.changed(body_of("demo"))
    for body in cluster.objects.values():
        body["metadata"]["ownerReferences"] = []
    applied = len(cluster.applied)
    await until(lambda: kept.find("ns", "demo") is None)
    await asyncio.sleep(0.1)
    assert len(cluster.applied) == applied
    assert all(not body["metadata"]["ownerReferences"] for body in cluster.objects.values())


@pytest.fixture
async def kept_with_a_hung_pod(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleets]:
    monkeypatch.setattr(fleet_updates, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(fleet_updates, "EVICTED_SECONDS", 0.05)
    fake = cast(Any, cluster)
    cache = PodCache(lambda: 0.0)
    labels = {FLEET_LABEL: "demo"}
    containers = [Container(id=SERVER)]
    cache.put(PodView(name="demo-0", namespace="ns", uid="u0", labels=labels, ready=True, containers=containers))
    health = HungPods(cast(Any, cluster))
    found = Fleets(
        fake,
        fake,
        options=FleetOptions(),
        pods=cache,
        metrics=Metrics(),
        may_act=lambda: True,
        clients=cast(Any, None),  # the pod has no address to be asked at
        judged=lambda _: None,
        gone=lambda _: None,
        events=fake,
        health=health,
    )
    yield found
    await found.stop()


class HungPods(FleetHealth):
    """Looks that find pod u0 hung."""

    def found(self, fleet: str) -> dict[str, Watched]:
        return {"u0": STUCK}


async def test_a_hung_pod_is_recorded_evicted_and_told_of(cluster: Cluster, kept_with_a_hung_pod: Fleets) -> None:
    kept_with_a_hung_pod.changed(body_of("demo"))
    await until(lambda: len(cluster.evicted) > 1)
    assert set(cluster.evicted) == {"demo-0"}
    assert len(cluster.statuses["demo"]["restarts"]) == 1
    assert [(reason, message.split(":")[0]) for reason, message in cluster.events] == [("PodHung", "demo-0 is hung")]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (EvictionRefused("the budget"), "waiting to evict pod demo-0: the budget"),
        (
            StoreForbidden("HTTP 403"),
            "pod demo-0 cannot be evicted (HTTP 403): install the chart with fleets.enabled=true",
        ),
    ],
)
async def test_why_a_hung_pod_stays_is_told(
    cluster: Cluster, kept_with_a_hung_pod: Fleets, error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each turn asks the API server again.
    monkeypatch.setattr("poc_operator.controller.fleet_updates.BUSY_SECONDS", 0.0)
    cluster.faults["evict"] = error
    kept_with_a_hung_pod.changed(body_of("demo"))
    await until(lambda: says in json.dumps(cluster.statuses.get("demo", {})))


async def test_fleets_that_the_watch_has_missed_are_found(cluster: Cluster, kept: Fleets) -> None:
    kept.changed(body_of("gone"))
    cluster.bodies = [body_of("missed")]
    looking = asyncio.create_task(kept.run())
    await until(lambda: cluster.reason("missed") and kept.find("ns", "gone") is None)
    cluster.faults["fleets"] = StoreUnavailable("away")
    await asyncio.sleep(0.1)
    assert not looking.done()
    looking.cancel()
