# SPDX-License-Identifier: Apache-2.0
"""Fleets beside Kubernetes' own controllers: pods are made, replaced and orphaned. The test stands for the kubelet."""

import asyncio
import json
import os
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from hack.generate.__main__ import KINDS
from hack.generate.crds import crd
from hack.toolchain.tools import tool_path
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from tests.cluster.test_process import running
from tests.support.servers.api_server import ApiServer, api_server
from tests.support.servers.http_server import free_port, serve

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

FLEETS = "/apis/poc.gonka.ai/v1alpha1/namespaces/default/pocfleets"
SETS = "/apis/apps/v1/namespaces/default/statefulsets"
PODS = "/api/v1/namespaces/default/pods"
#: Nothing runs in the pods that could answer a self-check.
SPEC = {
    "model": {"path": "org/model"},
    "image": "registry.example.org/worker:1",
    "selfCheck": {"enabled": False},
    "podTemplate": {"spec": {"terminationGracePeriodSeconds": 0}},
}
NEVER = {"update": {"strategy": "Never"}}
ROUNDS = "/apis/poc.gonka.ai/v1alpha1/namespaces/default/pocrounds"
CONTROLLERS = "statefulset-controller,garbage-collector-controller,disruption-controller"

Body = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with Kubernetes' controllers for StatefulSets, budgets and garbage."""
    folder = tmp_path_factory.mktemp("controllers")
    with api_server() as server:
        for kind in KINDS:
            server.install(crd(kind))
        config = folder / "kubeconfig"
        config.write_text(json.dumps(server.kubeconfig()))
        flags = [f"--kubeconfig={config}", f"--controllers={CONTROLLERS}", "--leader-elect=false"]
        with (folder / "log").open("wb") as log:
            port = f"--secure-port={free_port()}"
            manager = subprocess.Popen(
                [tool_path("kube-controller-manager"), *flags, port, f"--cert-dir={folder}"], stdout=log, stderr=log
            )
        try:
            yield server
        finally:
            manager.terminate()
            manager.wait(timeout=30)


@pytest.fixture
async def operator(cluster: ApiServer, tmp_path: Path) -> AsyncIterator[Process]:
    config = tmp_path / "kubeconfig"
    config.write_text(json.dumps(cluster.kubeconfig()))
    environment = {**os.environ, "KUBECONFIG": str(config), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    async with running(environment, tmp_path) as process:
        yield process


async def until(read: Callable[[], Any], holds: Callable[[Any], bool], seconds: float = 60) -> Any:  # noqa: ANN401
    """Read until it is as wanted, and return it."""
    end = monotonic() + seconds
    while not holds(found := read()):
        assert monotonic() < end, str(found)[-6000:]
        await asyncio.sleep(0.2)
    return found


def pods(api: ApiServer, fleet: str) -> dict[str, Body]:
    """The pods of a fleet that are not on their way out, by name."""
    found = api.request("GET", PODS, labelSelector=f"{FLEET_LABEL}={fleet}")[1]["items"]
    return {body["metadata"]["name"]: body for body in found if "deletionTimestamp" not in body["metadata"]}


def make_ready(api: ApiServer, fleet: str, *, crash: str = "") -> None:
    """Do for the pods what a kubelet does. Those whose arguments have ``crash`` crash."""
    for name, pod in pods(api, fleet).items():
        if crash and crash in pod["spec"]["containers"][0]["args"]:
            waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
            container = {"name": "vllm", "ready": False, "restartCount": 1, "image": "a", "imageID": "b"}
            status: Body = {"phase": "Running", "containerStatuses": [{**container, "state": waiting}]}
            api.request("PATCH", f"{PODS}/{name}/status", {"status": status})
            continue
        if any(one["type"] == "Ready" for one in pod.get("status", {}).get("conditions", [])):
            continue
        container = {"name": "vllm", "ready": True, "restartCount": 0, "image": "a", "imageID": "b", "started": True}
        state = {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}
        status = {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{**container, "state": state}],
        }
        assert api.request("PATCH", f"{PODS}/{name}/status", {"status": status})[0] == 200


def status_of(api: ApiServer, fleet: str) -> Body:
    found: Body = api.request("GET", f"{FLEETS}/{fleet}")[1].get("status") or {}
    return found


async def ready_fleet(api: ApiServer, name: str, replicas: int, **spec: Any) -> None:  # noqa: ANN401
    assert api.create("PoCFleet", name, {**SPEC, "replicas": replicas, **spec})[0] == 201
    await until(lambda: pods(api, name), lambda found: len(found) == replicas)
    make_ready(api, name)
    await until(lambda: status_of(api, name), lambda found: found.get("reason") == "AllReplicasReady")


@pytest.mark.usefixtures("operator")
async def test_another_spec_restarts_no_pod_and_deleted_ones_come_back_with_it(cluster: ApiServer) -> None:
    await ready_fleet(cluster, "update", 2, **NEVER)
    before = {name: body["metadata"]["uid"] for name, body in pods(cluster, "update").items()}
    assert sorted(before) == ["update-0", "update-1"]
    first = status_of(cluster, "update")
    assert (first["ready"], first["updatedReplicas"]) == ("2/2", 2)
    assert first["currentRevision"] == first["updateRevision"] != ""

    assert cluster.patch("PoCFleet", "update", {"engineArgs": ["--max-num-seqs=8"]})[0] == 200
    outdated = await until(lambda: status_of(cluster, "update"), lambda found: found.get("reason") == "PodsOutdated")
    assert (outdated["updatedReplicas"], outdated["ready"]) == (0, "2/2")
    assert outdated["currentRevision"] == first["updateRevision"] != outdated["updateRevision"]
    await asyncio.sleep(3)
    assert {name: body["metadata"]["uid"] for name, body in pods(cluster, "update").items()} == before

    assert cluster.request("DELETE", f"{PODS}/update-0", gracePeriodSeconds="0")[0] == 200
    found = await until(
        lambda: pods(cluster, "update"),
        lambda found: "update-0" in found and found["update-0"]["metadata"]["uid"] != before["update-0"],
    )
    assert "--max-num-seqs=8" in found["update-0"]["spec"]["containers"][0]["args"]
    make_ready(cluster, "update")
    await until(lambda: status_of(cluster, "update"), lambda found: found.get("updatedReplicas") == 1)

    assert cluster.request("PATCH", f"{FLEETS}/update/scale", {"spec": {"replicas": 1}})[0] == 200
    await until(lambda: pods(cluster, "update"), lambda found: sorted(found) == ["update-0"])
    cluster.request("DELETE", f"{PODS}/update-1", gracePeriodSeconds="0")
    last = await until(lambda: status_of(cluster, "update"), lambda found: found.get("reason") == "AllReplicasReady")
    assert (last["ready"], last["updatedReplicas"]) == ("1/1", 1)


async def hung_engine(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
    """A server that answers while its engine stands still."""
    text = 'vllm:num_requests_running 1.0\nvllm:generation_tokens_total 5.0\npoc_ready{reason="Ready"} 1.0\n'
    body = text if scope["path"] == "/metrics" else "{}"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body.encode()})


@pytest.mark.long
@pytest.mark.usefixtures("operator")
async def test_a_hung_pod_is_replaced_and_recorded(cluster: ApiServer) -> None:
    port = free_port()
    spec = {**SPEC, "port": port, "healing": {"hungSeconds": 60}}
    assert cluster.create("PoCFleet", "hung", spec)[0] == 201
    before = await until(lambda: pods(cluster, "hung"), lambda found: len(found) == 1)
    uid = before["hung-0"]["metadata"]["uid"]
    async with serve(hung_engine, "127.0.0.1", port):
        make_ready(cluster, "hung")
        found = await until(lambda: status_of(cluster, "hung"), lambda found: bool(found.get("restarts")), 120)
        assert [one["uid"] for one in found["restarts"]] == [uid]
        # No kubelet runs that ends an evicted pod.
        gone = lambda found: "hung-0" not in found or found["hung-0"]["metadata"]["uid"] != uid  # noqa: E731
        await until(lambda: pods(cluster, "hung"), gone)
        cluster.request("DELETE", f"{PODS}/hung-0", gracePeriodSeconds="0")
        await until(lambda: pods(cluster, "hung"), lambda found: "hung-0" in found)
    events = cluster.request("GET", "/api/v1/namespaces/default/events")[1]["items"]
    assert [one["message"] for one in events if one["reason"] == "PodHung"] == [
        f"hung-0 is hung: {found['restarts'][0]['message']}; it is evicted"
    ]


@pytest.mark.usefixtures("operator")
async def test_a_deleted_fleet_takes_its_objects_along(cluster: ApiServer) -> None:
    await ready_fleet(cluster, "gone", 1)
    assert cluster.request("DELETE", f"{FLEETS}/gone", propagationPolicy="Background")[0] == 200
    for path in (f"{SETS}/gone", "/api/v1/namespaces/default/services/gone-pods"):
        await until(lambda path=path: cluster.request("GET", path)[0], lambda code: code == HTTPStatus.NOT_FOUND)  # type: ignore[misc]
    await until(lambda: pods(cluster, "gone"), lambda found: not found)


@pytest.mark.usefixtures("operator")
async def test_pods_of_an_orphaned_fleet_work_on_and_are_adopted(cluster: ApiServer) -> None:
    await ready_fleet(cluster, "left", 2)
    before = {name: body["metadata"]["uid"] for name, body in pods(cluster, "left").items()}
    assert cluster.request("DELETE", f"{FLEETS}/left", propagationPolicy="Orphan")[0] == 200
    await until(lambda: cluster.request("GET", f"{FLEETS}/left")[0], lambda code: code == HTTPStatus.NOT_FOUND)
    orphan = cluster.request("GET", f"{SETS}/left")[1]
    assert not orphan["metadata"].get("ownerReferences")
    assert {name: body["metadata"]["uid"] for name, body in pods(cluster, "left").items()} == before
    await ready_fleet(cluster, "left", 2)
    adopted = cluster.request("GET", f"{SETS}/left")[1]
    assert adopted["metadata"]["uid"] == orphan["metadata"]["uid"]
    assert adopted["metadata"]["ownerReferences"][0]["name"] == "left"
    assert {name: body["metadata"]["uid"] for name, body in pods(cluster, "left").items()} == before
    assert status_of(cluster, "left")["updatedReplicas"] == 2


async def kept_ready(api: ApiServer, fleet: str, crash: str = "") -> None:
    """Be the kubelet of a fleet's pods for ever."""
    while True:
        make_ready(api, fleet, crash=crash)
        await asyncio.sleep(0.3)


@asynccontextmanager
async def kubelet(api: ApiServer, fleet: str, crash: str = "") -> AsyncIterator[None]:
    task = asyncio.create_task(kept_ready(api, fleet, crash))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def arguments(api: ApiServer, fleet: str) -> list[list[str]]:
    """The arguments of the pods' servers after those that all fleets have, by the pods' numbers."""
    return [body["spec"]["containers"][0]["args"][3:] for _, body in sorted(pods(api, fleet).items())]


def uids(api: ApiServer, fleet: str) -> set[str]:
    return {body["metadata"]["uid"] for body in pods(api, fleet).values()}


def created(body: Mapping[str, Any]) -> tuple[str, int]:
    """When an Event was created, to the second, and which of those of a second came first."""
    return body["metadata"]["creationTimestamp"], int(body["metadata"]["resourceVersion"])


def events(api: ApiServer, fleet: str) -> list[str]:
    found = api.request("GET", "/api/v1/namespaces/default/events", fieldSelector=f"involvedObject.name={fleet}")[1]
    return [body["reason"] for body in sorted(found["items"], key=created)]


@pytest.mark.usefixtures("operator")
async def test_an_update_waits_for_a_round_and_then_replaces_one_pod_after_the_other(cluster: ApiServer) -> None:
    await ready_fleet(cluster, "roll", 3)
    await until(lambda: status_of(cluster, "roll"), lambda found: found.get("update", {}).get("goodRevision"))
    round_ = {
        "fleetRef": {"name": "roll"},
        "blockHash": "ab" * 32,
        "blockHeight": 1,
        "publicKey": "key",
        "nodes": {"first": 0, "last": 0, "count": 1},
        "artifact": {"kDim": 4},
        "model": {"name": "tiny", "seqLen": 64},
    }
    assert cluster.create("PoCRound", "holds", round_)[0] == 201
    async with kubelet(cluster, "roll"):
        assert cluster.patch("PoCFleet", "roll", {"engineArgs": ["--max-num-seqs=8"]})[0] == 200
        waits = await until(lambda: status_of(cluster, "roll"), lambda found: found.get("reason") == "PodsOutdated")
        assert waits["message"] == "0 of 3 pods are updated; canary: waiting for the end of PoCRound holds"
        before = uids(cluster, "roll")
        await asyncio.sleep(4)
        assert uids(cluster, "roll") == before
        assert cluster.request("PATCH", f"{ROUNDS}/holds", {"spec": {"finish": True}})[0] == 200
        left = [3]
        end = monotonic() + 90
        while status_of(cluster, "roll")["update"]["phase"] != "Complete":
            assert monotonic() < end, status_of(cluster, "roll")
            left.append(len(before & uids(cluster, "roll")))
            await asyncio.sleep(0.1)
    assert list(dict.fromkeys(left)) == [3, 2, 1, 0], "one after the other"
    assert arguments(cluster, "roll") == [["--max-num-seqs=8"]] * 3
    found = [
        reason for reason in events(cluster, "roll") if reason in ("UpdateStarted", "CanaryPassed", "UpdateComplete")
    ]
    assert found == ["UpdateStarted", "CanaryPassed", "UpdateComplete"]
    assert [one["name"] for one in status_of(cluster, "roll")["pods"]] == ["roll-0", "roll-1", "roll-2"]


@pytest.mark.usefixtures("operator")
async def test_a_canary_that_crashes_brings_the_good_template_back(cluster: ApiServer) -> None:
    bad = "--max-num-seqs=7"
    await ready_fleet(cluster, "back", 3, engineArgs=["--max-num-seqs=8"])
    good = await until(lambda: status_of(cluster, "back"), lambda found: found.get("update", {}).get("goodRevision"))
    async with kubelet(cluster, "back", crash=bad):
        assert cluster.patch("PoCFleet", "back", {"engineArgs": [bad], "env": [{"name": "A", "value": "1"}]})[0] == 200
        await until(lambda: arguments(cluster, "back"), lambda found: [bad] in found)
        failed = await until(
            lambda: status_of(cluster, "back"),
            lambda found: found["update"]["phase"] == "Failed" and "back at revision" in found["update"]["message"],
        )
        assert arguments(cluster, "back") == [["--max-num-seqs=8"]] * 3
        assert failed["reason"] == "UpdateFailed"
        assert "cannot run (CrashLoopBackOff)" in failed["message"]
        assert "args is" in failed["message"]
        # The good template has its revision again, and so all pods are up to date.
        assert failed["updateRevision"] == good["updateRevision"] == failed["update"]["goodRevision"]
        assert failed["updatedReplicas"] == 3
        # Another number of pods is no other template; the earlier spec is.
        assert cluster.request("PATCH", f"{FLEETS}/back/scale", {"spec": {"replicas": 4}})[0] == 200
        await until(lambda: arguments(cluster, "back"), lambda found: len(found) == 4)
        assert arguments(cluster, "back") == [["--max-num-seqs=8"]] * 4
        undo = {"engineArgs": ["--max-num-seqs=8"], "env": None}
        assert cluster.patch("PoCFleet", "back", undo)[0] == 200
        await until(lambda: status_of(cluster, "back"), lambda found: found.get("reason") == "AllReplicasReady")
    assert events(cluster, "back").count("UpdateFailed") == 1
