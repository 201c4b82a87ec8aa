# SPDX-License-Identifier: Apache-2.0
"""What is done about a fleet's objects, and what its status says, as tables over ``plan()``."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hack.generate.crds import schema
from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.checked_pods import CheckAnswer
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.fleets.render import Object
from poc_operator.fleets.resolve import Invalid, Refusal
from poc_operator.fleets.stages import PATIENCE_SECONDS
from poc_operator.fleets.strangers import foreign
from poc_operator.observed import Container, PodView
from tests.support.builders.specs import specs
from tests.support.checks.admission import admitted
from tests.support.checks.kstatus import kstatus
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet
from tests.unit.poc_operator.fleets.test_self_check import engine

Objects = dict[Key, Any]


def look(
    fleet: PoCFleet,
    objects: Mapping[Key, Any] | None = None,
    pods: Sequence[PodView] = (),
    **seen: Any,  # noqa: ANN401 - fields of the snapshot
) -> FleetStep:
    return plan(FleetSnapshot(fleet=fleet, around=AROUND, now=NOW, objects=objects or {}, pods=pods, **seen))


def stored(fleet: PoCFleet, revision: str = "demo-1") -> Objects:
    """The fleet's objects as the API server has them once they are applied."""
    found = {key_of(body): copy.deepcopy(body) for body in look(fleet).apply}
    for version, body in enumerate(found.values()):
        body["metadata"] |= {"resourceVersion": str(version), "generation": 1}
        body["spec"]["of others"] = True
    found["StatefulSet", fleet.metadata.name]["status"] = {"updateRevision": revision, "observedGeneration": 1}
    return found


def a_pod(number: int, *, ready: bool = True, revision: str = "demo-1", **fields: Any) -> PodView:  # noqa: ANN401
    labels = {FLEET_LABEL: "demo", "controller-revision-hash": revision}
    fields = {"waiting_for": "" if ready else "ContainersNotReady", **fields}
    return PodView(name=f"demo-{number}", namespace="ns", uid=f"u{number}", labels=labels, ready=ready, **fields)


def conditions(step: FleetStep) -> dict[str, str]:
    return {kind: found.status for kind, found in step.status.own_conditions.items()}


def test_what_is_missing_is_applied_in_the_order_of_need() -> None:
    step = look(a_fleet())
    assert [key_of(body)[0] for body in step.apply][-1] == "StatefulSet"
    assert len(step.apply) == 5
    assert step.needs_token
    assert not look(a_fleet(auth={"open": True}, callbackAllow=["*"])).needs_token


def test_what_is_as_wanted_is_left_alone() -> None:
    assert not look(a_fleet(), stored(a_fleet())).apply


DRIFT: dict[str, tuple[Key, Callable[[Any], Any]]] = {
    "replicas": (("StatefulSet", "demo"), lambda body: body["spec"].update(replicas=9)),
    "image": (
        ("StatefulSet", "demo"),
        lambda body: body["spec"]["template"]["spec"]["containers"][0].update(image="other"),
    ),
    "a variable": (
        ("StatefulSet", "demo"),
        lambda body: body["spec"]["template"]["spec"]["containers"][0]["env"].pop(),
    ),
    "the owner": (("Service", "demo"), lambda body: body["metadata"].update(ownerReferences=[])),
    "a label": (("Service", "demo-pods"), lambda body: body["metadata"]["labels"].pop("app.kubernetes.io/name")),
    "the signature": (("NetworkPolicy", "demo"), lambda body: body["metadata"].pop("annotations")),
    "a selector": (("PodDisruptionBudget", "demo"), lambda body: body["spec"].update(selector={})),
}


@pytest.mark.parametrize(("key", "change"), DRIFT.values(), ids=DRIFT)
def test_a_change_of_what_is_wanted_is_put_back(key: Key, change: Callable[[Any], Any]) -> None:
    objects = stored(a_fleet())
    change(objects[key])
    assert [key_of(body) for body in look(a_fleet(), objects).apply] == [key]


def test_an_object_that_is_written_in_another_way_is_applied_once() -> None:
    objects = stored(a_fleet())
    key = ("StatefulSet", "demo")
    objects[key]["spec"]["replicas"] = "1"
    assert look(a_fleet(), objects).apply
    version = objects[key]["metadata"]["resourceVersion"]
    assert not look(a_fleet(), objects, settled={key: version}).apply
    assert look(a_fleet(), objects, settled={key: "earlier"}).apply
    changed = look(a_fleet(image="registry/worker:2"), objects, settled={key: version})
    assert [key_of(body) for body in changed.apply] == [key]


def test_an_object_that_is_being_deleted_is_waited_for() -> None:
    objects = stored(a_fleet())
    body = objects["Service", "demo"]
    body["metadata"] |= {"deletionTimestamp": "now", "labels": {}}
    assert not look(a_fleet(), objects).apply


def test_a_fleet_adopts_what_was_orphaned_and_touches_nothing_of_others() -> None:
    fleet, objects = a_fleet(), stored(a_fleet(uid="earlier"))
    for body in objects.values():
        body["metadata"]["ownerReferences"] = []
    assert len(look(fleet, objects).apply) == 5
    for change, says in (
        (
            {"ownerReferences": [{"kind": "PoCFleet", "name": "demo", "uid": "x", "controller": True}]},
            "(uid x): delete",
        ),
        ({"labels": {}}, "belongs to no fleet"),
    ):
        strange = copy.deepcopy(objects)
        strange["Service", "demo"]["metadata"] |= change
        step = look(fleet, strange)
        assert not step.apply
        assert step.status.reason == Reason.OBJECT_CONFLICT
        assert says in step.status.message


def test_a_stranger_is_told_from_the_fleets_own() -> None:
    fleet = a_fleet()
    owner = {"kind": "PoCFleet", "name": "demo", "uid": fleet.metadata.uid, "controller": True}
    labels = {FLEET_LABEL: "demo"}
    own: list[Object] = [
        {"ownerReferences": [owner]},
        {"labels": labels},
        {"labels": labels, "ownerReferences": [owner]},
    ]
    assert [foreign(fleet, {"kind": "Service", "metadata": {"name": "demo", **one}}) for one in own] == [None] * 3
    other = foreign(fleet, {"kind": "Service", "metadata": {"name": "demo"}})
    assert other is not None
    assert 'Service "demo" exists and belongs to no fleet' in other.message


def test_pods_that_load() -> None:
    step = look(a_fleet(replicas=3), stored(a_fleet(replicas=3)), [a_pod(0), a_pod(1, ready=False)])
    status = step.status
    assert (status.replicas, status.ready_replicas, status.ready) == (2, 1, "1/3")
    assert status.message == "1 of 3 replicas are ready: 1 pod is to be created, demo-1 (Pending)"
    assert conditions(step) == {"Ready": "False", "Progressing": "True", "Degraded": "False", "Stalled": "False"}


def test_pods_that_cannot_run() -> None:
    pod = a_pod(0, ready=False, waiting_for="CrashLoopBackOff", node="node-1")
    step = look(a_fleet(), stored(a_fleet()), [pod])
    assert step.status.reason == Reason.PODS_FAILING
    assert step.status.message == "demo-0 (CrashLoopBackOff) cannot run"
    assert conditions(step)["Degraded"] == "True"


def test_a_condition_has_the_words_of_the_registry() -> None:
    told = 'Back-off pulling image "acme/vllm:1": ErrImagePull: failed to authorize: 401 Unauthorized'
    pod = an_unready_pod(0, "ImagePullBackOff", waiting_message=told)
    found = look(a_fleet(), stored(a_fleet()), [pod]).status
    assert found.message == f"demo-0 (ImagePullBackOff: {told}) cannot run"
    assert {found.own_conditions[kind].message for kind in ("Ready", "Degraded", "Stalled")} == {found.message}


def an_unready_pod(number: int, why: str, age: int = PATIENCE_SECONDS, **fields: Any) -> PodView:  # noqa: ANN401
    times = {"created": NOW - timedelta(seconds=age), "taken": NOW - timedelta(seconds=age)}
    return a_pod(number, ready=False, waiting_for=why, **{"node": "node-1", **times, **fields})


@pytest.mark.parametrize(
    ("pod", "stalled"),
    [
        pytest.param(an_unready_pod(0, "ErrImagePull"), True, id="no image"),
        pytest.param(an_unready_pod(0, "ImagePullBackOff"), True, id="no image, and the next try waits"),
        pytest.param(an_unready_pod(0, "InvalidImageName"), True, id="no name of an image"),
        pytest.param(an_unready_pod(0, "ErrImageNeverPull"), True, id="an image that is not to be pulled"),
        pytest.param(an_unready_pod(0, "CreateContainerConfigError"), True, id="a Secret is missing"),
        pytest.param(an_unready_pod(0, "ErrImagePull", PATIENCE_SECONDS - 1), False, id="a registry away for a moment"),
        pytest.param(an_unready_pod(0, "CrashLoopBackOff", 9000), False, id="crashes"),
        pytest.param(an_unready_pod(0, "CreateContainerError", 9000), False, id="the runtime may recover"),
        pytest.param(an_unready_pod(0, "ContainerCreating", 9000), False, id="a large image"),
        pytest.param(an_unready_pod(0, "0/3 nodes are available", 9000, node="", taken=None), False, id="no node yet"),
    ],
)
def test_what_only_a_person_can_end_stalls_the_fleet(pod: PodView, stalled: bool) -> None:
    fleet = a_fleet(replicas=2)
    step = look(fleet, stored(fleet), [pod, a_pod(1)])
    found = conditions(step)
    assert (found["Ready"], found["Stalled"]) == ("False", str(stalled))
    # Nothing goes on in the other pod either: it is ready.
    assert found["Progressing"] == str(not stalled)
    body = {"metadata": {"generation": fleet.metadata.generation}, "status": step.status.stored()}
    assert kstatus(body) == ("Failed" if stalled else "InProgress")


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="another is to be created"),
        pytest.param([a_pod(1, ready=False)], id="another loads"),
        pytest.param([an_unready_pod(1, "CrashLoopBackOff")], id="another crashes"),
    ],
)
def test_a_fleet_may_be_stalled_while_other_pods_come_up(others: list[PodView]) -> None:
    fleet = a_fleet(replicas=2)
    step = look(fleet, stored(fleet), [an_unready_pod(0, "ErrImagePull"), *others])
    assert conditions(step) == {"Ready": "False", "Progressing": "True", "Degraded": "True", "Stalled": "True"}


def test_a_new_template_ends_what_the_one_before_has_stalled() -> None:
    """Also before Kubernetes has told of it: who applies a spec must not read that this one has failed."""
    fleet, pods = a_fleet(), [an_unready_pod(0, "ErrImagePull")]
    before = look(fleet, stored(fleet), pods)
    assert conditions(before)["Stalled"] == "True"
    corrected = a_fleet(image="registry/other:2")
    corrected = corrected.model_copy(update={"status": before.status})
    assert conditions(look(corrected, stored(fleet), pods))["Stalled"] == "False"
    # And while the pod of before has yet to go.
    assert conditions(look(corrected, stored(corrected, "demo-2"), pods))["Stalled"] == "False"


@pytest.mark.parametrize(
    ("update", "stalled"), [({"strategy": "Never"}, "True"), ({"paused": True}, "True"), ({}, "False")]
)
def test_a_pod_of_before_that_nobody_replaces_stalls_the_fleet(update: Any, stalled: str) -> None:  # noqa: ANN401
    fleet = a_fleet(replicas=1, update=update)
    step = look(fleet, stored(fleet, "demo-2"), [an_unready_pod(0, "ErrImagePull", 9000)])
    found = conditions(step)
    assert (found["Stalled"], found["Progressing"]) == (stalled, str(stalled == "False"))


@pytest.mark.parametrize(
    "words",
    [
        '0/3 nodes are available: persistentvolumeclaim "weights" not found.',
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        "Unschedulable",
    ],
)
def test_pods_that_no_kubernetes_node_can_take(words: str) -> None:
    fleet, waiting = a_fleet(replicas=2), a_pod(0, ready=False, waiting_for=words)
    step = look(fleet, stored(fleet), [waiting, a_pod(1)])
    assert step.status.reason == Reason.PODS_UNSCHEDULABLE
    assert step.status.message == f"no Kubernetes node can take demo-0 ({words})"
    assert conditions(step) == {"Ready": "False", "Progressing": "True", "Degraded": "True", "Stalled": "False"}
    # What crashes is worse, and both are named.
    crashes = a_pod(1, ready=False, waiting_for="CrashLoopBackOff", node="node-1")
    both = look(fleet, stored(fleet), [waiting, crashes]).status
    assert both.reason == Reason.PODS_FAILING
    assert both.message == f"demo-0 ({words}), demo-1 (CrashLoopBackOff) cannot run"


def test_all_ready() -> None:
    step = look(a_fleet(replicas=2), stored(a_fleet(replicas=2)), [a_pod(0), a_pod(1)])
    assert (step.status.ready, step.status.updated_replicas, step.status.reason) == ("2/2", 2, "AllReplicasReady")
    assert conditions(step) == {"Ready": "True", "Progressing": "False", "Degraded": "False", "Stalled": "False"}
    assert step.status.selector == "poc.gonka.ai/fleet=demo"


def test_a_revision_that_is_not_known_yet_is_waited_for() -> None:
    objects = stored(a_fleet())
    body = objects["StatefulSet", "demo"]
    body["metadata"]["generation"] = 2
    step = look(a_fleet(), objects, [a_pod(0)])
    assert (step.status.reason, conditions(step)["Ready"]) == (Reason.REPLICAS_NOT_READY, "False")
    assert step.status.message == "Kubernetes has yet to see the StatefulSet as it is"
    assert conditions(look(a_fleet(), {}, [a_pod(0)]))["Ready"] == "False"


def test_scaled_to_nothing_is_ready() -> None:
    assert conditions(look(a_fleet(replicas=0), stored(a_fleet(replicas=0))))["Ready"] == "True"
    leaving = look(a_fleet(replicas=0), stored(a_fleet(replicas=0)), [a_pod(0)])
    assert leaving.status.message == "1 pod is to go"


def test_pods_of_an_old_revision_serve_on() -> None:
    objects = stored(a_fleet(replicas=2), revision="demo-2")
    fleet = a_fleet(replicas=2, update={"strategy": "Never"})
    step = look(fleet, objects, [a_pod(0), a_pod(1, revision="demo-2")])
    status = step.status
    assert not step.evict
    assert (status.updated_replicas, status.current_revision, status.update_revision) == (1, "demo-1", "demo-2")
    assert conditions(step) == {"Ready": "True", "Progressing": "True", "Degraded": "False", "Stalled": "False"}
    assert "1 of 2 pods have an old revision: delete them when no round runs" in status.message


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"model": {"preset": "none"}}, Reason.PRESET_UNUSABLE),
        ({"podTemplate": {"spec": {"containers": 1}}}, Reason.POD_TEMPLATE_INVALID),
    ],
)
def test_a_fleet_that_cannot_be_kept_is_stalled_and_its_pods_stay(spec: dict[str, Any], reason: Reason) -> None:
    step = look(a_fleet(**spec), stored(a_fleet()), [a_pod(0)])
    assert not step.apply
    assert (step.status.reason, step.status.ready_replicas) == (reason, 1)
    assert conditions(step) == {"Ready": "False", "Progressing": "False", "Degraded": "True", "Stalled": "True"}


def test_what_the_api_server_refuses_is_told_and_tried_again() -> None:
    refused = Refusal(Reason.OBJECT_REFUSED, 'StatefulSet "demo" is refused: no')
    step = look(a_fleet(), refused=refused)
    assert step.apply
    assert (step.status.reason, conditions(step)["Stalled"]) == (Reason.OBJECT_REFUSED, "True")


def test_the_figures_of_a_preset_are_of_all_replicas() -> None:
    status = look(a_fleet(model={"preset": "minimax-m2.7"}, replicas=4)).status
    assert (status.model, status.gpu_product, status.gpu_count) == ("MiniMaxAI/MiniMax-M2.7", "NVIDIA-H200", 2)
    assert (status.seq_len, status.k_dim, status.expected_nonces_per_minute) == (1024, 12, 4 * 1728)


def test_conditions_of_others_and_times_are_kept() -> None:
    foreign_condition = {"type": "Own", "status": "True"}
    old = look(a_fleet()).status.stored()
    old["conditions"] = [{**one, "lastTransitionTime": "2020-01-01T00:00:00Z"} for one in old["conditions"]]
    step = look(a_fleet(status={**old, "conditions": [*old["conditions"], foreign_condition]}))
    found = step.status.stored()["conditions"]
    assert found[-1] == foreign_condition
    assert {one["lastTransitionTime"] for one in found[:-1]} == {"2020-01-01T00:00:00Z"}


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_fleet_comes_to_rest(data: st.DataObject) -> None:
    """Whatever spec and pods are: nothing is raised, nothing applied for ever, and the CRD stores all that is said."""
    spec, _ = admitted(PoCFleet, data.draw(specs(PoCFleet)))
    flags = st.lists(st.tuples(st.booleans(), st.sampled_from(["demo-1", "demo-2"])), max_size=5)
    pods = [a_pod(n, ready=ready, revision=revision) for n, (ready, revision) in enumerate(data.draw(flags))]
    fleet = a_fleet(**spec)
    first = look(fleet, pods=pods)
    known = {"resourceVersion": "1", "generation": 1}
    told = {"updateRevision": "demo-1", "observedGeneration": 1}
    objects = {
        key_of(body): {**body, "metadata": {**body["metadata"], **known}, "status": told} for body in first.apply
    }
    first = look(fleet, objects, pods)
    second = look(a_fleet(**spec, status=json.loads(json.dumps(first.status.stored()))), objects, pods)
    assert not second.apply
    assert second.status == first.status
    fields = schema(PoCFleet)["properties"]["status"]["properties"]
    assert second.status.stored().keys() <= fields.keys()
    assert Reason(second.status.reason) in EXPLANATIONS
    body = {"metadata": {"generation": 3}, "status": second.status.stored()}
    readings = {("True", "False"): "Current", ("False", "True"): "Failed", ("False", "False"): "InProgress"}
    found = conditions(second)
    assert kstatus(body) == readings[found["Ready"], found["Stalled"]]


def checked(pods: Sequence[PodView], *seeds: int | None, **spec: Any) -> FleetStep:  # noqa: ANN401
    """A fleet with self-checks whose pods have computed what these engines do, or not answered."""
    fleet = a_fleet(replicas=len(pods), selfCheck={}, **spec)
    check = "org/model seqLen=256 kDim=12 nonces=32"
    answers = {
        pod.uid: CheckAnswer(server=pod.server(8000), check=check, time=NOW, vectors=engine(seed))
        for pod, seed in zip(pods, seeds, strict=True)
        if seed is not None
    }
    return look(fleet, stored(fleet), pods, answers=answers)


PODS = [a_pod(0, ip="10.0.0.1"), a_pod(1, ip="10.0.0.2"), a_pod(2, ip="10.0.0.3")]
TRUE_FALSE = {"Ready": "True", "Progressing": "False", "Degraded": "False", "Stalled": "False"}


@pytest.mark.parametrize(
    ("seeds", "reason", "differing"),
    [
        ([1, 1, 1], "AllReplicasReady", {}),
        ([1, None, 1], "SelfChecksPending", {"Ready": "False", "Progressing": "True"}),
        ([1, 2, 1], "SelfCheckFailed", {"Ready": "False", "Progressing": "True", "Degraded": "True"}),
        ([1, 2, None], "SelfCheckFailed", {"Ready": "False", "Progressing": "True", "Degraded": "True"}),
    ],
)
def test_what_self_checks_find_is_told(seeds: list[int | None], reason: str, differing: dict[str, str]) -> None:
    step = checked(PODS, *seeds)
    assert (step.status.reason, conditions(step)) == (reason, TRUE_FALSE | differing)
    assert [ask.pod.uid for ask in step.checks] == [pod.uid for pod, seed in zip(PODS, seeds, strict=True) if not seed]
    if reason == "SelfCheckFailed":
        degraded = step.status.own_conditions["Degraded"]
        assert degraded.reason == reason
        assert "1 of 3 pods fail the self-check: demo-1 (32 of 32 nonces differ" in degraded.message
        assert "(p-value 1e-32, largest distance " in degraded.message


def test_a_failed_pod_is_told_of_while_others_load_and_others_come_first() -> None:
    loading = [*PODS[:2], a_pod(2, ready=False)]
    step = checked(loading, 1, 2, None)
    assert (step.status.reason, conditions(step)["Degraded"]) == ("ReplicasNotReady", "True")
    assert step.status.own_conditions["Degraded"].reason == "SelfCheckFailed"
    crashing = [*PODS[:2], a_pod(2, ready=False, waiting_for="CrashLoopBackOff", node="node-1")]
    assert checked(crashing, 1, 2, None).status.own_conditions["Degraded"].reason == "PodsFailing"


def test_a_fleet_that_is_refused_checks_its_pods_all_the_same() -> None:
    fleet = a_fleet(replicas=3, selfCheck={}, podTemplate={"spec": {"containers": 1}})
    step = look(fleet, {}, PODS)
    assert (step.status.reason, len(step.checks)) == ("PodTemplateInvalid", 3)


def test_what_keeps_pods_from_being_ready_is_shown_before_what_is_wrong_beside_it() -> None:
    unmonitored: Any = {"metrics": {"podMonitor": True}}
    for seeds, reason in (([1, 1, 1], "PodMonitorUnknown"), ([1, None, 1], "SelfChecksPending")):
        status = checked(PODS, *seeds, **unmonitored).status
        assert (status.reason, status.own_conditions["Degraded"].reason) == (reason, "PodMonitorUnknown")
    objects = stored(a_fleet(replicas=2, **unmonitored), revision="demo-2")
    fleet = a_fleet(replicas=2, update={"strategy": "Never"}, **unmonitored)
    status = look(fleet, objects, [a_pod(0), a_pod(1, revision="demo-2")]).status
    assert status.reason == "PodMonitorUnknown"
    assert "; 1 of 2 pods have an old revision" in status.message, "nor is what goes on left out"


def test_pods_are_told_of_in_the_order_of_their_numbers() -> None:
    labels = {FLEET_LABEL: "demo"}
    pods = [PodView(name=f"demo-{n}", namespace="ns", uid=f"u{n}", labels=labels) for n in (10, 11, 2, 1)]
    others = [PodView(name=f"other-x-{n}", namespace="ns", uid=f"o{n}", labels=labels) for n in (10, 2)]
    status = plan(FleetSnapshot(fleet=a_fleet(replicas=12), around=AROUND, now=NOW, pods=[*others, *pods])).status
    assert [pod.name for pod in status.pods] == ["demo-1", "demo-2", "demo-10", "demo-11"]
    for names in (("demo-1", "demo-2", "demo-10"), ("other-x-2", "other-x-10")):
        places = [status.message.index(f"{name} (") for name in names]
        assert places == sorted(places), status.message


def _served(status: FleetStatus) -> tuple[str, int | None, int | None, str, int]:
    return status.model, status.seq_len, status.k_dim, status.gpu_product, status.gpu_count


@pytest.mark.parametrize("restarted", [False, True], ids=["same process", "next process"])
def test_a_preset_that_becomes_invalid_changes_nothing_of_what_pods_are_to_compute(restarted: bool) -> None:
    spec: Any = {"model": {"preset": "minimax-m2.7"}, "selfCheck": {"enabled": True}}
    server = Container(id="c#1", ports=frozenset({8000}), model="MiniMaxAI/MiniMax-M2.7")
    pod = a_pod(0, ip="10.0.0.1", containers=(server,))
    good = look(a_fleet(**spec), pods=[pod])
    around = replace(AROUND, presets={"minimax-m2.7": Invalid("it is no YAML")})
    fleet = a_fleet(status=good.status.stored(), **spec)
    again = replace(pod, containers=(replace(server, id="c#2"),))
    seen = FleetSnapshot(fleet=fleet, around=around, now=NOW, pods=[again])
    found = plan(seen if restarted else replace(seen, known=good.known))
    assert found.status.reason == Reason.PRESET_UNUSABLE
    # Another process has no reference by which the pod could be judged: what was found stays.
    asked = [] if restarted else [("c#2", good.checks[0].check)]
    assert [(ask.server, ask.check) for ask in found.checks] == asked
    assert _served(found.status) == _served(good.status)
    assert found.status.model == "MiniMaxAI/MiniMax-M2.7"
