# SPDX-License-Identifier: Apache-2.0
"""Replicas that span several Kubernetes nodes: leaders serve, workers follow, and leaders are replaced by number."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, GROUPS_KIND, GROUPS_LABEL, fleet_selector
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.groups import HELD, partition_of, with_partition, without_nulls
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.fleets.render import HASH, signed
from poc_operator.fleets.resolve import TOKEN_VOLUME
from poc_operator.fleets.rollback import digest_of
from poc_operator.observed import PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet
from tests.unit.poc_operator.fleets.test_update import GOOD, NEW, OLD, a_pod

KNOWN = replace(AROUND, leader_worker_sets=True)
SPAN = {"parallelism": {"tensor": 8, "pipeline": 2, "kubernetesNodes": 2}, "gpu": {"count": 8}}
SET: Key = (GROUPS_KIND, "demo")


def spanning(**spec: Any) -> PoCFleet:  # noqa: ANN401
    return a_fleet(**{**SPAN, **spec})


def step_of(fleet: PoCFleet, **seen: Any) -> FleetStep:  # noqa: ANN401
    return plan(FleetSnapshot(fleet=fleet, now=NOW, **{"around": KNOWN, **seen}))


def objects_of(fleet: PoCFleet) -> dict[Key, Any]:
    return {key_of(body): body for body in step_of(fleet).apply}


def templates_of(fleet: PoCFleet) -> tuple[Any, Any]:
    both = objects_of(fleet)[SET]["spec"]["leaderWorkerTemplate"]
    return both["leaderTemplate"], both["workerTemplate"]


def test_a_leader_worker_set_stands_for_the_stateful_set() -> None:
    found = objects_of(spanning(replicas=3))
    assert {kind for kind, _ in found} == {GROUPS_KIND, "Service", "NetworkPolicy", "PodDisruptionBudget"}
    assert [name for kind, name in found if kind == "Service"] == ["demo"], "LeaderWorkerSet names the pods"
    spec = found[SET]["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"] == HELD


def test_the_leader_serves_and_workers_follow_it() -> None:
    leader, worker = templates_of(spanning(replicas=1, servedName="demo", engineArgs=["--max-num-seqs=8"]))
    ours, theirs = leader["spec"]["containers"][0], worker["spec"]["containers"][0]
    flags = ["--nnodes=2", "--node-rank=0", "--master-addr=$(LWS_LEADER_ADDRESS)", "--distributed-executor-backend=mp"]
    assert [flag for flag in ours["args"] if flag in flags] == flags
    followed = ["--node-rank=$(LWS_WORKER_INDEX)" if flag == "--node-rank=0" else flag for flag in ours["args"]]
    assert theirs["args"] == [*followed, "--headless"]
    assert ours["resources"] == theirs["resources"]
    assert not {"ports", "readinessProbe", "livenessProbe", "startupProbe", "lifecycle"} & theirs.keys()
    assert "VLLM_POC_TOKEN_FILE" in {one["name"] for one in ours["env"]}
    assert "VLLM_POC_TOKEN_FILE" not in {one["name"] for one in theirs["env"]}
    volumes = [{one["name"] for one in pod["spec"]["volumes"]} for pod in (leader, worker)]
    assert volumes == [{"shm", "cache", TOKEN_VOLUME}, {"shm", "cache"}]
    assert {one["name"] for one in theirs["volumeMounts"]} == {"shm", "cache"}


def test_what_shares_the_volume_of_the_token_is_in_no_worker() -> None:
    mount = {"name": TOKEN_VOLUME, "mountPath": "/t"}
    own = {"initContainers": [{"name": "a", "volumeMounts": [mount]}], "containers": [{"name": "b"}]}
    leader, worker = templates_of(spanning(podTemplate={"spec": own}))
    assert leader["spec"]["initContainers"][0]["volumeMounts"] == [mount]
    assert worker["spec"]["initContainers"] == [{"name": "a", "volumeMounts": []}]
    assert [one["name"] for one in worker["spec"]["containers"]] == ["vllm", "b"]


def test_no_selector_of_rounds_takes_a_worker() -> None:
    own = {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}}
    leader, worker = templates_of(spanning(podTemplate=own, spread={}))
    assert fleet_selector("demo").matches(leader["metadata"]["labels"])
    assert leader["metadata"]["labels"]["poc.gonka.ai/worker"] == "true"
    labels = worker["metadata"]["labels"]
    assert not {FLEET_LABEL, "poc.gonka.ai/worker", "team", "app.kubernetes.io/instance"} & labels.keys()
    assert worker["metadata"]["annotations"]["note"] == "b"
    assert "topologySpreadConstraints" in leader["spec"]
    assert "topologySpreadConstraints" not in worker["spec"]


def test_budget_and_policy_are_for_all_pods_and_chat_for_leaders() -> None:
    found = objects_of(spanning())
    assert found["Service", "demo"]["spec"]["selector"] == {FLEET_LABEL: "demo"}
    everyone = {"matchLabels": {GROUPS_LABEL: "demo"}}
    assert found["PodDisruptionBudget", "demo"]["spec"]["selector"] == everyone
    policy = found["NetworkPolicy", "demo"]["spec"]
    assert policy["podSelector"] == everyone
    assert policy["ingress"] == [
        {"ports": [{"port": "http", "protocol": "TCP"}]},
        {"from": [{"podSelector": everyone}]},
    ]


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"containers": [{"name": "vllm", "args": ["own"]}]}, "must not replace the args of vllm"),
        ({"containers": [{"name": "vllm", "$patch": "delete"}, {"name": "own"}]}, "must keep vllm"),
    ],
)
def test_a_patch_that_leaves_no_worker_is_refused(patch: Any, says: str) -> None:  # noqa: ANN401
    status = step_of(spanning(podTemplate={"spec": patch})).status
    assert (status.reason, says in status.message) == (Reason.POD_TEMPLATE_INVALID, True)


def test_a_cluster_without_leader_worker_sets_is_told() -> None:
    step = step_of(spanning(), around=AROUND)
    assert (step.apply, step.status.reason) == ((), Reason.LEADER_WORKER_SET_UNKNOWN)
    assert "install LeaderWorkerSet" in step.status.message
    assert step.status.own_conditions["Stalled"].status == "True"
    assert step_of(a_fleet(), around=AROUND).apply


PODS = st.lists(
    st.tuples(st.sampled_from([OLD, NEW]), st.sampled_from(["serves", "loads", "leaves", "evicted", "back", "unseen"])),
    max_size=6,
)


@given(pods=PODS, present=st.integers(0, 7), done=st.booleans())
def test_no_leader_is_replaced_that_serves_or_is_not_seen(
    pods: list[tuple[str, str]], present: int, done: bool
) -> None:
    seen = [
        (number, replace(a_pod(number, revision, ready=how not in ("loads", "back")), terminating=how == "leaves"))
        for number, (revision, how) in enumerate(pods)
        if how != "unseen"
    ]
    evicted = frozenset(pod.uid for number, pod in seen if pods[number][1] == "evicted")
    names = {pod.name: NEW for number, pod in seen if pods[number][1] in ("evicted", "back")}
    fleet, leaders = spanning(replicas=len(pods), update={"canary": False}), {"updateRevision": NEW}
    leaders["currentRevision"] = NEW if done else OLD
    found = partition_of(fleet, {"status": leaders}, present, seen, evicted=evicted, names=names, digest=None)
    if done:
        assert found == HELD
        return
    assert not [how for revision, how in pods[found:] if revision == OLD and how == "serves"]
    passed = pods[found : min(present, len(pods))]
    assert all(how != "unseen" and (revision == NEW or how != "loads") for revision, how in passed)
    if present < found < HELD:  # it goes up for nobody else
        assert pods[found - 1] == (OLD, "serves")


def seen_by_kubernetes(fleet: PoCFleet, partition: int = HELD) -> dict[Key, Any]:
    """The objects of a fleet whose template has just changed, as the API server has them."""
    found = objects_of(fleet)
    found[SET] = signed(with_partition(found[SET], partition))
    for body in found.values():
        body["metadata"] |= {"resourceVersion": "1", "generation": 1, "uid": f"{body['kind']}-uid"}
    found[SET]["status"] = {"observedGeneration": 1}
    status = {"observedGeneration": 1, "updateRevision": NEW, "currentRevision": OLD}
    owner = {"kind": GROUPS_KIND, "name": "demo", "uid": f"{GROUPS_KIND}-uid", "controller": True}
    metadata = {"name": "demo", "generation": 1, "resourceVersion": "1", "uid": "leaders", "ownerReferences": [owner]}
    leaders = {"kind": "StatefulSet", "metadata": metadata}
    template = {"metadata": {"labels": {FLEET_LABEL: "demo"}}}
    return {**found, ("StatefulSet", "demo"): {**leaders, "spec": {"template": template}, "status": status}}


def updating(pods: list[PodView], partition: int = HELD, **seen: Any) -> FleetStep:  # noqa: ANN401
    fleet = spanning(replicas=3, update={"canary": False}, status=GOOD)
    return step_of(fleet, objects=seen_by_kubernetes(fleet, partition), pods=pods, **seen)


def partition(step: FleetStep) -> int | None:
    """The partition that a step applies; None if it applies no LeaderWorkerSet."""
    body = next((one for one in step.apply if key_of(one) == SET), None)
    return None if body is None else int(body["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"])


def test_leaders_are_replaced_by_their_numbers_and_the_partition_follows() -> None:
    pods = [a_pod(0, ready=False, waiting_for="CrashLoopBackOff"), a_pod(1), a_pod(2)]
    step = updating([a_pod(0), a_pod(1), a_pod(2)])
    assert (partition(step), [one.pod.name for one in step.evict]) == (None, ["demo-2"])
    gone: Any = {"evicted_names": {"demo-2": NEW}}
    assert partition(updating([a_pod(0), a_pod(1), a_pod(2)], evicted=frozenset(["u2-demo-old"]), **gone)) == 2
    # One that came back before the partition was lowered goes once more, unless it serves by now.
    back = a_pod(2, ready=False)
    assert partition(updating([a_pod(0), a_pod(1), back], **gone)) == 2
    assert partition(updating([a_pod(0), a_pod(1), a_pod(2)], **gone)) is None
    assert partition(updating([a_pod(0), a_pod(1), a_pod(2)], partition=1)) == HELD
    # One that was evicted for another template, or since it hung, came back and serves.
    for revision in ("demo-before", ""):
        assert partition(updating([a_pod(0), a_pod(1), a_pod(2)], evicted_names={"demo-2": revision})) is None
    step = updating([a_pod(0), a_pod(1), a_pod(2, NEW)], partition=2)
    assert (partition(step), [one.pod.name for one in step.evict]) == (None, ["demo-1"])
    # A broken one waits for its turn, since those above it would be replaced with it.
    assert [one.pod.name for one in updating(pods).evict] == []
    assert [one.pod.name for one in updating([pods[0], a_pod(1, NEW), a_pod(2, NEW)], partition=1).evict] == ["demo-0"]
    busy = {"u2-demo-old": "waiting for pod demo-2, which computes work of others"}
    assert not updating([a_pod(0), a_pod(1), a_pod(2)], busy=busy).evict


def test_another_template_begins_with_all_leaders_held() -> None:
    fleet = spanning(replicas=3, update={"canary": False}, status=GOOD)
    there = seen_by_kubernetes(spanning(replicas=3), partition=1)
    changed = spanning(replicas=3, status=GOOD, engineArgs=["--max-num-seqs=8"])
    step = step_of(changed, objects=there, pods=[a_pod(number, NEW) for number in range(3)])
    assert (partition(step), step.evict) == (HELD, ())
    # So does a template that has lost a field.
    there = seen_by_kubernetes(spanning(replicas=3, priorityClassName="gpu"), partition=1)
    assert partition(step_of(fleet, objects=there, pods=[a_pod(2, NEW)])) == HELD


def test_nothing_moves_before_the_stateful_set_is_seen_with_the_template() -> None:
    """Both are watched, each by itself: the older view of one would tell of the revisions of the template before."""
    fleet = spanning(replicas=3, update={"canary": False}, status=GOOD)
    pods = [a_pod(0), a_pod(1), replace(a_pod(2), terminating=True)]
    there = seen_by_kubernetes(fleet)
    template = there["StatefulSet", "demo"]["spec"]["template"]
    wanted = there[SET]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["annotations"]
    template["metadata"]["annotations"] = {**wanted, HASH: "of-before"}
    assert partition(step_of(fleet, objects=there, pods=pods)) is None
    template["metadata"]["annotations"] = dict(wanted)
    assert partition(step_of(fleet, objects=there, pods=pods)) == 2


def test_no_leader_gets_a_template_that_nobody_has_tried() -> None:
    """Also in the turn that begins its update, while the status tells of one that passed."""
    rolling = {"update": {**GOOD["update"], "phase": "Rolling", "digest": "of-before"}}
    fleet = spanning(replicas=3, status=rolling)
    pods = [a_pod(0), a_pod(1), replace(a_pod(2), terminating=True)]
    step = step_of(fleet, objects=seen_by_kubernetes(fleet), pods=pods)
    assert (partition(step), step.status.update.phase) == (None, "Canary")


def test_a_revision_that_makes_no_workers_is_no_way_back() -> None:
    """As that of a StatefulSet of others, whose container has another name."""
    digest = digest_of(objects_of(spanning(replicas=3))[SET])
    failed = [{"digest": digest, "revision": NEW, "message": "it crashes", "time": NOW.isoformat()}]
    status = {"update": {**GOOD["update"], "phase": "Failed", "digest": digest, "failed": failed}}
    fleet = spanning(replicas=3, status=status)
    revision = {"metadata": {}, "spec": {"containers": [{"name": "own"}]}}
    pods = [a_pod(0), a_pod(1), a_pod(2, NEW, ready=False, waiting_for="CrashLoopBackOff")]
    step = step_of(fleet, objects=seen_by_kubernetes(fleet, 2), pods=pods, good_template=revision)
    assert "there is no earlier revision that was good" in step.status.update.message
    assert not step.evict


def test_a_canary_whose_group_is_made_anew_again_and_again_fails() -> None:
    status = {"update": {**GOOD["update"], "phase": "Canary"}}
    fleet = spanning(replicas=3, status=status)
    there = seen_by_kubernetes(fleet, partition=2)
    pods = [a_pod(0), a_pod(1), a_pod(2, NEW, ready=False, age=5)]
    first = step_of(fleet, objects=there, pods=pods).status.update
    assert (first.phase, first.canary_time) == ("Canary", NOW)
    later = NOW.replace(day=NOW.day + 1)
    anew = [*pods[:2], replace(pods[2], created=later)]
    again = spanning(replicas=3, status={"update": first.model_dump(mode="json", by_alias=True)})
    step = plan(FleetSnapshot(fleet=again, around=KNOWN, now=later, objects=there, pods=anew))
    assert step.status.update.phase == "Failed"
    assert "was not ready within 3660 s" in step.status.update.message


def test_templates_of_revisions_lose_their_nulls() -> None:
    assert without_nulls({"a": None, "b": [{"c": None, "d": "e"}], "f": 0}) == {"b": [{"d": "e"}], "f": 0}
