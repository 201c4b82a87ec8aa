# SPDX-License-Identifier: Apache-2.0
"""Which pods an update replaces and when, as tables over ``plan()``: canary, budget, rounds, failure and rollback."""

import copy
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdateStatus
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.forecast import Spares
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.fleets.resolve import Refusal
from poc_operator.fleets.rollback import differences, digest_of
from poc_operator.fleets.stages import PATIENCE_SECONDS, KubernetesNode
from poc_operator.observed import REVISION_LABEL, Container, PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet
from tests.unit.poc_operator.fleets.test_forecast import work

OLD, NEW = "demo-old", "demo-new"
SET: Key = ("StatefulSet", "demo")
GOOD = {"update": {"goodRevision": OLD, "startupSeconds": 60}}


def a_pod(number: int, revision: str = OLD, *, ready: bool = True, age: float = 500, **fields: Any) -> PodView:  # noqa: ANN401
    labels = {FLEET_LABEL: "demo", "poc.gonka.ai/worker": "true", REVISION_LABEL: revision}
    created = NOW - timedelta(seconds=age)
    server = Container(id=f"c{number}-{revision}#0", ports=frozenset({8000}), restarts=fields.pop("restarts", 0))
    found: dict[str, Any] = {
        "waiting_for": "" if ready else "ContainersNotReady",
        "ready_since": created + timedelta(seconds=60) if ready else None,
        "containers": [server],
        "node": "node-1",
        "taken": created,
        **fields,
    }
    return PodView(
        name=f"demo-{number}",
        namespace="ns",
        uid=f"u{number}-{revision}",
        labels=labels,
        ready=ready,
        created=created,
        **found,
    )


def check(pod: PodView, result: str, message: str = "") -> dict[str, str]:
    """What the self-check has found of a pod's server."""
    return {"name": pod.name, "uid": pod.uid, "server": pod.server(8000), "result": result, "message": message}


def objects_of(fleet: PoCFleet, revision: str = NEW, template: Mapping[str, Any] | None = None) -> dict[Key, Any]:
    """The fleet's objects as the API server has them; the StatefulSet has another template if one is given."""
    found = {key_of(body): copy.deepcopy(body) for body in plan(_snapshot(fleet)).apply}
    for body in found.values():
        body["metadata"] |= {"resourceVersion": "1", "generation": 1}
    if SET in found:
        found[SET]["status"] = {"updateRevision": revision, "observedGeneration": 1}
        if template is not None:
            found[SET]["spec"]["template"] = template
    return found


def _snapshot(fleet: PoCFleet, **seen: Any) -> FleetSnapshot:  # noqa: ANN401
    return FleetSnapshot(fleet=fleet, around=AROUND, now=NOW, **seen)


def fleet_of(status: Mapping[str, Any] = GOOD, *, replicas: int = 4, **spec: Any) -> PoCFleet:  # noqa: ANN401
    return a_fleet(replicas=replicas, status=status, **spec)


def look(fleet: PoCFleet, pods: Sequence[PodView], *, revision: str = NEW, **seen: Any) -> FleetStep:  # noqa: ANN401
    return plan(_snapshot(fleet, objects=objects_of(fleet, revision), pods=pods, **seen))


def after(step: FleetStep, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    """The status that the next plan begins from."""
    return {**step.status.stored(), **fields}


def evicted(step: FleetStep) -> list[str]:
    return [eviction.pod.name for eviction in step.evict]


def reasons(step: FleetStep) -> list[str]:
    return [event.reason for event in step.events]


def in_phase(phase: str, fleet: PoCFleet | None = None, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    digest = digest_of(objects_of(fleet or fleet_of())[SET])
    return {"update": {**GOOD["update"], "phase": phase, "digest": digest, **fields}}


FOUR = [a_pod(n) for n in range(4)]


def test_one_pod_goes_first() -> None:
    step = look(fleet_of(), FOUR)
    assert evicted(step) == ["demo-3"]
    assert step.evict[0].spares is Spares.WORK
    assert step.status.update.message == "0 of 4 pods are updated; canary: replacing demo-3"
    assert (step.status.update.phase, step.status.update.canary) == ("Canary", "demo-3")
    assert reasons(step) == ["UpdateStarted"]
    assert step.status.message == step.status.update.message
    # The next plan waits for it, whether the watch has told of its end or not.
    again = look(fleet_of(after(step)), FOUR, evicted=frozenset({FOUR[3].uid}))
    assert not again.evict
    assert again.status.update.message.endswith("canary: waiting for 1 pod that is to be created")
    assert not reasons(again)
    loading = look(fleet_of(after(again)), [*FOUR[:3], a_pod(3, NEW, ready=False, age=9)])
    assert not loading.evict
    assert loading.status.update.message == "1 of 4 pods are updated; canary: waiting for demo-3 (not ready)"


def test_what_cannot_be_deleted_does_not_hold_an_update_up() -> None:
    left = Refusal(Reason.OBJECT_REFUSED, 'the deletion of Job "demo-download-1" is refused: HTTP 403')
    step = look(fleet_of(), FOUR, left=left)
    assert evicted(step) == ["demo-3"]
    found = {kind: (one.status, one.message) for kind, one in step.status.own_conditions.items()}
    assert found["Degraded"] == ("True", left.message)
    assert (found["Ready"][0], found["Stalled"][0]) == ("True", "False")


@pytest.mark.parametrize("phase", ["Complete", "Waiting", "Rolling"])
def test_pods_that_were_all_missing_are_to_prove_the_template(phase: str) -> None:
    """It is never complete for them, nor rolled back to from later, before they work."""
    fleet = fleet_of({"update": {**GOOD["update"], "phase": phase, "digest": "of another"}}, replicas=1)
    loading = look(fleet, [a_pod(0, NEW, ready=False, age=9)])
    assert (loading.status.update.phase, loading.status.update.good_revision) == ("Canary", OLD)
    crashing = a_pod(0, NEW, ready=False, waiting_for="CrashLoopBackOff", age=200, restarts=5)
    assert reasons(look(fleet_of(after(loading), replicas=1), [crashing])) == ["UpdateFailed"]
    assert look(fleet_of(after(loading), replicas=1), [a_pod(0, NEW)]).status.update.good_revision == NEW


def test_one_that_works_shows_that_the_template_can_work() -> None:
    """Also where its digest is another, as when the API server has written a value in another way."""
    broken = a_pod(1, NEW, ready=False, waiting_for="CrashLoopBackOff", age=200, restarts=5)
    fleet = fleet_of({"update": {**GOOD["update"], "phase": "Rolling", "digest": "of another"}}, replicas=2)
    step = look(fleet, [a_pod(0, NEW), broken])
    assert (step.status.update.phase, step.status.update.failed, step.evict) == ("Rolling", [], ())


def test_a_template_that_comes_while_there_are_no_pods_is_to_prove_itself_later() -> None:
    before = {"update": {**GOOD["update"], "phase": "Complete", "digest": "of another"}}
    none = look(fleet_of(before, replicas=0), [])
    assert none.status.update.phase == "Complete"
    assert look(fleet_of(after(none), replicas=0), []).status.update == none.status.update
    first = look(fleet_of(after(none), replicas=1), [a_pod(0, NEW, ready=False, age=9)])
    assert (first.status.update.phase, first.status.update.good_revision) == ("Canary", OLD)


def test_the_others_follow_when_the_canary_is_ready() -> None:
    fleet = fleet_of(in_phase("Canary", canary="demo-3"))
    step = look(fleet, [*FOUR[:3], a_pod(3, NEW)])
    assert (evicted(step), step.status.update.phase, reasons(step)) == (["demo-2"], "Rolling", ["CanaryPassed"])
    two = look(fleet_of(in_phase("Rolling"), update={"maxUnavailable": 2}), [*FOUR[:3], a_pod(3, NEW)])
    assert evicted(two) == ["demo-2", "demo-1"]


def test_the_canary_must_pass_its_self_check() -> None:
    new = a_pod(3, NEW)
    for results, expected in (
        ([], []),
        ([check(new, "Pending")], []),
        ([{**check(new, "Passed"), "server": "an earlier one"}], []),
        ([check(new, "Passed")], ["demo-2"]),
    ):
        status = in_phase("Canary", canary="demo-3") | {"pods": results}
        step = look(fleet_of(status, selfCheck={"enabled": True}), [*FOUR[:3], new])
        assert evicted(step) == expected
    assert (
        "canary: waiting for demo-3 (self-check)"
        in look(fleet_of(in_phase("Canary"), selfCheck={"enabled": True}), [*FOUR[:3], new]).status.update.message
    )


def test_without_a_canary_as_many_go_as_may_be_away() -> None:
    step = look(fleet_of(update={"canary": False, "maxUnavailable": 3}), FOUR)
    assert evicted(step) == ["demo-3", "demo-2", "demo-1"]
    assert step.status.update.phase == "Rolling"


@pytest.mark.parametrize(
    ("pods", "says"),
    [
        (FOUR[:3], "waiting for 1 pod that is to be created"),
        ([*FOUR[:3], a_pod(3, NEW, ready=False)], "waiting for demo-3 (not ready)"),
        ([*FOUR[:2], a_pod(2, NEW), a_pod(3, NEW, ready=False)], "waiting for demo-3 (not ready)"),
        ([*FOUR[:3], a_pod(3, NEW, terminating=True)], "waiting for 1 pod that is to be created"),
    ],
)
def test_pods_that_are_away_for_any_reason_count(pods: Sequence[PodView], says: str) -> None:
    step = look(fleet_of(in_phase("Rolling")), pods)
    assert not step.evict
    assert says in step.status.update.message


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ({"paused": True}, "paused: set update.paused to false"),
        ({"strategy": "Never"}, "4 of 4 pods have an old revision: delete them when no round runs"),
    ],
)
def test_an_update_that_may_not_go_on_says_so(update: dict[str, Any], says: str) -> None:
    step = look(fleet_of(update=update), FOUR)
    assert not step.evict
    assert says in step.status.message


def test_rounds_hold_an_update_up_unless_it_is_immediate() -> None:
    live = [work(uid="r1")]
    step = look(fleet_of(), FOUR, work=live)
    assert not step.evict
    assert step.status.message == "0 of 4 pods are updated; canary: waiting for the end of PoCRound r1"
    assert [one.uid for one in step.status.update.rounds] == ["r1"]
    immediate = look(fleet_of(update={"strategy": "Immediate"}), FOUR, work=live)
    assert [(one.pod.name, one.spares) for one in immediate.evict] == [("demo-3", Spares.NOTHING)]


def test_a_round_that_is_near_holds_an_update_up() -> None:
    over = [{"completionTime": (NOW - timedelta(seconds=20 + 100 * n)).isoformat()} for n in range(3)]
    rounds = [work(uid=f"r{n}", state="Complete", created=30 + 100 * n, status=over[n]) for n in range(3)]
    for startup, expected in ((2, ["demo-3"]), (60, [])):
        # The pods' own times count, where they can be told.
        pods = [
            PodView(**{**vars(pod), "ready_since": pod.created and pod.created + timedelta(seconds=startup)})
            for pod in FOUR
        ]
        step = look(fleet_of(podTemplate={"spec": {"terminationGracePeriodSeconds": 0}}), pods, work=rounds)
        assert evicted(step) == expected
    assert "since a pod needs 90 s to be replaced (update.strategy Immediate does not wait)" in step.status.message
    assert step.status.update.startup_seconds == 60


def test_pods_that_cannot_work_go_first_and_wait_for_no_round() -> None:
    crashing = a_pod(0, ready=False, waiting_for="CrashLoopBackOff")
    pulling = a_pod(1, ready=False, waiting_for="ImagePullBackOff", age=PATIENCE_SECONDS - 1)
    pods = [crashing, pulling, *FOUR[2:]]
    rolling = fleet_of(in_phase("Rolling"))
    step = look(rolling, pods, work=[work()])
    assert [(one.pod.name, one.spares) for one in step.evict] == [("demo-0", Spares.SLOTS)]
    # Unless a round has given it a slot.
    slots = {"state": "Running", "assignments": [{"uid": crashing.uid, "state": "Starting"}]}
    assert not look(rolling, pods, work=[work(status=slots)]).evict
    # One that loads goes when no round runs; it is away already.
    assert evicted(look(rolling, pods)) == ["demo-0", "demo-1"]
    # As canary one of them alone.
    assert evicted(look(fleet_of(), pods)) == ["demo-0"]


def test_an_old_pod_that_failed_its_check_goes_first_if_that_takes_no_more_pods_away() -> None:
    status = in_phase("Rolling") | {"pods": [check(FOUR[0], "Failed")]}
    new = a_pod(3, NEW)
    status["pods"].append(check(new, "Passed"))
    fleet = fleet_of(status, selfCheck={"enabled": True})
    assert evicted(look(fleet, [*FOUR[:3], new], work=[work()])) == ["demo-0"]
    assert not look(fleet, [FOUR[0], FOUR[2], new], work=[work()]).evict


def test_what_was_found_before_an_eviction_is_said() -> None:
    busy = {pod.uid: f"waiting for pod {pod.name}, which computes" for pod in FOUR[3:]}
    assert evicted(look(fleet_of(), FOUR, busy=busy)) == ["demo-2"]
    every = {pod.uid: f"waiting for pod {pod.name}, which computes" for pod in FOUR}
    step = look(fleet_of(), FOUR, busy=every)
    assert not step.evict
    assert "waiting for pod demo-" in step.status.message
    # No watch tells when they may be evicted.
    assert step.moves


def test_why_the_api_server_evicts_nobody_is_said_while_it_is_asked_again() -> None:
    why = "waiting to evict pod demo-3: it would violate the budget"
    step = look(fleet_of(), FOUR, unevicted={FOUR[3].uid: why})
    assert evicted(step) == ["demo-3"]
    assert step.status.update.message.endswith(why)
    other = look(fleet_of(), FOUR, unevicted={FOUR[2].uid: why})
    assert other.status.update.message.endswith("replacing demo-3")


def test_nobody_leaves_before_kubernetes_has_seen_the_template() -> None:
    fleet = fleet_of()
    objects = objects_of(fleet)
    objects[SET]["metadata"]["generation"] = 2
    assert not plan(_snapshot(fleet, objects=objects, pods=FOUR)).evict
    objects = objects_of(fleet)
    objects[SET]["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    step = plan(_snapshot(fleet, objects=objects, pods=FOUR))
    assert (len(step.apply), step.evict) == (1, ())
    assert not plan(_snapshot(fleet, objects={}, pods=FOUR)).evict


def test_an_update_is_complete_when_all_pods_are_new_and_available() -> None:
    new = [a_pod(n, NEW) for n in range(4)]
    step = look(fleet_of(in_phase("Rolling")), new)
    told = step.status.update
    assert (told.phase, told.good_revision, reasons(step)) == ("Complete", NEW, ["UpdateComplete"])
    assert not reasons(look(fleet_of(after(step)), new))
    waits = look(fleet_of(in_phase("Rolling")), [*new[:3], a_pod(3, NEW, ready=False)])
    assert (waits.status.update.phase, waits.status.update.good_revision) == ("Rolling", OLD)
    # The canary may be the only pod.
    fleet = fleet_of(in_phase("Canary", fleet_of(replicas=1), canary="demo-0"), replicas=1)
    assert reasons(look(fleet, [a_pod(0, NEW)])) == ["CanaryPassed", "UpdateComplete"]
    assert look(fleet, [a_pod(0, NEW, ready=False)]).status.update.phase == "Canary"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "crashes": ({"ready": False, "waiting_for": "CrashLoopBackOff", "age": 5}, "cannot run (CrashLoopBackOff)"),
    "restarted": ({"ready": False, "restarts": 1, "age": 5}, "cannot run (ContainersNotReady)"),
    "no image": ({"ready": False, "waiting_for": "ImagePullBackOff"}, "cannot run (ImagePullBackOff)"),
    "no such image": (
        {"ready": False, "waiting_for": "ErrImagePull", "waiting_message": "acme/vllm:2: not found"},
        "cannot run (ErrImagePull: acme/vllm:2: not found)",
    ),
    "too slow": ({"ready": False, "age": 3601}, "was not ready within 3600 s"),
    "wrong vectors": ({}, "failed its self-check: 9 of 32 differ"),
}


@pytest.mark.parametrize(("fields", "says"), WRONG.values(), ids=WRONG)
def test_a_canary_that_fails_ends_the_update(fields: dict[str, Any], says: str) -> None:
    bad = a_pod(3, NEW, **fields)
    failed_check = not fields
    checks: dict[str, Any] = {"selfCheck": {"enabled": failed_check}}
    status = in_phase("Canary", canary="demo-3")
    status |= {"pods": [check(bad, "Failed", "9 of 32 differ")]} if failed_check else {}
    pods = [*FOUR[:3], bad]
    step = look(fleet_of(status, **checks), pods, work=[work()])
    assert not step.evict
    assert step.moves
    assert reasons(step) == ["UpdateFailed"]
    assert says in step.status.update.message
    failure = step.status.update.failed[0]
    assert (failure.revision, failure.digest) == (NEW, step.status.update.digest)
    conditions = {kind: one.status for kind, one in step.status.own_conditions.items()}
    assert (conditions["Degraded"], conditions["Stalled"]) == ("True", "True")
    assert step.status.reason == "UpdateFailed"


def failed_fleet(**spec: Any) -> PoCFleet:  # noqa: ANN401
    fleet = fleet_of(**spec)
    failure = {
        "digest": digest_of(objects_of(fleet)[SET]),
        "revision": NEW,
        "message": "it crashed",
        "time": NOW.isoformat(),
    }
    return fleet_of(in_phase("Failed", fleet, failed=[failure], canary="demo-3"), **spec)


@pytest.mark.parametrize(
    ("fields", "phase"),
    [
        ({"node": "", "waiting_for": "0/3 nodes are available: insufficient nvidia.com/gpu"}, "Canary"),
        ({"scheduled": NOW - timedelta(seconds=3599)}, "Canary"),
        ({"scheduled": NOW - timedelta(seconds=3601)}, "Failed"),
    ],
)
def test_a_canary_does_not_fail_for_want_of_a_kubernetes_node(fields: dict[str, Any], phase: str) -> None:
    waits = a_pod(3, NEW, ready=False, age=9000, **fields)
    step = look(fleet_of(in_phase("Canary", canary="demo-3")), [*FOUR[:3], waits])
    assert (step.status.update.phase, evicted(step)) == (phase, [])


AWAY = KubernetesNode(ready=False, since=NOW - timedelta(seconds=60))
BACK = KubernetesNode(ready=True, since=NOW - timedelta(seconds=60))


@pytest.mark.parametrize(
    ("fields", "node", "says"),
    [
        ({"age": 9000}, AWAY, "canary: waiting for demo-3 (Kubernetes node node-1 is not ready)"),
        ({"age": 9000, "restarts": 1}, AWAY, "(Kubernetes node node-1 is not ready)"),
        ({"age": 9000, "waiting_for": "ErrImagePull"}, AWAY, "(Kubernetes node node-1 is not ready)"),
        ({"age": 9000, "taken": None}, None, "(the kubelet of node-1 has not taken it yet)"),
        # What its containers met before the node came back says nothing.
        ({"age": 9000}, BACK, "(not ready)"),
        ({"age": 9000, "restarts": 1}, BACK, "(not ready)"),
        ({"age": 9000, "waiting_for": "ErrImagePull"}, BACK, "(not ready)"),
        ({"age": 9000, "taken": NOW - timedelta(seconds=9)}, None, "(not ready)"),
        # All else says something of the template.
        ({"age": 9000}, None, "demo-3 was not ready within 3600 s"),
        ({"age": 50, "restarts": 1}, BACK, "demo-3 cannot run"),
        ({"age": 9000, "waiting_for": "CrashLoopBackOff"}, BACK, "demo-3 cannot run"),
    ],
)
def test_a_canary_does_not_fail_for_its_kubernetes_node(
    fields: dict[str, Any], node: KubernetesNode | None, says: str
) -> None:
    canary = a_pod(3, NEW, ready=False, **fields)
    nodes = {"node-1": node} if node is not None else {}
    step = look(fleet_of(in_phase("Canary", canary="demo-3")), [*FOUR[:3], canary], nodes=nodes)
    assert step.status.update.phase == ("Canary" if "(" in says else "Failed")
    assert says in step.status.update.message
    assert not step.evict


def test_a_canary_that_is_never_created_fails() -> None:
    first = look(fleet_of(), FOUR)
    assert first.status.update.canary_time == NOW
    fleet, limit = fleet_of(after(first)), 3600 + 60
    objects = objects_of(fleet)
    ends = a_pod(3, terminating=True)
    for seconds, pods, phase in (
        (limit, FOUR[:3], "Canary"),
        (limit + 1, [*FOUR[:3], ends], "Canary"),  # it keeps the name: its Kubernetes node may be lost
        (limit + 1, FOUR[:3], "Failed"),
    ):
        now = NOW + timedelta(seconds=seconds)
        step = plan(FleetSnapshot(fleet=fleet, around=AROUND, now=now, objects=objects, pods=pods))
        assert step.status.update.phase == phase
    # However late the pod before it has ended, as on a lost Kubernetes node, the canary has its time from then on.
    held = plan(FleetSnapshot(fleet=fleet, around=AROUND, now=now, objects=objects, pods=[*FOUR[:3], ends]))
    assert held.status.update.canary_time is None
    free = plan(FleetSnapshot(fleet=fleet_of(after(held)), around=AROUND, now=now, objects=objects, pods=FOUR[:3]))
    assert (free.status.update.phase, free.status.update.canary_time) == ("Canary", now)
    said = "pod demo-3 was not created within 3660 s: the events of its StatefulSet say why"
    assert said in step.status.update.message
    # A refused eviction is tried again, and the time begins anew.
    again = plan(FleetSnapshot(fleet=fleet, around=AROUND, now=now, objects=objects, pods=FOUR))
    assert (again.status.update.phase, again.status.update.canary_time) == ("Canary", now)


BAD = a_pod(3, NEW, ready=False, waiting_for="CrashLoopBackOff")


def template_of(**spec: Any) -> Any:  # noqa: ANN401
    return objects_of(fleet_of(**spec))[SET]["spec"]["template"]


def test_the_last_good_template_comes_back_and_the_bad_pod_goes() -> None:
    fleet, good = failed_fleet(engineArgs=["--new"]), template_of()
    asked = template_of(engineArgs=["--new"])
    pods = [*FOUR[:3], BAD]
    current = objects_of(fleet_of(engineArgs=["--new"]))
    first = plan(_snapshot(fleet, objects=current, pods=pods, good_template={"$patch": "replace", **good}))
    assert [key_of(body) for body in first.apply] == [SET]
    assert first.apply[0]["spec"]["template"] == good
    assert not first.evict
    assert "args is --new" not in first.status.message
    assert 'spec.containers[vllm].args is ["--new"]' in first.status.message
    # Once Kubernetes has seen it, under its old name or a new one.
    for revision in (OLD, "demo-again"):
        objects = {**current, SET: {**first.apply[0], "status": {"updateRevision": revision, "observedGeneration": 1}}}
        objects[SET]["metadata"] = {**objects[SET]["metadata"], "resourceVersion": "2", "generation": 1}
        step = plan(_snapshot(fleet, objects=objects, pods=pods, good_template=good, work=[work()]))
        assert (list(step.apply), evicted(step)) == ([], ["demo-3"])
        done = plan(_snapshot(fleet, objects=objects, pods=FOUR, good_template=good))
        assert (list(done.apply), list(done.evict), done.status.reason) == ([], [], "UpdateFailed")
        assert f"back at revision {OLD}" in done.status.message
        # What stands there stays when the revision is gone later.
        blind = plan(_snapshot(fleet, objects=objects, pods=FOUR))
        assert (list(blind.apply), list(blind.evict), blind.status.update.good_revision) == ([], [], OLD)
    assert asked != good


def test_a_good_revision_that_is_gone_keeps_no_fleet_from_its_pods() -> None:
    """Somebody has deleted the StatefulSet of a fleet that went back, and its revisions with it."""
    fleet = failed_fleet(engineArgs=["--new"])
    current = objects_of(fleet_of(engineArgs=["--new"]))
    step = plan(_snapshot(fleet, objects={key: body for key, body in current.items() if key != SET}))
    assert [key_of(body) for body in step.apply] == [SET]
    assert step.apply[0]["spec"]["template"] == template_of(engineArgs=["--new"])
    bad = plan(_snapshot(fleet_of(after(step), engineArgs=["--new"]), objects=current, pods=[*FOUR[:3], BAD]))
    assert (list(bad.apply), list(bad.evict), bad.status.update.good_revision) == ([], [], "")
    assert "there is no earlier revision that was good: correct the spec" in bad.status.message
    # Once it works, as after a Secret was made, it has not failed.
    new = [a_pod(n, NEW) for n in range(4)]
    for _ in range(3):
        done = plan(_snapshot(fleet_of(after(bad), engineArgs=["--new"]), objects=current, pods=new))
        bad = done
    assert (done.status.update.phase, done.status.update.good_revision) == ("Complete", NEW)


def test_a_pod_that_cannot_work_goes_back_also_while_the_update_is_paused() -> None:
    spec: dict[str, Any] = {"engineArgs": ["--new"], "update": {"paused": True, "maxUnavailable": 3}}
    fleet, good = failed_fleet(**spec), template_of()
    objects = objects_of(fleet_of(), revision=OLD)
    serves = a_pod(2, NEW)
    step = plan(_snapshot(fleet, objects=objects, pods=[*FOUR[:2], serves, BAD], good_template=good))
    assert evicted(step) == ["demo-3"]
    rest = plan(_snapshot(fleet, objects=objects, pods=[*FOUR[:2], serves, FOUR[3]], good_template=good))
    assert not rest.evict
    assert "going back to revision demo-old: paused: set update.paused" in rest.status.update.message


def test_what_failed_is_not_tried_again_until_the_template_changes() -> None:
    args: dict[str, Any] = {"engineArgs": ["--new"]}
    good = template_of()
    for spec in (args, {**args, "replicas": 5}, {**args, "update": {"maxUnavailable": 2}}):
        fleet = failed_fleet(**args)
        changed = fleet_of(fleet.status.stored(), **spec)
        step = plan(_snapshot(changed, objects=objects_of(fleet_of(**args)), pods=FOUR, good_template=good))
        assert digest_of(next(body for body in step.apply if key_of(body) == SET)) == digest_of(
            {"spec": {"template": good}}
        )
        assert step.status.update.phase == "Failed"
    other = fleet_of(failed_fleet(**args).status.stored(), engineArgs=["--better"])
    step = look(other, FOUR, revision="demo-3rd")
    assert (step.status.update.phase, evicted(step), step.status.reason) == ("Canary", ["demo-3"], "PodsOutdated")
    # Undo: the earlier spec needs no canary.
    back = look(fleet_of(failed_fleet(**args).status.stored()), FOUR, revision=OLD)
    assert (back.status.update.phase, back.status.reason, list(back.evict)) == ("Complete", "AllReplicasReady", [])


def test_without_an_earlier_good_revision_the_update_stops() -> None:
    status = in_phase("Canary", goodRevision="")
    step = look(fleet_of(status), [*FOUR[:3], BAD])
    assert "there is no earlier revision that was good: correct the spec" in step.status.message
    again = look(fleet_of(after(step)), [*FOUR[:3], BAD])
    assert (list(again.evict), list(again.apply), again.status.update.phase) == ([], [], "Failed")


def test_without_an_earlier_good_revision_the_update_goes_on_once_the_canary_works() -> None:
    """As when a Secret that was missing is made, which is no change of the template."""
    step = look(fleet_of(in_phase("Canary", goodRevision="")), [*FOUR[:3], BAD])
    assert step.status.update.failed
    works = look(fleet_of(after(step)), [*FOUR[:3], a_pod(3, NEW)])
    assert (works.status.update.phase, list(works.status.update.failed)) == ("Rolling", [])
    assert reasons(works) == ["CanaryPassed"]
    assert evicted(works) == ["demo-2"]


CANNOT = "the pod cannot be checked: PoC does not run on this model"


def unchecked(
    message: str = CANNOT, *, since: float | None = None, ready_for: float = 4000
) -> tuple[PoCFleet, PodView]:
    """A fleet whose canary is ready and has no result, and cannot be checked since so many seconds."""
    canary = a_pod(3, NEW, age=5000, ready_since=NOW - timedelta(seconds=ready_for))
    known: dict[str, Any] = {} if since is None else {"canaryTime": (NOW - timedelta(seconds=since)).isoformat()}
    status = in_phase("Canary", canary="demo-3", **known) | {"pods": [check(canary, "Pending", message)]}
    return fleet_of(status, selfCheck={"enabled": True}), canary


def test_a_canary_that_cannot_be_checked_fails() -> None:
    """It serves chat, and would never compute a nonce."""
    fleet, canary = unchecked(since=3601)
    step = look(fleet, [*FOUR[:3], canary])
    assert step.status.update.phase == "Failed"
    said = f"pod demo-3 has not passed its self-check within 3600 s: {CANNOT}; going back to revision {OLD}"
    assert said in step.status.update.message
    assert "set selfCheck.enabled to false" in step.status.update.message
    without = look(fleet_of(after(step), selfCheck={"enabled": False}), FOUR)
    assert (without.status.update.phase, evicted(without)) == ("Canary", ["demo-3"])


@pytest.mark.parametrize(
    "seen",
    [
        {"since": 3599},
        {"since": 3601, "message": "the pod computes its nonces"},
        # It became ready while no operator ran, or was replaced by hand: this is the first answer.
        {"since": None},
        {"since": 4001, "ready_for": 4000},
    ],
)
def test_a_canary_has_its_time_to_be_checked(seen: dict[str, Any]) -> None:
    fleet, canary = unchecked(**seen)
    step = look(fleet, [*FOUR[:3], canary])
    assert step.status.update.phase == "Canary"
    begun = {None: NOW, 4001: NOW}.get(seen["since"], NOW - timedelta(seconds=seen["since"] or 0))
    assert step.status.update.canary_time == begun


def test_what_has_failed_and_works_has_not_failed() -> None:
    """Once all pods have the change that was meant, self-checks are back on, and its failure is forgotten."""
    bad = a_pod(3, NEW)
    status = in_phase("Canary", canary="demo-3") | {"pods": [check(bad, "Failed", "9 of 32 differ")]}
    failed = look(fleet_of(status, selfCheck={"enabled": True}), [*FOUR[:3], bad])
    pods = [a_pod(n, NEW) for n in range(4)]
    done = look(fleet_of(after(failed), selfCheck={"enabled": False}), pods)
    assert (done.status.update.phase, done.status.update.good_revision) == ("Complete", NEW)
    checks = {"pods": [check(pod, "Passed") for pod in pods]}
    again = look(fleet_of(after(done) | checks, selfCheck={"enabled": True}), pods)
    assert (again.status.reason, again.moves) == ("AllReplicasReady", False)


def test_a_crash_beside_a_failed_self_check_is_no_change_that_is_meant() -> None:
    crashed, failed = a_pod(2, NEW, ready=False, waiting_for="CrashLoopBackOff", age=5), a_pod(3, NEW)
    status = in_phase("Canary", canary="demo-3") | {"pods": [check(failed, "Failed", "9 of 32 differ")]}
    step = look(fleet_of(status, selfCheck={"enabled": True}), [*FOUR[:2], crashed, failed])
    (failure,) = step.status.update.failed
    assert "demo-2 cannot run" in failure.message
    assert not failure.by_self_check


def test_a_change_of_results_that_is_meant_is_tried_again_without_self_checks() -> None:
    """As a release of vLLM with other kernels, which the first pod's self-check has failed."""
    bad = a_pod(3, NEW)
    status = in_phase("Canary", canary="demo-3") | {"pods": [check(bad, "Failed", "9 of 32 differ")]}
    failed = look(fleet_of(status, selfCheck={"enabled": True}), [*FOUR[:3], bad])
    assert "if the change is meant, set selfCheck.enabled to false until all pods have it" in failed.status.message
    kept = {"enabled": True, "intervalSeconds": 3600}
    assert look(fleet_of(after(failed), selfCheck=kept), [*FOUR[:3], bad]).status.update.phase == "Failed"
    step = look(fleet_of(after(failed), selfCheck={"enabled": False}), FOUR)
    assert (step.status.update.phase, evicted(step), reasons(step)) == ("Canary", ["demo-3"], ["UpdateStarted"])
    # A crash is no change that is meant.
    crashed = look(fleet_of(in_phase("Canary", canary="demo-3")), [*FOUR[:3], BAD])
    assert look(fleet_of(after(crashed), selfCheck={"enabled": False}), FOUR).status.update.phase == "Failed"


def test_a_strategy_that_begins_to_act_begins_with_the_canary() -> None:
    """Never, and then BetweenRounds: the template has not been tried."""
    never = look(fleet_of(update={"strategy": "Never"}), FOUR)
    assert not never.evict
    step = look(fleet_of(after(never), update={"maxUnavailable": 3}), FOUR)
    assert (step.status.update.phase, evicted(step), reasons(step)) == ("Canary", ["demo-3"], ["UpdateStarted"])


def test_going_back_to_what_was_good_needs_no_canary() -> None:
    pods = [a_pod(0, NEW), a_pod(1, NEW), a_pod(2, OLD, ready=False, restarts=3), FOUR[3]]
    step = look(fleet_of(), pods, revision=OLD)
    assert (step.status.update.phase, list(step.evict), list(step.status.update.failed)) == ("Rolling", [], [])


def test_entries_of_pods_keep_what_is_known_of_a_server() -> None:
    known = [check(FOUR[0], "Passed", "fine"), {**check(FOUR[1], "Passed"), "server": "earlier"}, check(BAD, "Failed")]
    fleet = fleet_of({**GOOD, "pods": known}, selfCheck={"enabled": True})
    found = look(fleet, FOUR[:2]).status.pods
    assert [(one.name, one.result, one.message, one.revision) for one in found] == [
        ("demo-0", "Passed", "fine", OLD),
        ("demo-1", "Pending", "the pod computes its nonces", OLD),
    ]
    assert found[1].server == FOUR[1].server(8000)


def test_differences_are_named_by_their_fields() -> None:
    good = template_of(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "1"}])
    good["spec"]["containers"][0]["terminationMessagePath"] = "/set/by/kubernetes"
    wanted = template_of(image="registry/worker:2", env=[{"name": "A", "value": "2"}])
    assert differences(good, wanted) == (
        "spec.containers[vllm].image is registry/worker:2 instead of registry/worker:1, "
        "spec.containers[vllm].env[A].value is 2 instead of 1, spec.containers[vllm].env[B] is gone"
    )
    assert differences(good, good) == ""


def test_a_status_without_an_update_says_that_it_is_complete() -> None:
    assert FleetStatus().stored()["update"]["phase"] == "Complete"


def test_a_word_of_a_newer_operator_is_read() -> None:
    assert UpdateStatus.model_validate({"phase": "Other"}).phase == "Complete"
