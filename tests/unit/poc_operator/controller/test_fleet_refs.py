# SPDX-License-Identifier: Apache-2.0
"""What work takes from its fleet: pods by a label, the port, and the groups of a round."""

from dataclasses import replace
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet import MAX_REPLICAS, PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, WORKER_LABELS, Resource
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, PoCRound
from poc_operator.clients.errors import StoreUnavailable, UnreadableObject
from poc_operator.controller.fleet_refs import MISSING_SECONDS, FleetRefs, missing_fleet, with_fleet
from poc_operator.observed import Container, PodView
from poc_operator.planning.reaping import WorkRecord
from poc_operator.planning.waiting import waits_for
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import a_calibration, a_pod, a_round, look, says
from tests.unit.poc_operator.fleets.build import a_fleet
from tests.unit.poc_operator.fleets.test_groups import spanning, templates_of


def of_fleet(**spec: Any) -> PoCRound:  # noqa: ANN401
    """A round of a fleet, changed by ``spec``."""
    return a_round(selector=None, fleetRef={"name": "demo"}, **spec)


class Store:
    """A store with one fleet or none; counts the questions."""

    def __init__(self, fleet: PoCFleet | None = None, error: Exception | None = None) -> None:
        self.fleet, self.error, self.asked = fleet, error, 0

    async def get(self, resource: type[Resource], namespace: str, name: str) -> PoCFleet | None:
        assert (resource, namespace, name) == (PoCFleet, "ns", "demo")
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.fleet


async def test_what_the_watch_has_told_of_is_not_asked_for() -> None:
    store, fleet = Store(), a_fleet()
    refs = FleetRefs(store, lambda *_: fleet)  # type: ignore[arg-type]
    assert await refs.find("ns", "demo") is fleet
    assert store.asked == 0


async def test_a_fleet_that_the_watch_has_not_told_of_is_asked_for() -> None:
    store = Store(a_fleet())
    refs = FleetRefs(store, lambda *_: None)  # type: ignore[arg-type]
    assert await refs.find("ns", "demo") == store.fleet


async def test_a_missing_fleet_is_asked_for_now_and_then() -> None:
    store, now = Store(), [0.0]
    refs = FleetRefs(store, lambda *_: None, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        assert await refs.find("ns", "demo") is None
    assert store.asked == 1
    now[0] += MISSING_SECONDS
    store.fleet = a_fleet()
    assert await refs.find("ns", "demo") == store.fleet


async def test_a_fleet_that_makes_no_sense_is_none() -> None:
    body = {"metadata": {"name": "demo", "namespace": "ns", "generation": 1}}
    refs = FleetRefs(Store(error=UnreadableObject("no", body)), lambda *_: None)  # type: ignore[arg-type]
    assert await refs.find("ns", "demo") is None


async def test_pods_are_barred_by_their_fleets_whatever_selects_them() -> None:
    own = {FLEET_LABEL: "demo"}
    store = Store(a_fleet(selfCheck={}))  # which the watch of a new process has not told of yet
    refs = FleetRefs(store, lambda *_: None)  # type: ignore[arg-type]
    pods = [a_pod("a", labels=own), a_pod("b"), a_pod("c", labels=own)]
    found = await refs.with_bars(pods)
    assert [(pod.name, bool(pod.barred)) for pod in found] == [("a", True), ("b", False), ("c", True)]
    assert store.asked == 1
    assert await refs.with_bars(pods[1:2]) == pods[1:2]
    store.fleet = None  # deleted with --cascade=orphan
    assert await refs.with_bars(pods) == pods


async def test_a_fleet_that_cannot_be_asked_for_lets_nobody_in() -> None:
    refs = FleetRefs(Store(error=StoreUnavailable("away")), lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        await refs.with_bars([a_pod("a", labels={FLEET_LABEL: "demo"})])


def test_the_pods_are_those_with_the_fleets_label() -> None:
    assert str(of_fleet().spec.pods) == f"{FLEET_LABEL}=demo"
    assert a_round(selector=None).spec.pods.match_labels == WORKER_LABELS


@pytest.mark.parametrize(
    ("replicas", "nodes", "groups"),
    [
        (4, {"first": 0, "last": 0, "count": 1}, 4),
        (4, {"first": 0, "last": 2, "count": 3}, 2),
        (4, {"first": 0, "last": 0, "count": 1, "groups": 2}, 2),
        (0, {"first": 0, "last": 0, "count": 1}, None),
        (MAX_REPLICAS, {"first": 0, "last": 1999, "count": 2000}, 1),
        (MAX_REPLICAS, {"first": 0, "last": MAX_SLOTS - 1, "count": MAX_SLOTS}, 1),
    ],
)
def test_a_rounds_groups_follow_the_size_that_the_fleet_is_to_have(
    replicas: int, nodes: dict[str, int], groups: int | None
) -> None:
    round_ = of_fleet(nodes=nodes)
    found = with_fleet(round_, a_fleet(replicas=replicas, port=9000), [])
    assert (found.spec.nodes.groups, found.spec.port) == (groups, 9000)
    assert round_.spec.port == 8000


def test_a_round_of_a_spanning_fleet_has_a_group_for_each_leader() -> None:
    """Workers follow their leaders: neither the groups nor the slots of a round know of them."""
    fleet = spanning(replicas=3)
    leader, worker = (template["metadata"]["labels"] for template in templates_of(fleet))
    made = [
        a_pod(f"demo-{group}{'-1' if follows else ''}", labels=worker if follows else leader)
        for group in range(2)  # the third group has yet to come
        for follows in (False, True)
    ]
    round_ = with_fleet(of_fleet(nodes={"first": 0, "last": 0, "count": 1}), fleet, made)
    assert round_.spec.nodes.groups == 3
    selected = [pod for pod in made if round_.spec.pods.matches(pod.labels)]
    assert [pod.name for pod in selected] == ["demo-0", "demo-1"]
    slots = plan(look(round_, *((pod, says()) for pod in selected))).status.assignments
    assert [slot.uid for slot in slots] == ["demo-0", "demo-1", None]


def test_groups_that_are_fixed_stay_when_the_fleet_is_scaled() -> None:
    round_ = of_fleet(nodes={"first": 0, "last": 0, "count": 1})
    begun = round_.model_copy(update={"status": round_.status.model_copy(update={"groups": 4})})
    assert with_fleet(begun, a_fleet(replicas=2), []).spec.nodes.groups == 4


def test_pods_that_a_deleted_fleet_left_behind_keep_their_port() -> None:
    pod = PodView(name="p", namespace="ns", uid="u", containers=(Container(id="c", ports=frozenset({9000})),))
    assert with_fleet(of_fleet(), None, [pod]).spec.port == 9000
    assert with_fleet(of_fleet(), None, []).spec.port == 8000


def test_pods_serve_on_where_the_port_of_their_fleet_has_changed() -> None:
    def a_pod_at(port: int) -> PodView:
        return PodView(name="p", namespace="ns", uid="u", containers=(Container(id="c", ports=frozenset({port})),))

    fleet = a_fleet(port=9001)
    assert with_fleet(of_fleet(), fleet, [a_pod_at(9000), a_pod_at(9000)]).spec.port == 9000
    assert with_fleet(of_fleet(), fleet, [a_pod_at(9000), a_pod_at(9001)]).spec.port == 9001


def test_a_round_without_its_fleet_waits_and_says_for_what() -> None:
    round_ = of_fleet()
    missing = missing_fleet(round_, None)
    assert missing == 'there is no PoCFleet "demo" in namespace "ns" (spec.fleetRef): create it'
    assert missing_fleet(round_, a_fleet()) is None
    assert missing_fleet(a_round(), None) is None
    for pods in ([], [a_pod("p")]):
        seen = replace(look(round_, *((pod, says()) for pod in pods)), missing_fleet=missing)
        status = plan(seen).status
        assert status.assignments == []
        assert missing in status.message
        reasons = {found.reason for found in status.own_conditions if found.status == "False"}
        assert Reason.FLEET_NOT_FOUND in reasons


def test_other_work_without_its_fleet_says_so_too() -> None:
    seen = look(of_fleet())
    missing = replace(seen, missing_fleet="there is none")
    assert waits_for(missing) == (False, Reason.FLEET_NOT_FOUND, "there is none")
    _, reason, message = waits_for(seen)
    assert reason is Reason.NO_MATCHING_PODS
    assert 'the PoCFleet "demo" has no pods yet: look at kubectl -n ns describe pocfleet demo' in message
    assert a_calibration().spec.fleet_ref is None


def test_the_reaper_knows_the_pods_of_a_fleets_round() -> None:
    metadata = {"uid": "r", "name": "r", "namespace": "ns"}
    record = WorkRecord.parse({"metadata": metadata, "spec": {"fleetRef": {"name": "demo"}, "port": 8000}})
    container = Container(id="c", ports=frozenset({9000}))
    pod = PodView(name="p", namespace="ns", uid="u", labels={FLEET_LABEL: "demo"}, containers=(container,))
    assert record.selects(pod)
    assert record.port_of(pod) == 9000
    assert record.port_of(PodView(name="p", namespace="ns", uid="u")) == 8000
    other = WorkRecord.parse({"metadata": metadata, "spec": {"port": 7}})
    assert other.port_of(pod) == 7
    assert not other.selects(pod)
