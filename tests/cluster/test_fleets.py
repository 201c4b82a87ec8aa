# SPDX-License-Identifier: Apache-2.0
"""Fleets, kept by the operator's process against a real API server. No kubelet runs: the test writes pods."""

import asyncio
import base64
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.meta import DOWNLOAD_LABEL, FLEET_LABEL
from poc_operator.clients.kube.fleet_objects import KINDS
from poc_operator.fleets.progress import SERIES
from tests.cluster.test_process import environment, running
from tests.support.servers.api_server import ApiServer
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import running_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

__all__ = ["environment"]

NAMESPACE = "default"
IMAGE = "registry.example.org/worker:1"
FLEETS = f"/apis/poc.gonka.ai/v1alpha1/namespaces/{NAMESPACE}/pocfleets"
ROUNDS = f"/apis/poc.gonka.ai/v1alpha1/namespaces/{NAMESPACE}/pocrounds"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
#: What every fleet has: kind and the end of the name.
OBJECTS = (
    ("StatefulSet", ""),
    ("Service", ""),
    ("Service", "-pods"),
    ("PodDisruptionBudget", ""),
    ("NetworkPolicy", ""),
)
PATH = {"model": {"path": "org/model"}}

Body = dict[str, Any]


def path_of(kind: str, name: str) -> str:
    api, plural = KINDS[kind]
    return f"{api}/namespaces/{NAMESPACE}/{plural}/{name}"


async def until(api: ApiServer, path: str, holds: Callable[[int, Body], bool], seconds: float = 40) -> Body:
    """Read an object until it is as wanted, and return it."""
    end = monotonic() + seconds
    while True:
        code, body = api.request("GET", path)
        if holds(code, body):
            found: Body = body
            return found
        assert monotonic() < end, (code, json.dumps(body)[:2000])
        await asyncio.sleep(0.2)


def bound(round_: Body) -> list[str]:
    """Return the pods that have a slot, and an empty name for each slot without one."""
    return sorted(slot.get("pod", "") for slot in round_["status"]["assignments"])


def pod_of(body: Body) -> Body:
    found: Body = body["spec"]["template"]["spec"]
    return found


def exists(code: int, _: Body) -> bool:
    return code == HTTPStatus.OK


def says(reason: str) -> Callable[[int, Body], bool]:
    return lambda code, body: code == HTTPStatus.OK and body.get("status", {}).get("reason") == reason


@pytest.fixture
async def operator(environment: Mapping[str, str], tmp_path: Path) -> AsyncIterator[Process]:
    """The operator for all namespaces, with an image for fleets."""
    async with running(environment, tmp_path, f"--worker-image={IMAGE}") as process:
        yield process


@pytest.mark.usefixtures("operator")
async def test_a_fleet_gets_its_objects_and_they_are_put_back(api: ApiServer) -> None:
    assert api.create("PoCFleet", "whole", {**PATH, "replicas": 2, "cache": {"size": "1Gi"}})[0] == 201
    for kind, end in OBJECTS:
        body = await until(api, path_of(kind, f"whole{end}"), exists)
        assert body["metadata"]["ownerReferences"][0]["kind"] == "PoCFleet"
        managers = {entry["manager"]: entry["operation"] for entry in body["metadata"]["managedFields"]}
        assert managers["vllm-poc-operator"] == "Apply"
    await until(api, path_of("PersistentVolumeClaim", "whole-cache"), exists)
    fleet = await until(api, f"{FLEETS}/whole", says("ReplicasNotReady"))
    assert fleet["status"]["ready"] == "0/2"

    token = api.request("GET", f"{SECRETS}/vllm-poc-token")[1]["data"]["token"]
    assert len(base64.b64decode(token)) > 30

    # What others change of ours comes back, what they add stays.
    service = path_of("Service", "whole")
    added = {"metadata": {"annotations": {"own": "yes"}}, "spec": {"selector": {"other": "pods"}}}
    assert api.request("PATCH", service, added)[0] == 200
    assert api.request("PATCH", path_of("StatefulSet", "whole"), {"spec": {"replicas": 7}})[0] == 200
    assert api.request("DELETE", path_of("NetworkPolicy", "whole"))[0] == 200
    await until(api, path_of("StatefulSet", "whole"), lambda _, body: body["spec"]["replicas"] == 2, 30)
    await until(api, path_of("NetworkPolicy", "whole"), exists, 30)
    found = await until(api, service, lambda _, body: FLEET_LABEL in body["spec"]["selector"], 30)
    assert found["metadata"]["annotations"]["own"] == "yes"

    # A field that leaves the spec leaves the objects; the scale subresource changes them.
    assert api.patch("PoCFleet", "whole", {"priorityClassName": "gpu", "engineArgs": ["--max-num-seqs=1"]})[0] == 200
    changed = path_of("StatefulSet", "whole")
    await until(api, changed, lambda _, body: pod_of(body).get("priorityClassName") == "gpu")
    assert api.patch("PoCFleet", "whole", {"priorityClassName": None})[0] == 200
    await until(api, changed, lambda _, body: "priorityClassName" not in pod_of(body))
    assert api.request("PATCH", f"{FLEETS}/whole/scale", {"spec": {"replicas": 3}})[0] == 200
    await until(api, changed, lambda _, body: body["spec"]["replicas"] == 3)
    scale = api.request("GET", f"{FLEETS}/whole/scale")[1]
    assert (scale["spec"]["replicas"], scale["status"]["selector"]) == (3, f"{FLEET_LABEL}=whole")
    # The token is never made anew.
    assert api.request("GET", f"{SECRETS}/vllm-poc-token")[1]["data"]["token"] == token


@pytest.mark.usefixtures("operator")
async def test_bad_fleets_say_why_and_harm_no_other(api: ApiServer) -> None:
    preset = {"model": {"preset": "glm-5.3-flash"}, "gpu": {"product": "NVIDIA-H200", "count": 2}}
    assert api.create("PoCFleet", "nearest", preset)[0] == 201
    wrong = {**PATH, "podTemplate": {"spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": -1}]}]}}}
    assert api.create("PoCFleet", "refused", wrong)[0] == 201
    own = {"metadata": {"name": "taken"}, "spec": {"ports": [{"port": 1}]}}
    assert api.request("POST", "/api/v1/namespaces/default/services", own)[0] == 201
    assert api.create("PoCFleet", "taken", PATH)[0] == 201
    assert api.create("PoCFleet", "fine", PATH)[0] == 201

    found = await until(api, f"{FLEETS}/nearest", says("GpuUnsupported"))
    assert "the nearest is 4 × H200" in found["status"]["message"]  # noqa: RUF001
    found = await until(api, f"{FLEETS}/refused", says("ObjectRefused"))
    assert "containerPort" in found["status"]["message"]
    found = await until(api, f"{FLEETS}/taken", says("ObjectConflict"))
    assert 'Service "taken" exists and belongs to no fleet' in found["status"]["message"]
    assert "selector" not in api.request("GET", path_of("Service", "taken"))[1]["spec"]
    await until(api, path_of("StatefulSet", "fine"), exists)
    conditions = {one["type"]: one["status"] for one in found["status"]["conditions"]}
    assert conditions == {"Ready": "False", "Progressing": "False", "Degraded": "True", "Stalled": "True"}

    # A change of the spec is tried at once.
    assert api.patch("PoCFleet", "nearest", {"gpu": {"count": 4}})[0] == 200
    body = await until(api, path_of("StatefulSet", "nearest"), exists, 10)
    pod = body["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


@pytest.mark.usefixtures("operator")
async def test_products_and_presets_come_from_the_cluster(api: ApiServer) -> None:
    node = {"metadata": {"name": "gpu-1", "labels": {"nvidia.com/gpu.product": "NVIDIA-B300-SXM6-AC"}}}
    assert api.request("POST", "/api/v1/nodes", node)[0] == 201
    preset = "{name: own, model: org/own, seqLen: 8, kDim: 4, gpus: [{product: any, count: 1, tensor: 1}]}"
    labels = {"poc.gonka.ai/presets": "true"}
    maps = {"metadata": {"name": "presets", "labels": labels}, "data": {"own.yaml": preset, "bad.yaml": "x"}}
    assert api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/configmaps", maps)[0] == 201
    assert api.create("PoCFleet", "found", {"model": {"preset": "minimax-m2.7"}, "replicas": 2})[0] == 201
    assert api.create("PoCFleet", "own", {"model": {"preset": "own"}})[0] == 201
    assert api.create("PoCFleet", "bad", {"model": {"preset": "bad"}})[0] == 201
    status = (await until(api, f"{FLEETS}/found", says("ReplicasNotReady")))["status"]
    assert (status["gpuProduct"], status["gpuCount"]) == ("NVIDIA-B300-SXM6-AC", 1)
    assert (status["seqLen"], status["expectedNoncesPerMinute"]) == (1024, 2 * 1792)
    assert (await until(api, f"{FLEETS}/own", says("ReplicasNotReady")))["status"]["model"] == "org/own"
    message = (await until(api, f"{FLEETS}/bad", says("PresetUnusable")))["status"]["message"]
    assert 'key "bad.yaml" of ConfigMap "presets"' in message


async def progress(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
    """What the pod of a download tells, to callers without a token."""
    allowed = b"authorization" not in dict(scope["headers"])
    await send({"type": "http.response.start", "status": 200 if allowed else 401, "headers": []})
    await send({"type": "http.response.body", "body": b'{"done": 43, "total": 100}'})


@pytest.mark.usefixtures("operator")
async def test_a_model_is_downloaded_before_pods_need_it(api: ApiServer) -> None:
    spec = {**PATH, "cache": {"size": "1Gi", "download": True}}
    assert api.create("PoCFleet", "ahead", spec)[0] == 201
    fleet = await until(api, f"{FLEETS}/ahead", says("Downloading"))
    job = fleet["status"]["download"]["job"]
    body = await until(api, path_of("Job", job), exists)
    await until(api, path_of("PersistentVolumeClaim", "ahead-cache"), exists)
    # Do what the Job's controller and a kubelet do.
    ip = "127.0.0.7"
    pod = {**body["spec"]["template"], "metadata": {"name": job, "labels": {DOWNLOAD_LABEL: job}}}
    pod["spec"] = {"containers": [{"name": "download", "image": "none", "ports": [{"containerPort": 8000}]}]}
    assert api.request("POST", PODS, pod)[0] == 201
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": ready}
    assert api.request("PATCH", f"{PODS}/{job}/status", {"status": status})[0] == 200
    async with serve(progress, ip, 8000):
        told = lambda _, body: body["status"]["message"] == "org/model is downloaded: 43 %"  # noqa: E731
        await until(api, f"{FLEETS}/ahead", told)
    assert api.request("GET", path_of("StatefulSet", "ahead"))[0] == HTTPStatus.NOT_FOUND
    now = body["metadata"]["creationTimestamp"]
    conditions = [{"type": kind, "status": "True"} for kind in ("SuccessCriteriaMet", "Complete")]
    done = {"startTime": now, "completionTime": now, "succeeded": 1, "conditions": conditions}
    code, refused = api.request("PATCH", f"{path_of('Job', job)}/status", {"status": done})
    assert code == 200, refused
    await until(api, path_of("StatefulSet", "ahead"), exists)
    assert api.request("DELETE", f"{PODS}/{job}", gracePeriodSeconds="0")[0] == 200

    assert api.create("PoCFleet", "no-pvc", {**PATH, "cache": {"download": True}})[0] == 422
    local = {"model": {"path": "/models/own"}, "cache": {"size": "1Gi", "download": True}}
    assert api.create("PoCFleet", "no-hub", local)[0] == 422


@pytest.mark.usefixtures("operator")
async def test_a_download_whose_token_is_corrected_is_made_anew(api: ApiServer) -> None:
    spec = {**PATH, "cache": {"size": "1Gi", "download": True}}
    assert api.create("PoCFleet", "corrected", spec)[0] == 201
    fleet = await until(api, f"{FLEETS}/corrected", says("Downloading"))
    path = path_of("Job", fleet["status"]["download"]["job"])
    before = (await until(api, path, exists))["metadata"]["uid"]
    assert api.patch("PoCFleet", "corrected", {"huggingFace": {"tokenSecret": "right"}})[0] == 200
    anew = lambda code, body: code == HTTPStatus.OK and body["metadata"]["uid"] != before  # noqa: E731
    body = await until(api, path, anew)
    assert '"name": "right"' in json.dumps(body["spec"]["template"])
    api.request("DELETE", f"{FLEETS}/corrected")


POD_MONITORS: Body = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {
            "kind": "PodMonitor",
            "plural": "podmonitors",
            "singular": "podmonitor",
            "listKind": "PodMonitorList",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


@pytest.mark.long
@pytest.mark.usefixtures("operator")
async def test_a_pod_monitor_is_made_where_the_cluster_knows_it(api: ApiServer) -> None:
    spec = {**PATH, "metrics": {"podMonitor": True}, "disruptionBudget": {"maxUnavailable": 2}}
    assert api.create("PoCFleet", "monitored", spec)[0] == 201

    def degraded(code: int, body: Body) -> bool:
        found = body.get("status", {}).get("conditions", [])
        return any(one["type"] == "Degraded" and one["reason"] == "PodMonitorUnknown" for one in found)

    await until(api, f"{FLEETS}/monitored", degraded)
    budget = await until(api, path_of("PodDisruptionBudget", "monitored"), exists)
    assert budget["spec"]["maxUnavailable"] == 2
    await until(api, path_of("StatefulSet", "monitored"), exists)
    api.install(POD_MONITORS)
    found = await until(api, path_of("PodMonitor", "monitored"), exists, 90)
    assert found["spec"]["selector"]["matchLabels"] == {FLEET_LABEL: "monitored"}
    await until(api, f"{FLEETS}/monitored", lambda code, body: not degraded(code, body))
    # A change of others is put back: it is listed from now on.
    changed: Body = {"spec": {"podMetricsEndpoints": []}}
    assert api.request("PATCH", path_of("PodMonitor", "monitored"), changed)[0] == 200
    await until(api, path_of("PodMonitor", "monitored"), lambda _, body: bool(body["spec"]["podMetricsEndpoints"]), 30)


async def test_an_orphaned_fleet_is_adopted_by_the_next(
    api: ApiServer, environment: Mapping[str, str], tmp_path: Path
) -> None:
    async with running(environment, tmp_path, f"--worker-image={IMAGE}"):
        assert api.create("PoCFleet", "adopted", {**PATH, "replicas": 2})[0] == 201
        before = await until(api, path_of("StatefulSet", "adopted"), exists)
        await until(api, f"{FLEETS}/adopted", says("ReplicasNotReady"))
        assert api.request("DELETE", f"{FLEETS}/adopted", propagationPolicy="Background")[0] == 200
        await until(api, f"{FLEETS}/adopted", lambda code, _: code == HTTPStatus.NOT_FOUND)
        # As the garbage collector does for --cascade=orphan.
        for kind, end in OBJECTS:
            api.request("PATCH", path_of(kind, f"adopted{end}"), {"metadata": {"ownerReferences": None}})
        assert api.create("PoCFleet", "adopted", {**PATH, "replicas": 3})[0] == 201
        found = await until(api, path_of("StatefulSet", "adopted"), lambda _, body: body["spec"]["replicas"] == 3)
        assert found["metadata"]["uid"] == before["metadata"]["uid"]
        owner = api.request("GET", f"{FLEETS}/adopted")[1]["metadata"]["uid"]
        assert [one["uid"] for one in found["metadata"]["ownerReferences"]] == [owner]


ROUND: Body = {
    "blockHash": "ab" * 32,
    "blockHeight": 7,
    "publicKey": "key",
    "model": {"name": "tiny", "seqLen": 64},
    "artifact": {"kDim": 4},
    "nodes": {"first": 0, "last": 0, "count": 1},
    "batchSize": 8,
}


def observe(api: ApiServer, fleet: str) -> None:
    """Do what the StatefulSets' controller does to a status."""
    path = path_of("StatefulSet", fleet)
    generation = api.request("GET", path)[1]["metadata"]["generation"]
    status = {"replicas": 0, "observedGeneration": generation, "updateRevision": "r1"}
    assert api.request("PATCH", f"{path}/status", {"status": status})[0] == 200


def add_pod(api: ApiServer, fleet: str, number: int, ip: str, port: int) -> None:
    """Let the API server know a ready pod of a fleet."""
    container = {"name": "vllm", "image": "none", "ports": [{"containerPort": port}]}
    labels = {FLEET_LABEL: fleet, "controller-revision-hash": "r1"}
    body = {"metadata": {"name": f"{fleet}-{number}", "labels": labels}, "spec": {"containers": [container]}}
    assert api.request("POST", PODS, body)[0] == 201
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
    assert api.request("PATCH", f"{PODS}/{fleet}-{number}/status", {"status": status})[0] == 200


@pytest.mark.usefixtures("operator")
async def test_a_round_takes_pods_port_and_groups_of_its_fleet(api: ApiServer) -> None:
    port = free_port()
    spec = {**ROUND, "fleetRef": {"name": "rounds"}, "stop": {"afterNonces": 50}}
    assert api.create("PoCRound", "of-a-fleet", spec)[0] == 201
    waits = lambda _, body: "there is no PoCFleet" in body.get("status", {}).get("message", "")  # noqa: E731
    await until(api, f"{ROUNDS}/of-a-fleet", waits)
    assert (
        api.create(
            "PoCFleet", "rounds", {**PATH, "replicas": 2, "port": port, "auth": {"open": True}, "callbackAllow": ["*"]}
        )[0]
        == 201
    )
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(running_pod()) for _ in range(2)]
        await stack.enter_async_context(serve(pods[0].app, "127.0.0.1", port))
        add_pod(api, "rounds", 0, "127.0.0.1", port)
        began = monotonic()
        await pods[0].reach(lambda status: status.next_index > 0)
        print(f"{monotonic() - began:.1f} s from a pod that is ready to its first nonce")  # noqa: T201
        assert monotonic() - began < 12
        # The slots follow the size that the fleet is to have: the second pod has yet to come.
        slots = lambda _, body: len(body.get("status", {}).get("assignments", [])) == 2  # noqa: E731
        await until(api, f"{ROUNDS}/of-a-fleet", slots)
        await stack.enter_async_context(serve(pods[1].app, "127.0.0.2", port))
        add_pod(api, "rounds", 1, "127.0.0.2", port)
        done = lambda _, body: body.get("status", {}).get("state") in ("Complete", "Failed")  # noqa: E731
        found = await until(api, f"{ROUNDS}/of-a-fleet", done, 90)
        assert found["status"]["state"] == "Complete", found["status"]
        assert (found["status"]["groups"], found["status"]["done"]) == (2, 2)
        observe(api, "rounds")
        fleet = await until(api, f"{FLEETS}/rounds", says("AllReplicasReady"))
        assert (fleet["status"]["ready"], fleet["status"]["updatedReplicas"]) == ("2/2", 2)
        assert [pod["result"] for pod in fleet["status"]["pods"]] == ["Passed", "Passed"]
        for number in range(2):
            api.request("DELETE", f"{PODS}/rounds-{number}", gracePeriodSeconds="0")


async def test_a_pod_that_computes_wrongly_gets_no_slot_also_of_the_next_process(
    api: ApiServer, environment: Mapping[str, str], tmp_path: Path
) -> None:
    port, opened = free_port(), {"auth": {"open": True}, "callbackAllow": ["*"], "selfCheck": {"nonces": 8}}
    spec = {
        **ROUND,
        "selector": {"matchLabels": {FLEET_LABEL: "checked"}},
        "stop": {"afterNonces": 10**8},
        "port": port,
    }
    slots = {"nodes": {**ROUND["nodes"], "groups": 3}}
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(running_pod()) for _ in range(3)]
        pods[0].engine.drift = 40
        for number, pod in enumerate(pods):
            await stack.enter_async_context(serve(pod.app, f"127.0.0.{number + 1}", port))
        async with running(environment, tmp_path, f"--worker-image={IMAGE}"):
            assert api.create("PoCFleet", "checked", {**PATH, **opened, "replicas": 3, "port": port})[0] == 201
            await until(api, path_of("StatefulSet", "checked"), exists)
            observe(api, "checked")
            for number in range(3):
                add_pod(api, "checked", number, f"127.0.0.{number + 1}", port)
            status = (await until(api, f"{FLEETS}/checked", says("SelfCheckFailed")))["status"]
            checked = lambda _, body: all(pod["result"] != "Pending" for pod in body["status"]["pods"])  # noqa: E731
            status = (await until(api, f"{FLEETS}/checked", checked))["status"]
            assert [pod["result"] for pod in status["pods"]] == ["Failed", "Passed", "Passed"]
            degraded = next(one for one in status["conditions"] if one["type"] == "Degraded")
            assert (degraded["status"], degraded["reason"]) == ("True", "SelfCheckFailed")
            assert "checked-0 (8 of 8 nonces differ" in degraded["message"]
        async with running(environment, tmp_path, f"--worker-image={IMAGE}"):
            # The selector takes the pods, not the fleet's name, and the fleet bars one of them all the same.
            assert api.create("PoCRound", "barred", {**spec, **slots})[0] == 201
            waits = lambda _, body: "checked-0 (self-check failed" in json.dumps(body.get("status", {}))  # noqa: E731
            await until(api, f"{ROUNDS}/barred", waits)
            await until(api, f"{ROUNDS}/barred", lambda _, body: bound(body) == ["", "checked-1", "checked-2"])
            assert len(pods[0].engine.batches) > 0
            assert {batch["block_hash"] for batch in pods[0].engine.batches} != {ROUND["blockHash"]}
            api.request("DELETE", f"{ROUNDS}/barred")
            await until(api, f"{ROUNDS}/barred", lambda code, _: code == HTTPStatus.NOT_FOUND)
    for number in range(3):
        api.request("DELETE", f"{PODS}/checked-{number}", gracePeriodSeconds="0")
    api.request("DELETE", f"{FLEETS}/checked")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class IdleEngine:
    """A pod's server whose engine has nothing to do; counts how often somebody asked for its metrics."""

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - ASGI
        self._app = app
        self.asked = 0
        labels = '{engine="0",model_name="org/model"}'
        lines = [f"{name}{labels} 0.0" for name in SERIES if name.startswith("vllm:")]
        self.body = "\n".join([*lines, 'poc_ready{model_name="a",reason="Ready"} 1.0']).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        if scope["type"] != "http" or scope["path"] != "/metrics":
            await self._app(scope, receive, send)
            return
        self.asked += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.body})


@pytest.mark.usefixtures("operator")
@pytest.mark.long  # it measures
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_idle_fleets_cost_little(api: ApiServer, operator: Process) -> None:
    """100 fleets of 10 pods, which have passed their self-checks and answer whether they get on."""
    names, port = [f"many-{number}" for number in range(100)], free_port()
    for name in names:
        assert api.create("PoCFleet", name, {**PATH, "replicas": 10, "port": port})[0] == 201
    async with running_pod() as pod:
        engine = IdleEngine(pod.app)
        async with serve(engine, "127.0.0.1", port):  # which stands for all of them
            for name in names:
                for number in range(10):
                    add_pod(api, name, number, "127.0.0.1", port)
                    await asyncio.sleep(0)
            for name in names:
                await until(api, path_of("StatefulSet", name), exists, 120)
                observe(api, name)
            for name in names:
                await until(api, f"{FLEETS}/{name}", says("AllReplicasReady"), 120)
            await asyncio.sleep(20)
            engine.asked = 0
            began, used = monotonic(), cpu_seconds(operator.pid)
            await asyncio.sleep(60)
    share = (cpu_seconds(operator.pid) - used) / (monotonic() - began)
    print(f"{share:.3f} cores for 100 idle fleets of 10 pods")  # noqa: T201
    assert share < 0.2
    assert engine.asked >= 1_000
    for name in names:
        api.request("DELETE", f"{FLEETS}/{name}")
    api.request("DELETE", PODS, gracePeriodSeconds="0")
