# SPDX-License-Identifier: Apache-2.0
"""Fleets whose preset, or spec, cannot be used any more: they go on as they are, and say what is wrong."""

from dataclasses import replace
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import DownloadState
from poc_operator.apis.v1alpha1.meta import GROUPS_KIND
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.download import DownloadSeen
from poc_operator.fleets.history import RECORD
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.fleets.resolve import Invalid
from poc_operator.observed import Container
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet
from tests.unit.poc_operator.fleets.test_checked_pods import an_answer
from tests.unit.poc_operator.fleets.test_plan import Objects, a_pod, stored
from tests.unit.poc_operator.fleets.test_self_check import engine

MODEL = "MiniMaxAI/MiniMax-M2.7"
SPEC: dict[str, Any] = {"model": {"preset": "minimax-m2.7"}, "selfCheck": {"enabled": True}}
BROKEN = replace(AROUND, presets={"minimax-m2.7": Invalid("it is no YAML")})
SET: Key = ("StatefulSet", "demo")
SERVER = Container(id="c#1", ports=frozenset({8000}), model=MODEL)
POD = a_pod(0, ip="10.0.0.1", containers=(SERVER,))
AGAIN = replace(POD, containers=(replace(SERVER, id="c#2"),))
LOST = [SET, ("Service", "demo"), ("Service", "demo-pods"), ("PodDisruptionBudget", "demo"), ("NetworkPolicy", "demo")]


def seen(fleet: PoCFleet, objects: Objects, **more: Any) -> FleetSnapshot:  # noqa: ANN401 - fields of the snapshot
    known: dict[str, Any] = {"fleet": fleet, "around": AROUND, "now": NOW, "objects": objects, "pods": [POD]}
    return FleetSnapshot(**known | more)


def good(**spec: Any) -> tuple[FleetStep, Objects]:  # noqa: ANN401
    """A fleet's objects, and the turn in which its pod has passed."""
    fleet = a_fleet(**SPEC | spec)
    objects = stored(fleet)
    (ask,) = plan(seen(fleet, objects)).checks
    answers = {POD.uid: an_answer(POD, engine(1), check=ask.check.name)}
    return plan(seen(fleet, objects, answers=answers)), objects


def broken(first: FleetStep, objects: Objects, *, same: bool, spec: Any = None, **more: Any) -> FleetStep:  # noqa: ANN401
    """The next turn, whose preset is broken, in the same process or in the next one."""
    fleet = a_fleet(**SPEC | (spec or {}), status=first.status.stored())
    known = {"known": first.known} if same else {}
    step = plan(seen(fleet, objects, **{"around": BROKEN, **known, **more}))
    assert step.status.reason == Reason.PRESET_UNUSABLE
    assert step.status.own_conditions["Stalled"].status == "True"
    assert "it is no YAML" in step.status.message
    return step


@pytest.mark.parametrize("same", [True, False], ids=["same process", "next process"])
def test_nothing_is_changed_of_what_is_as_it_was(same: bool) -> None:
    step = broken(*good(), same=same)
    assert (list(step.apply), list(step.delete), list(step.evict)) == ([], [], [])


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("same", [True, False], ids=["same process", "next process"])
def test_what_is_deleted_is_made_anew(same: bool, lost: Key) -> None:
    first, objects = good()
    body = objects.pop(lost)
    step = broken(first, objects, same=same)
    if lost == SET and not same:
        assert not step.apply, "nobody knows its template"
        return
    assert [key_of(one) for one in step.apply] == [lost]
    assert step.apply[0]["metadata"]["annotations"] == body["metadata"]["annotations"]
    assert step.needs_token


@pytest.mark.parametrize("same", [True, False], ids=["same process", "next process"])
def test_the_number_of_replicas_is_kept_and_the_template_stays(same: bool) -> None:
    first, objects = good()
    # What the API server has set beside, and another template that somebody asks for with the preset.
    objects[SET]["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst"
    spec = {"replicas": 3, "image": "registry/worker:2", "port": 9000}
    step = broken(first, objects, same=same, spec=spec)
    assert [key_of(one) for one in step.apply] == [SET], "services of pods of before stay"
    (body,) = step.apply
    assert body["spec"]["replicas"] == 3
    container = body["spec"]["template"]["spec"]["containers"][0]
    assert container == objects[SET]["spec"]["template"]["spec"]["containers"][0]
    assert body["metadata"]["annotations"][RECORD] == objects[SET]["metadata"]["annotations"][RECORD]
    assert step.status.ready == "1/3"


@pytest.mark.parametrize("same", [True, False], ids=["same process", "next process"])
def test_a_pod_that_was_restarted_is_checked_as_before(same: bool) -> None:
    first, objects = good()
    step = broken(first, objects, same=same, pods=[AGAIN])
    (ask,) = step.checks
    assert (ask.server, ask.check.name) == ("c#2", first.status.self_check_references[0].name)
    for vectors, result in ((engine(1), "Passed"), (engine(2), "Failed")):
        answer = an_answer(AGAIN, vectors, check=ask.check.name)
        found = broken(first, objects, same=same, pods=[AGAIN], answers={AGAIN.uid: answer})
        assert found.status.pods[0].result == result
        assert "threshold 0.75" in found.status.pods[0].message or result == "Passed", "the preset's"
        assert found.status.self_check_references == first.status.self_check_references


def test_a_process_that_does_not_know_what_pods_are_judged_by_judges_none() -> None:
    first, objects = good()
    status = first.status
    lacks: list[dict[str, Any]] = [{"stat_test": None}, {"self_check_references": []}]
    for lack in lacks:
        found = broken(replace(first, status=status.model_copy(update=lack)), objects, same=False, pods=[AGAIN])
        assert not found.checks
        assert found.status.pods[0].message == "the fleet's spec cannot be used"


def test_a_fleet_that_has_nothing_yet_gets_nothing() -> None:
    step = plan(seen(a_fleet(**SPEC), {}, around=BROKEN, pods=[]))
    assert (list(step.apply), step.needs_token) == ([], False)


@pytest.mark.parametrize("same", [True, False], ids=["same process", "next process"])
def test_objects_of_others_are_left_alone(same: bool) -> None:
    first, objects = good()
    owner = {"kind": "PoCFleet", "name": "demo", "uid": "x", "controller": True}
    objects["Service", "demo"]["metadata"]["ownerReferences"] = [owner]
    del objects["NetworkPolicy", "demo"]
    assert not broken(first, objects, same=same).apply


def test_a_template_that_does_not_fit_keeps_the_one_before() -> None:
    first, objects = good()
    fleet = a_fleet(**SPEC, replicas=2, podTemplate={"spec": {"containers": 1}}, status=first.status.stored())
    for known in (first.known, None):
        step = plan(seen(fleet, objects, known=known, pods=[AGAIN]))
        assert step.status.reason == Reason.POD_TEMPLATE_INVALID
        assert [(key_of(one), one["spec"]["replicas"]) for one in step.apply] == [(SET, 2)]
        assert len(step.checks) == 1
        assert step.known == known


def test_an_update_that_has_begun_goes_on_in_the_same_process() -> None:
    first, objects = good()
    objects[SET]["status"]["updateRevision"] = "demo-2"
    status = first.status.model_copy(update={"update": first.status.update.model_copy(update={"digest": ""})})
    first = replace(first, status=status)
    assert [one.pod.name for one in broken(first, objects, same=True).evict] == ["demo-0"]
    assert not broken(first, objects, same=False).evict, "nobody knows whether it is what was asked for"


@pytest.mark.parametrize("state", DownloadState)
def test_a_workload_that_waits_for_a_download_waits_in_the_next_process_too(state: DownloadState) -> None:
    cache = {"cache": {"existingClaim": "weights", "download": True}}
    fleet = a_fleet(**SPEC | cache)
    objects = stored(a_fleet(**SPEC | cache | {"cache": {"existingClaim": "weights"}}))
    first = plan(seen(fleet, objects))
    assert first.status.download is not None
    told = first.status.download.model_copy(update={"state": state, "claim": "pvc-1"})
    first = replace(first, status=first.status.model_copy(update={"download": told}))
    objects[SET]["metadata"]["annotations"].pop(RECORD)
    for claim in ("pvc-1", "pvc-2"):
        step = broken(first, objects, same=False, spec=cache | {"replicas": 2}, download=DownloadSeen(claim=claim))
        applied = [key_of(one) for one in step.apply]
        assert applied == ([SET] if (state, claim) == ("Downloaded", "pvc-1") else [])
        assert step.status.download == told


def test_nothing_is_concluded_from_a_pvc_that_the_fleet_did_not_have() -> None:
    before = {"cache": {"existingClaim": "weights"}}
    first, objects = good(**before)
    now = {"cache": {"existingClaim": "others", "download": True}, "replicas": 2}
    step = broken(first, objects, same=True, spec=now, download=DownloadSeen(claim=""))
    assert [key_of(one) for one in step.apply] == [SET]


@pytest.mark.parametrize("same", [True, False], ids=["same process", "next process"])
def test_groups_are_kept_too_unless_the_cluster_does_not_know_them(same: bool) -> None:
    around = replace(AROUND, leader_worker_sets=True)
    spec: dict[str, Any] = {
        "model": {"path": "org/model"},
        "parallelism": {"kubernetesNodes": 2, "tensor": 2},
        "gpu": {"count": 1},
    }
    fleet = a_fleet(**spec)
    first = plan(seen(fleet, {}, around=around, pods=[]))
    objects: Objects = {key_of(body): body for body in first.apply}
    for body in objects.values():
        body["metadata"]["resourceVersion"] = "1"
    groups = (GROUPS_KIND, "demo")
    bad = a_fleet(**spec, replicas=3, podTemplate={"spec": {"containers": 1}}, status=first.status.stored())
    known = first.known if same else None
    step = plan(seen(bad, objects, around=around, pods=[], known=known))
    assert step.status.reason == Reason.POD_TEMPLATE_INVALID
    assert [(key_of(one), one["spec"]["replicas"]) for one in step.apply] == [(groups, 3)]
    gone = plan(seen(bad, {}, around=AROUND, pods=[], known=known))
    assert (gone.status.reason, list(gone.apply)) == (Reason.LEADER_WORKER_SET_UNKNOWN, [])


@pytest.mark.parametrize("same", [True, False], ids=["same process", "next process"])
def test_a_template_that_does_not_fit_makes_no_pod_another_models(same: bool) -> None:
    """The spec asks for another preset too. Running pods, and what the status tells of them, stay those of before."""
    first, objects = good()
    changed = a_fleet(
        **SPEC | {"model": {"preset": "qwen3-0.6b"}},
        podTemplate={"spec": {"containers": 1}},
        status=first.status.stored(),
    )
    step = plan(seen(changed, objects, **({"known": first.known} if same else {})))
    assert step.status.reason == Reason.POD_TEMPLATE_INVALID
    now, before = step.status.stored(), first.status.stored()
    for name in ("model", "gpuProduct", "gpuCount", "seqLen", "kDim", "statTest", "selfCheckReferences", "pods"):
        assert now[name] == before[name], name
    assert not step.checks


@pytest.mark.parametrize("how", ["an earlier revision", "a broken preset"])
def test_a_looser_test_of_the_spec_frees_pods_of_which_the_preset_says_nothing(how: str) -> None:
    earlier = f"{MODEL}@before" if how == "an earlier revision" else MODEL
    server = replace(SERVER, model=earlier)
    pods = [a_pod(n, ip=f"10.0.0.{n + 1}", containers=(replace(server, id=f"c{n}#1"),)) for n in range(2)]
    fleet = a_fleet(**SPEC, replicas=2)
    objects = stored(fleet)
    name = plan(seen(fleet, objects, pods=pods)).checks[0].check.name
    far = [None if vector is None else [vector[0] + 0.9, *vector[1:]] for vector in engine(1)]
    answers = {
        pod.uid: an_answer(pod, vectors, check=name) for pod, vectors in zip(pods, (engine(1), far), strict=True)
    }
    first = plan(seen(fleet, objects, pods=pods, answers=answers))
    assert [pod.result for pod in first.status.pods] == ["Passed", "Failed"]
    loose = {**SPEC, "selfCheck": {"enabled": True, "statTest": {"distThreshold": "1.5"}}}
    around = AROUND if how == "an earlier revision" else BROKEN
    changed = a_fleet(**loose, replicas=2, status=first.status.stored())
    step = plan(seen(changed, objects, pods=pods, answers=answers, around=around))
    assert [pod.result for pod in step.status.pods] == ["Passed", "Passed"]
