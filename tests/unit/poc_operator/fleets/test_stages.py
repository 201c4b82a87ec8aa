# SPDX-License-Identifier: Apache-2.0
"""Stages of pods, read from bodies as a kubelet writes them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet_upkeep import CheckResult, FleetPod, Stage
from poc_operator.fleets.stages import GpuErrors, KubernetesNode, stage_of, stages_of, with_stages
from poc_operator.observed import PodView

STARTED = "2026-01-01T00:00:00Z"


def body_of(
    *,
    name: str = "demo-0",
    node: str | None = "gpu-1",
    state: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
    started: bool = False,
    inits: Sequence[dict[str, Any]] = (),
    **conditions: str,
) -> PodView:
    container = {"name": "vllm", "restartCount": 0, "started": started, "state": state or {}, "lastState": last or {}}
    ready = conditions.pop("Ready", "False")
    found = [{"type": kind, "status": status} for kind, status in conditions.items()]
    found.append({"type": "Ready", "status": ready, **({"reason": "ContainersNotReady"} if ready == "False" else {})})
    if node is None:
        why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        found.append({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why})
    spec = {"containers": [{"name": "vllm", "ports": [{"containerPort": 8000}]}], "nodeName": node}
    status: dict[str, Any] = {"phase": "Pending", "conditions": found, "containerStatuses": [container] if node else []}
    status["initContainerStatuses"] = [{"name": f"init-{number}", "state": one} for number, one in enumerate(inits)]
    return PodView.parse({"metadata": {"name": name, "namespace": "ns", "uid": name}, "spec": spec, "status": status})


CREATING = {"waiting": {"reason": "ContainerCreating"}}
INITIALIZING = {"waiting": {"reason": "PodInitializing"}}
DONE = {"terminated": {"reason": "Completed", "exitCode": 0}}
RUNNING = {"running": {"startedAt": STARTED}}
CRASHES = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s restarting failed container=vllm"}}
BACK_OFF = (
    'Back-off pulling image "acme/vllm-poc:0.9": ErrImagePull: rpc error: code = NotFound desc = failed to pull and '
    'unpack image "docker.io/acme/vllm-poc:0.9": failed to resolve reference "docker.io/acme/vllm-poc:0.9": '
    "docker.io/acme/vllm-poc:0.9: not found"
)
KILLED = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
SPOKE = {"terminated": {"reason": "Error", "exitCode": 1, "message": "Traceback\nValueError: no such model\n"}}

STAGES: dict[str, tuple[PodView, Stage, str]] = {
    "no Kubernetes node": (
        body_of(node=None),
        Stage.PENDING,
        "demo-0 (0/3 nodes are available: 3 Insufficient nvidia.com/gpu.)",
    ),
    "volumes": (body_of(state=CREATING, PodReadyToStartContainers="False"), Stage.CREATING, "demo-0 (Creating)"),
    "an older kubelet": (body_of(state=CREATING), Stage.CREATING, "demo-0 (Creating)"),
    "the image": (body_of(state=CREATING, PodReadyToStartContainers="True"), Stage.PULLING, "demo-0 (Pulling)"),
    "no image": (
        body_of(state={"waiting": {"reason": "ImagePullBackOff"}}, PodReadyToStartContainers="True"),
        Stage.FAILING,
        "demo-0 (ImagePullBackOff)",
    ),
    "no image, as the registry says": (
        body_of(state={"waiting": {"reason": "ImagePullBackOff", "message": BACK_OFF}}),
        Stage.FAILING,
        'demo-0 (ImagePullBackOff: failed to resolve reference "docker.io/acme/vllm-poc:0.9": '
        "docker.io/acme/vllm-poc:0.9: not found)",
    ),
    "an init container runs": (
        body_of(state=INITIALIZING, inits=[DONE, RUNNING, INITIALIZING]),
        Stage.CREATING,
        "demo-0 (Creating)",
    ),
    "an init container without image": (
        body_of(state=INITIALIZING, inits=[DONE, {"waiting": {"reason": "ErrImagePull"}}, INITIALIZING]),
        Stage.FAILING,
        "demo-0 (ErrImagePull)",
    ),
    "an init container that crashes": (
        body_of(state=INITIALIZING, inits=[{"waiting": {"reason": "CrashLoopBackOff"}}]),
        Stage.FAILING,
        "demo-0 (CrashLoopBackOff)",
    ),
    "loads": (body_of(state=RUNNING), Stage.LOADING, "demo-0 (Loading)"),
    "loads again": (
        body_of(state=RUNNING, last=KILLED),
        Stage.LOADING,
        "demo-0 (Loading; last ended with OOMKilled, exit code 137)",
    ),
    "crashes": (
        body_of(state=CRASHES, last=KILLED),
        Stage.FAILING,
        "demo-0 (CrashLoopBackOff; last ended with OOMKilled, exit code 137)",
    ),
    "crashes with words": (
        body_of(state=CRASHES, last=SPOKE),
        Stage.FAILING,
        "demo-0 (CrashLoopBackOff; last ended with Error, exit code 1: ValueError: no such model)",
    ),
    "does not answer now": (body_of(state=RUNNING, started=True), Stage.NOT_READY, "demo-0 (NotReady)"),
    "serves": (body_of(state=RUNNING, started=True, Ready="True"), Stage.READY, "demo-0 (Ready)"),
}


@pytest.mark.parametrize(("pod", "stage", "text"), STAGES.values(), ids=STAGES)
def test_a_stage_is_what_the_kubelet_tells(pod: PodView, stage: Stage, text: str) -> None:
    assert stage_of(pod, 8000) is stage
    assert stages_of([pod], 8000) == text


@pytest.mark.parametrize(("word", "ready"), [("True", True), ("False", False), ("Unknown", False)])
def test_a_kubernetes_node_is_ready_as_its_condition_says(word: str, ready: bool) -> None:
    conditions = [{"type": "DiskPressure", "status": "True"}, {"type": "Ready", "status": word}]
    conditions[1]["lastTransitionTime"] = STARTED
    found = KubernetesNode.parse({"status": {"conditions": conditions}})
    assert found == KubernetesNode(ready=ready, since=datetime.fromisoformat(STARTED))
    assert KubernetesNode.parse({}) == KubernetesNode(ready=False)


def test_few_pods_are_named() -> None:
    pods = [body_of(name=f"demo-{number}", state=RUNNING) for number in range(5)]
    assert stages_of(pods, 8000) == "demo-0 (Loading), demo-1 (Loading), demo-2 (Loading) and 2 more"


def test_the_list_follows_the_numbers_and_keeps_what_else_is_known() -> None:
    pods = [body_of(name=f"demo-{number}", state=RUNNING) for number in (10, 2, 1)]
    entries = [FleetPod(name=pod.name, uid=pod.uid, result=CheckResult.PASSED) for pod in pods]
    found = with_stages(entries, [], pods, 8000, {})
    assert [entry.name for entry in found] == ["demo-1", "demo-2", "demo-10"]
    assert {entry.result for entry in found} == {CheckResult.PASSED}
    assert {entry.stage for entry in found} == {Stage.LOADING}


@pytest.mark.parametrize(
    ("result", "checks_pods", "stage"),
    [
        (CheckResult.PENDING, True, Stage.CHECKING),
        (CheckResult.PENDING, False, Stage.READY),
        (CheckResult.PASSED, True, Stage.READY),
        (CheckResult.FAILED, True, Stage.READY),
    ],
)
def test_a_pod_that_serves_is_checked_before_it_is_ready(result: CheckResult, checks_pods: bool, stage: Stage) -> None:
    pods = [body_of(name="demo-0", state=RUNNING, started=True, Ready="True"), body_of(name="demo-1", state=RUNNING)]
    entries = [FleetPod(name=pod.name, uid=pod.uid, result=result) for pod in pods]
    found = with_stages(entries, [], pods, 8000, {}, checks_pods=checks_pods)
    assert [entry.stage for entry in found] == [stage, Stage.LOADING]


@pytest.mark.parametrize(
    ("told", "last", "xids"),
    [
        ({}, 4, (2, 79)),
        ({"demo-0": GpuErrors(memory=5, xids=0)}, 5, (2, 79)),
        ({"demo-0": GpuErrors(memory=5, xids=1, last_xid=94)}, 5, (2, 79)),
        ({"demo-0": GpuErrors(memory=5, xids=3, last_xid=94)}, 5, (3, 94)),
    ],
)
def test_the_errors_of_gpus_outlast_their_server(told: dict[str, GpuErrors], last: int, xids: tuple[int, int]) -> None:
    pod = body_of(name="demo-0", state=RUNNING)
    errors = {"memory_errors_before": 3, "memory_errors": 4, "xid_errors": 2, "last_xid": 79}
    old = [FleetPod(name=pod.name, uid=pod.uid, server="earlier", **errors)]
    (found,) = with_stages([FleetPod(name=pod.name, uid=pod.uid)], old, [pod], 8000, told)
    assert (found.memory_errors_before, found.memory_errors) == (3, last)
    assert (found.xid_errors, found.last_xid) == xids
