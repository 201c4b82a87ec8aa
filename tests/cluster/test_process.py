# SPDX-License-Identifier: Apache-2.0
"""The operator's process against a real API server, with pods in this process: one object of each kind, to its end."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

from poc_operator.clients.pods.client import PodClient, base_url
from tests.support.fakes.callback_receiver import CallbackReceiver, callback_receiver
from tests.support.fakes.engine import vector
from tests.support.servers.api_server import ApiServer
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import running_pod
from vllm_poc.wire.answers import PowState, StatusResponse

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

HOSTS = ("127.0.0.1", "127.0.0.2")
PODS = "/api/v1/namespaces/default/pods"
LABELS = {"test": "process"}
WORK: dict[str, Any] = {
    "blockHash": "ab" * 32,
    "blockHeight": 7,
    "publicKey": "key",
    "model": {"name": "tiny", "seqLen": 64},
    "selector": {"matchLabels": LABELS},
    "batchSize": 8,
}
#: The operator's name in the Lease.
IDENTITY = "--identity=tests"
NODES = {"first": 0, "last": 0, "count": 1}
PROOFS = [{"nonce": nonce, "vector": vector(nonce, 4)} for nonce in range(20)]


def add_pod(api: ApiServer, name: str, ip: str) -> None:
    """Let the API server know a pod that is ready."""
    container = {"name": "vllm", "image": "none"}
    body = {"metadata": {"name": name, "labels": LABELS}, "spec": {"containers": [container]}}
    assert api.request("POST", PODS, body)[0] == 201
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
    assert api.request("PATCH", f"{PODS}/{name}/status", {"status": status})[0] == 200


@pytest.fixture
async def receiver() -> AsyncIterator[CallbackReceiver]:
    async with callback_receiver() as own:
        yield own


@pytest.fixture
async def port(api: ApiServer) -> AsyncIterator[int]:
    """The port of two pods that are ready."""
    async with AsyncExitStack() as stack:
        port = free_port()
        for number, host in enumerate(HOSTS):
            pod = await stack.enter_async_context(running_pod())
            await stack.enter_async_context(serve(pod.app, host, port))
            add_pod(api, f"pod-{number}", host)
        yield port
        for number, _ in enumerate(HOSTS):
            api.request("DELETE", f"{PODS}/pod-{number}", gracePeriodSeconds="0")


@pytest.fixture
def environment(api: ApiServer, tmp_path: Path) -> Mapping[str, str]:
    """What a program of the operator needs to find the API server."""
    config = tmp_path / "kubeconfig"
    config.write_text(json.dumps(api.kubeconfig()))
    return {**os.environ, "KUBECONFIG": str(config), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@asynccontextmanager
async def running(environment: Mapping[str, str], folder: Path, *flags: str) -> AsyncIterator[Process]:
    """The operator's process, with its output in a file."""
    ports = [f"--health-port={free_port()}", f"--metrics-port={free_port()}"]
    with (folder / "operator.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "poc_operator", "--log-format=plain", IDENTITY, *ports, *flags),
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            yield process
        finally:  # or it would act beside those of the next tests
            process.terminate()
            ended = await process.wait()
    assert ended == 0
    print((folder / "operator.log").read_text())  # noqa: T201 - shown by pytest when the test fails


@pytest.fixture
async def operator(environment: Mapping[str, str], tmp_path: Path) -> AsyncIterator[Process]:
    """The operator for all namespaces."""
    async with running(environment, tmp_path) as process:
        yield process


def path_of(kind: str, name: str) -> str:
    """Where the API server has the object."""
    return f"/apis/poc.gonka.ai/v1alpha1/namespaces/default/{kind.lower()}s/{name}"


async def read_until(
    api: ApiServer, path: str, holds: Callable[[int, dict[str, Any]], bool], seconds: float = 90
) -> dict[str, Any]:
    """Read an object until its HTTP status and its status are as wanted, and return the latter."""
    end = monotonic() + seconds
    while True:
        code, body = api.request("GET", path)
        status: dict[str, Any] = body.get("status") or {} if code == HTTPStatus.OK else {}
        if holds(code, status):
            return status
        assert monotonic() < end, (code, body)
        await asyncio.sleep(0.2)


async def finished(api: ApiServer, kind: str, name: str) -> dict[str, Any]:
    """Wait until the object is complete or failed, and return its status."""
    return await read_until(api, path_of(kind, name), lambda _, status: status.get("state") in ("Complete", "Failed"))


@pytest.mark.usefixtures("operator")
async def test_one_object_of_each_kind(api: ApiServer, port: int, receiver: CallbackReceiver) -> None:
    artifact = {"artifact": {"kDim": 4}, "port": port}
    round_ = {**WORK, **artifact, "nodes": NODES, "stop": {"afterNonces": 200}, "callbackURL": receiver.url}
    assert api.create("PoCRound", "whole", round_)[0] == 201
    status = await finished(api, "PoCRound", "whole")
    assert (status["state"], status["done"]) == ("Complete", 2), status
    assert status["totals"]["delivered"] == len(set(receiver.nonces)) >= 200
    assert {found["type"]: found["status"] for found in status["conditions"]}["Ready"] == "True"

    validation = {**WORK, **artifact, "proofs": {"inline": PROOFS}}
    assert api.create("PoCValidation", "whole", validation)[0] == 201
    status = await finished(api, "PoCValidation", "whole")
    assert (status["state"], status["verdict"]["fraud"]) == ("Complete", False), status

    assert api.create("PoCCalibration", "whole", {**WORK, "port": port, "validRate": "0.25", "nonces": 200})[0] == 201
    status = await finished(api, "PoCCalibration", "whole")
    assert (status["state"], status["target"]["nonces"]) == ("Complete", 200), status


ENDLESS: dict[str, Any] = {**WORK, "artifact": {"kDim": 4}, "nodes": NODES}


def is_running(_: int, status: Mapping[str, Any]) -> bool:
    """Whether every pod computes."""
    slots = status.get("assignments") or [{}]
    return status.get("state") == "Running" and all(slot.get("state") == "Running" for slot in slots)


def is_gone(code: int, _: Mapping[str, Any]) -> bool:
    """Whether the object does not exist any more."""
    return code == HTTPStatus.NOT_FOUND


async def states(port: int) -> list[PowState]:
    """What the pods say they do."""
    async with PodClient() as client:
        answers = [await client.status(base_url(host, port)) for host in HOSTS]
    return [answer.state for answer in answers if isinstance(answer, StatusResponse)]


@pytest.mark.usefixtures("operator")
async def test_a_deleted_round_stops_its_pods_before_it_goes(api: ApiServer, port: int) -> None:
    assert api.create("PoCRound", "endless", {**ENDLESS, "port": port})[0] == 201
    path = path_of("PoCRound", "endless")
    await read_until(api, path, is_running)
    assert api.request("DELETE", path)[0] == HTTPStatus.OK
    await read_until(api, path, is_gone)
    assert await states(port) == [PowState.STOPPED] * 2


async def test_a_round_that_is_deleted_without_an_operator_is_held_for_the_next(
    api: ApiServer, port: int, environment: Mapping[str, str], tmp_path: Path
) -> None:
    path = path_of("PoCRound", "held")
    async with running(environment, tmp_path):
        assert api.create("PoCRound", "held", {**ENDLESS, "port": port})[0] == 201
        await read_until(api, path, is_running)
    assert api.request("DELETE", path)[0] == HTTPStatus.OK
    assert api.request("GET", path)[0] == HTTPStatus.OK
    assert await states(port) == [PowState.GENERATING] * 2
    async with running(environment, tmp_path):
        await read_until(api, path, is_gone)
        assert await states(port) == [PowState.STOPPED] * 2


@pytest.mark.usefixtures("operator")
async def test_uninstalling_suspends_what_runs_and_leaves_no_finalizer(
    api: ApiServer, port: int, environment: Mapping[str, str]
) -> None:
    assert api.create("PoCRound", "suspended", {**ENDLESS, "port": port})[0] == 201
    path = path_of("PoCRound", "suspended")
    await read_until(api, path, is_running)
    assert api.request("GET", path)[1]["metadata"]["finalizers"] == ["poc.gonka.ai/operator"]
    assert await uninstall(environment, 60) < 60
    body = api.request("GET", path)[1]
    assert (body["spec"]["suspend"], body["status"]["state"]) == (True, "Suspended")
    assert not body["metadata"].get("finalizers")
    assert await states(port) == [PowState.STOPPED] * 2
    assert api.request("DELETE", path)[0] == HTTPStatus.OK
    assert api.request("GET", path)[0] == HTTPStatus.NOT_FOUND


async def test_uninstalling_does_not_wait_for_ever_for_an_operator_that_does_not_run(
    api: ApiServer, port: int, environment: Mapping[str, str], tmp_path: Path
) -> None:
    path = path_of("PoCRound", "left")
    async with running(environment, tmp_path):
        assert api.create("PoCRound", "left", {**ENDLESS, "port": port})[0] == 201
        await read_until(api, path, is_running)
    # Who holds the Lease is watched for as long as one lasts, and then the two seconds are over.
    assert 2 <= await uninstall(environment, 2) < 60
    assert not api.request("GET", path)[1]["metadata"].get("finalizers")
    assert api.request("DELETE", path)[0] == HTTPStatus.OK
    assert api.request("GET", path)[0] == HTTPStatus.NOT_FOUND


async def uninstall(environment: Mapping[str, str], seconds: int) -> float:
    """Run what `helm uninstall` runs; return how long it took."""
    began = monotonic()
    program = [sys.executable, "-m", "poc_operator.controller.uninstall", f"--wait-seconds={seconds}", IDENTITY]
    process = await asyncio.create_subprocess_exec(*program, env=environment)
    assert await process.wait() == 0
    return monotonic() - began


async def test_what_an_earlier_operator_has_left_is_stopped_and_work_of_others_is_not(
    api: ApiServer, port: int, environment: Mapping[str, str], tmp_path: Path
) -> None:
    """Both pods compute for rounds that do not exist; ours is told by the cluster's own name."""
    ours = api.request("GET", "/api/v1/namespaces/kube-system")[1]["metadata"]["uid"]
    order = {
        "block_hash": "ab" * 32,
        "block_height": 7,
        "public_key": "key",
        "params": {"model": "tiny", "seq_len": 64, "k_dim": 4},
        "node_id": 0,
        "node_count": 1,
        "round_id": "gone",
    }
    async with httpx.AsyncClient(timeout=30) as http:
        for host, owner in zip(HOSTS, (ours, "another cluster"), strict=True):
            answer = await http.post(f"{base_url(host, port)}/init/generate", json=order | {"owner": owner})
            assert answer.status_code == HTTPStatus.OK
    # It says which pods may have worked for the operator, and at which port.
    assert api.create("PoCRound", "rests", {**ENDLESS, "port": port, "suspend": True})[0] == 201
    async with running(environment, tmp_path):
        began = monotonic()
        while await states(port) != [PowState.STOPPED, PowState.GENERATING]:
            assert monotonic() < began + 60, await states(port)
            await asyncio.sleep(1)
        await asyncio.sleep(5)
        assert await states(port) == [PowState.STOPPED, PowState.GENERATING]
    _, events = api.request("GET", "/api/v1/namespaces/default/events")
    told = [event for event in events["items"] if event["reason"] == "OrphanStopped"]
    assert [event["involvedObject"]["name"] for event in told] == ["pod-0"]
    assert "for round gone, which does not exist any more: it is stopped" in told[0]["message"]
    assert api.request("DELETE", path_of("PoCRound", "rests"))[0] == HTTPStatus.OK


def observes(generation: int) -> Callable[[int, dict[str, Any]], bool]:
    """Whether a status is about this generation of the spec."""
    return lambda _, status: status.get("observedGeneration") == generation


@pytest.mark.usefixtures("operator")
async def test_a_changed_spec_of_a_finished_object_is_observed(api: ApiServer) -> None:
    """Else tools that follow kstatus wait for ever, and a time to live that is set late never passes."""
    podless = {**WORK, "artifact": {"kDim": 4}, "nodes": NODES, "startDeadlineSeconds": 1}
    assert api.create("PoCRound", "over", podless)[0] == 201
    path = path_of("PoCRound", "over")
    first = await finished(api, "PoCRound", "over")
    changes: list[dict[str, Any]] = [{"suspend": True}, {"startDeadlineSeconds": 5}]
    for change in changes:
        code, body = api.patch("PoCRound", "over", change)
        assert code == HTTPStatus.OK
        seen = await read_until(api, path, observes(body["metadata"]["generation"]), 15)
        assert (seen["state"], seen["outcome"]) == ("Failed", first["outcome"])
    assert api.patch("PoCRound", "over", {"ttlSecondsAfterFinished": 1})[0] == HTTPStatus.OK
    await read_until(api, path, lambda code, _: code == HTTPStatus.NOT_FOUND, 15)
