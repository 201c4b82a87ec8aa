# SPDX-License-Identifier: Apache-2.0
"""Fleets whose replicas span Kubernetes nodes, beside LeaderWorkerSet's own controller. The test is the kubelet."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from hack.generate.__main__ import KINDS
from hack.generate.crds import crd
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, GROUPS_LABEL
from poc_operator.fleets.groups import HELD
from tests.cluster.test_fleet_controllers import CONTROLLERS, FLEETS, PODS, Body, make_ready, status_of, until
from tests.cluster.test_process import running
from tests.support.servers.api_server import ApiServer, api_server
from tests.support.servers.http_server import free_port
from tests.support.servers.leader_worker_set import leader_worker_set, program

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(300, func_only=True)]

SETS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"
SPEC = {
    "model": {"path": "org/model"},
    "image": "registry.example.org/worker:1",
    "selfCheck": {"enabled": False},
    "parallelism": {"pipeline": 2, "kubernetesNodes": 2},
    "podTemplate": {"spec": {"terminationGracePeriodSeconds": 0}},
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with Kubernetes' controllers and LeaderWorkerSet's."""
    folder = tmp_path_factory.mktemp("groups")
    with api_server() as server, ExitStack() as stack:
        for kind in KINDS:
            server.install(crd(kind))
        config = folder / "kubeconfig"
        config.write_text(json.dumps(server.kubeconfig()))
        flags = [f"--kubeconfig={config}", f"--controllers={CONTROLLERS}", "--leader-elect=false"]
        own = [f"--secure-port={free_port()}", f"--cert-dir={folder}"]
        stack.enter_context(program(folder, "kube-controller-manager", *flags, *own))

        def create(body: Body) -> None:
            if body["kind"] == "CustomResourceDefinition":
                server.install(body)
                return
            plural = f"{body['kind'].lower()}s"
            assert server.request("POST", f"/apis/admissionregistration.k8s.io/v1/{plural}", body)[0] == 201

        stack.enter_context(leader_worker_set(folder, config, create))
        yield server


@pytest.fixture
async def operator(groups: ApiServer, tmp_path: Path) -> AsyncIterator[Process]:
    config = tmp_path / "kubeconfig"
    config.write_text(json.dumps(groups.kubeconfig()))
    environment = {**os.environ, "KUBECONFIG": str(config), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    async with running(environment, tmp_path) as process:
        yield process


def all_pods(api: ApiServer, fleet: str) -> dict[str, Body]:
    """Leaders and workers that are not on their way out, by name."""
    found = api.request("GET", PODS, labelSelector=f"{GROUPS_LABEL}={fleet}")[1]["items"]
    return {body["metadata"]["name"]: body for body in found if "deletionTimestamp" not in body["metadata"]}


def uids(api: ApiServer, fleet: str) -> dict[str, str]:
    return {name: body["metadata"]["uid"] for name, body in all_pods(api, fleet).items()}


@asynccontextmanager
async def kubelet(api: ApiServer, fleet: str, crash: str = "") -> AsyncIterator[None]:
    """Make leaders and workers ready; those whose arguments have ``crash`` stay as they are."""

    async def keep() -> None:
        while True:
            with suppress(AssertionError):  # a pod that was there is gone
                make_all_ready(api, fleet, crash)
            await asyncio.sleep(0.3)

    task = asyncio.create_task(keep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def make_all_ready(api: ApiServer, fleet: str, crash: str) -> None:
    make_ready(api, fleet, crash=crash)
    for name, pod in all_pods(api, fleet).items():
        if FLEET_LABEL in pod["metadata"]["labels"] or pod.get("status", {}).get("phase") == "Running":
            continue
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        api.request("PATCH", f"{PODS}/{name}/status", {"status": status})


def arguments(api: ApiServer, fleet: str) -> dict[str, bool]:
    """Which pods have the changed flag."""
    return {
        name: "--max-num-seqs=8" in pod["spec"]["containers"][0]["args"] for name, pod in all_pods(api, fleet).items()
    }


@pytest.mark.usefixtures("operator")
async def test_groups_are_made_updated_one_by_one_scaled_and_deleted(groups: ApiServer) -> None:
    assert groups.create("PoCFleet", "span", {**SPEC, "replicas": 2})[0] == 201
    async with kubelet(groups, "span"):
        before = await until(lambda: uids(groups, "span"), lambda found: len(found) == 4)
        assert sorted(before) == ["span-0", "span-0-1", "span-1", "span-1-1"]
        ready = await until(lambda: status_of(groups, "span"), lambda found: found.get("reason") == "AllReplicasReady")
        assert (ready["ready"], ready["replicas"]) == ("2/2", 2)
        assert [one["name"] for one in ready["pods"]] == ["span-0", "span-1"]
        leader, worker = (all_pods(groups, "span")[name]["spec"]["containers"][0] for name in ("span-1", "span-1-1"))
        environment = {one["name"]: one.get("value") for one in worker["env"]}
        assert environment["LWS_LEADER_ADDRESS"] == "span-1.span-1.default"
        assert environment["LWS_WORKER_INDEX"] == "1"
        assert ("--headless" in worker["args"], "--headless" in leader["args"]) == (True, False)

        # At rest no leader may be replaced, whatever others do to the template.
        held = groups.request("GET", f"{SETS}/span")[1]["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert held["partition"] == HELD

        # Another template: one group after the other, the highest number first, each with its worker.
        await until(lambda: status_of(groups, "span"), lambda found: found.get("update", {}).get("goodRevision"))
        assert groups.patch("PoCFleet", "span", {"engineArgs": ["--max-num-seqs=8"]})[0] == 200
        first = await until(lambda: arguments(groups, "span"), lambda found: found.get("span-1") is True)
        assert first.get("span-0") is False
        assert uids(groups, "span")["span-0"] == before["span-0"]
        done = await until(
            lambda: status_of(groups, "span"),
            lambda found: found["update"]["phase"] == "Complete" and found.get("updatedReplicas") == 2,
            120,
        )
        assert done["update"]["goodRevision"] == done["updateRevision"]
        await until(lambda: arguments(groups, "span"), lambda found: len(found) == 4 and all(found.values()))

        # A worker that is lost takes its group along.
        leaders = uids(groups, "span")
        assert groups.request("DELETE", f"{PODS}/span-0-1", gracePeriodSeconds="0")[0] == 200
        await until(lambda: uids(groups, "span").get("span-0"), lambda uid: uid not in (None, leaders["span-0"]))
        assert uids(groups, "span")["span-1"] == leaders["span-1"]
        await until(lambda: status_of(groups, "span"), lambda found: found.get("ready") == "2/2")

        # Drift is mended, and the scale follows the spec.
        assert groups.request("PATCH", f"{SETS}/span", {"spec": {"replicas": 1}})[0] == 200
        await until(lambda: groups.request("GET", f"{SETS}/span")[1], lambda found: found["spec"]["replicas"] == 2)
        assert groups.request("PATCH", f"{FLEETS}/span/scale", {"spec": {"replicas": 1}})[0] == 200
        await until(lambda: sorted(uids(groups, "span")), lambda found: found == ["span-0", "span-0-1"])
        assert groups.request("DELETE", f"{FLEETS}/span", propagationPolicy="Background")[0] == 200
        await until(lambda: uids(groups, "span"), lambda found: not found)


@pytest.mark.usefixtures("operator")
async def test_a_canary_that_crashes_brings_both_templates_back(groups: ApiServer) -> None:
    bad = "--max-num-seqs=8"
    assert groups.create("PoCFleet", "back", {**SPEC, "replicas": 2})[0] == 201
    async with kubelet(groups, "back", crash=bad):
        good = await until(lambda: status_of(groups, "back"), lambda found: found.get("update", {}).get("goodRevision"))
        before = uids(groups, "back")
        assert groups.patch("PoCFleet", "back", {"engineArgs": [bad]})[0] == 200
        await until(lambda: arguments(groups, "back"), lambda found: found.get("back-1") is True)
        failed = await until(
            lambda: status_of(groups, "back"),
            lambda found: found["update"]["phase"] == "Failed" and "back at revision" in found["update"]["message"],
            120,
        )
        assert failed["update"]["goodRevision"] == good["update"]["goodRevision"] == failed["updateRevision"]
        await until(lambda: arguments(groups, "back"), lambda found: len(found) == 4 and not any(found.values()))
        assert uids(groups, "back")["back-0"] == before["back-0"]
