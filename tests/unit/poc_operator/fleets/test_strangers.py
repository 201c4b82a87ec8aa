# SPDX-License-Identifier: Apache-2.0
"""Pods and objects of others that look like a fleet's: they have its label, or the name of what it keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import GROUPS_KIND
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.checked_pods import with_bars
from poc_operator.fleets.groups import HELD
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, plan
from poc_operator.fleets.resolve import Refusal
from poc_operator.observed import Owner, PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets import test_groups as groups
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet
from tests.unit.poc_operator.fleets.test_healing import SERVER, STUCK
from tests.unit.poc_operator.fleets.test_update import (
    FOUR,
    NEW,
    SET,
    a_pod,
    after,
    evicted,
    fleet_of,
    in_phase,
    objects_of,
)

OWN = Owner(kind="StatefulSet", name="demo", uid="set-uid")
OTHERS = {
    "a Deployment": Owner(kind="ReplicaSet", name="chat-5d8", uid="x"),
    "a StatefulSet": Owner(kind="StatefulSet", name="other", uid="x"),
    "a Job": Owner(kind="Job", name="demo", uid="x"),
    "nobody": None,
}


def of(owner: Owner | None, pod: PodView, name: str = "") -> PodView:
    return replace(pod, owner=owner, name=name or pod.name, uid=f"{pod.uid}-{name}")


def there(fleet: PoCFleet, **metadata: Any) -> dict[Key, Any]:  # noqa: ANN401
    """The fleet's objects as the API server has them; ``metadata`` is more of the StatefulSet's."""
    found = objects_of(fleet)
    found[SET]["metadata"] |= {"uid": "set-uid", **metadata}
    return found


def look(fleet: PoCFleet, pods: Sequence[PodView], objects: Mapping[Key, Any] | None = None, **seen: Any) -> FleetStep:  # noqa: ANN401
    objects = there(fleet) if objects is None else objects
    return plan(FleetSnapshot(fleet=fleet, around=AROUND, now=NOW, objects=objects, pods=pods, **seen))


def degraded(step: FleetStep) -> tuple[str, str]:
    found = step.status.own_conditions["Degraded"]
    return found.reason if found.status == "True" else "", found.message


@pytest.mark.parametrize("owner", OTHERS.values(), ids=OTHERS)
def test_pods_of_others_are_not_updated_nor_counted_and_told_of(owner: Owner | None) -> None:
    stranger = of(owner, a_pod(9), "other-9")
    own = [of(OWN, pod) for pod in FOUR]
    step = look(fleet_of(update={"canary": False}), [stranger, *own])
    assert evicted(step) == ["demo-3"]
    done = look(fleet_of(in_phase("Rolling")), [stranger, *(of(OWN, a_pod(n, NEW)) for n in range(4))])
    assert (done.status.update.phase, done.status.replicas, done.status.ready) == ("Complete", 4, "4/4")
    assert [pod.name for pod in done.status.pods] == ["demo-0", "demo-1", "demo-2", "demo-3"]
    keeper = f"{owner.kind} {owner.name}" if owner else "nobody keeps it"
    says = (
        f"pods of others have the label poc.gonka.ai/fleet=demo: other-9 ({keeper}); the fleet leaves them alone: take "
        "the label from them"
    )
    ready = done.status.own_conditions["Ready"]
    assert (ready.status, ready.message, done.status.message) == ("True", *[f"all 4 replicas are ready; {says}"] * 2)
    # Nobody is paged: the fleet is well. An Event warns, once.
    assert (degraded(done)[0], done.status.own_conditions["Stalled"].status) == ("", "False")
    told = [(one.reason, one.message, one.warning) for one in done.events if one.reason == Reason.PODS_OF_OTHERS]
    assert told == [(Reason.PODS_OF_OTHERS, says, True)]
    new = [of(OWN, a_pod(n, NEW)) for n in range(4)]
    assert not look(fleet_of(after(done)), [stranger, of(owner, a_pod(9), "other-8"), *new]).events
    alone = look(fleet_of(after(done)), new)
    assert alone.status.message == "all 4 replicas are ready"
    assert [one.reason for one in look(fleet_of(after(alone)), [stranger, *new]).events] == [Reason.PODS_OF_OTHERS]


def test_a_fleet_that_cannot_be_as_it_should_tells_of_pods_of_others_too() -> None:
    fleet = fleet_of(model={"preset": "none"}, selfCheck={"enabled": False})
    step = plan(FleetSnapshot(fleet=fleet, around=AROUND, now=NOW, pods=[of(None, a_pod(9), "other-9")]))
    assert step.status.reason == Reason.PRESET_UNUSABLE
    assert "other-9 (nobody keeps it)" in step.status.message
    assert [one.reason for one in step.events] == [Reason.PODS_OF_OTHERS]


def test_pods_of_others_do_not_stand_in_for_those_that_are_away() -> None:
    away = [of(OWN, FOUR[0]), of(OWN, FOUR[1]), of(OWN, a_pod(2, NEW, ready=False)), of(OWN, FOUR[3])]
    strangers = [of(OTHERS["a StatefulSet"], a_pod(n, NEW), f"other-{n}") for n in range(4)]
    assert not look(fleet_of(in_phase("Rolling")), [*strangers, *away]).evict


def hung(*pods: PodView, objects: Mapping[Key, Any] | None = None, **seen: Any) -> FleetStep:  # noqa: ANN401
    """A step of a fleet that has recorded the restart of these pods, which are hung."""
    found = [replace(pod, containers=[replace(pod.containers[0], id=SERVER)]) for pod in pods]
    restarts = [{"name": pod.name, "uid": pod.uid, "time": NOW.isoformat()} for pod in found]
    fleet = fleet_of({"restarts": restarts}, replicas=1, healing={"restartsPerHour": 9})
    return look(fleet, found, objects, health={pod.uid: STUCK for pod in found}, **seen)


@pytest.mark.parametrize("owner", OTHERS.values(), ids=OTHERS)
def test_pods_of_others_that_hang_are_left_alone(owner: Owner | None) -> None:
    assert evicted(hung(of(OWN, a_pod(0)))) == ["demo-0"]
    step = hung(of(owner, a_pod(1), "other-1"))
    assert not step.evict
    assert "other-1" in step.status.message


def test_pods_of_another_stateful_set_of_the_fleets_name_are_left_alone() -> None:
    pod, fleet = of(OWN, a_pod(0)), fleet_of(replicas=1)
    helm = [{"kind": "Release", "name": "helm", "uid": "x", "controller": True}]
    step = hung(pod, objects=there(fleet, ownerReferences=helm))
    assert (step.status.reason, list(step.evict)) == (Reason.OBJECT_CONFLICT, [])
    # One without the fleet's label is not listed, and is met when the fleet's own is applied.
    conflict = Refusal(Reason.OBJECT_CONFLICT, "StatefulSet exists")
    objects = {key: body for key, body in there(fleet).items() if key != SET}
    assert not hung(pod, objects=objects, refused=conflict).evict
    assert evicted(hung(pod, objects=objects)) == ["demo-0"]
    # One that was there before, and is gone, leaves pods that go too.
    assert not hung(of(OWN._replace(uid="earlier"), a_pod(0))).evict


@pytest.mark.parametrize("owner", [OWN, None])
def test_an_orphaned_stateful_set_brings_its_pods_along(owner: Owner | None) -> None:
    fleet = fleet_of(update={"canary": False})
    objects = there(fleet, ownerReferences=[])
    step = look(fleet, [of(owner, pod) for pod in FOUR], objects)
    assert [body["kind"] for body in step.apply] == ["StatefulSet"], "it is adopted"
    assert (step.status.ready, degraded(step)[0]) == ("4/4", "")
    adopted = look(fleet, [of(owner, pod) for pod in FOUR])
    assert evicted(adopted) == ["demo-3"]


def test_a_pod_of_others_is_not_taken_for_a_leader_with_its_number() -> None:
    leaders = Owner(kind="StatefulSet", name="demo", uid="leaders")
    own = [of(leaders, a_pod(n)) for n in range(3)]
    assert [one.pod.name for one in groups.updating(own).evict] == ["demo-2"]
    stranger = of(OTHERS["a StatefulSet"], a_pod(2, NEW), "other-2")
    step = groups.updating([*own, stranger], partition=3)
    # Past leader 2, which serves, LeaderWorkerSet would replace it at once.
    assert groups.partition(step) == HELD


@pytest.mark.parametrize(
    "owner",
    [
        [],
        [{"kind": "PoCFleet", "name": "demo", "uid": "fleet-uid", "controller": True}],
        [{"kind": GROUPS_KIND, "name": "demo", "uid": "earlier", "controller": True}],
    ],
    ids=["nobody", "the fleet", "an earlier LeaderWorkerSet"],
)
def test_leaders_are_those_that_the_leader_worker_set_has_made(owner: list[Any]) -> None:
    fleet = groups.spanning(replicas=1, status={})
    objects = groups.seen_by_kubernetes(fleet)
    pods = [of(Owner(kind="StatefulSet", name="demo", uid="leaders"), a_pod(0))]
    assert groups.step_of(fleet, objects=objects, pods=pods).status.replicas == 1
    objects[SET]["metadata"]["ownerReferences"] = owner
    assert groups.step_of(fleet, objects=objects, pods=pods).status.replicas == 0


def test_pods_of_others_take_no_part_in_self_checks_and_no_slot_where_there_are_some() -> None:
    stranger = replace(of(OTHERS["a Deployment"], a_pod(1), "chat-5d8-x"), ip="10.0.0.9")
    fleet = a_fleet(selfCheck={})
    step = look(fleet, [replace(of(OWN, a_pod(0)), ip="10.0.0.1"), stranger])
    assert [one.pod.name for one in step.checks] == ["demo-0"]
    (barred,) = with_bars(fleet, [stranger])
    assert barred.barred == "self-check: the fleet checks its own pods alone (ReplicaSet chat-5d8)"
    assert with_bars(a_fleet(), [stranger])[0].barred == ""
