# SPDX-License-Identifier: Apache-2.0
"""Every call of the network's own client, byte by byte over a socket, and the fields that it reads from the answers.

Go's net/http writes these request lines and headers. The client sends no Content-Type, and puts the version of the ML
node into the path. Each call is sent below each kind of base URL.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import pytest

from poc_gateway.store.schema import callbacks
from tests.support.servers.http_server import free_port, serve
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.conftest import VLLM_VERSION
from tests.unit.poc_gateway.node_api.requests import INIT, NONCES, URL, validation

ADDRESS = "127.0.0.1"
TOKEN = "network-secret"  # noqa: S105
HOST = "one.example.org"
NODE = "/api/v1/inference/pow"
PORTS = [5001, 5002]
#: (base URL's path, Host): each means the ML node ``one``.
BASES = {
    "path": ("/nodes/one", ""),
    "version after the path": ("/nodes/one/v3.0.8", ""),
    "version before the path": ("/v3.0.8/nodes/one", ""),
    "host": ("", HOST),
    "host with a version": ("/v3.0.8", HOST),
}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401
        return json.loads(self.body)


class GoClient:
    """Writes what Go's net/http writes for a call, and reads the whole answer."""

    def __init__(self, port: int, base: str, host: str) -> None:
        self._port = port
        self._base = base
        self._host = host or f"{ADDRESS}:{port}"

    async def call(self, method: str, path: str, body: object = None, *, token: str | None = TOKEN) -> Answer:
        sent = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [
            f"{method} {self._base}{path} HTTP/1.1",
            f"Host: {self._host}",
            "User-Agent: Go-http-client/1.1",
            *([f"Content-Length: {len(sent)}"] if method in ("POST", "DELETE") else []),
            *([f"Authorization: Bearer {token}"] if token is not None else []),
            "Accept-Encoding: gzip",
        ]
        reader, writer = await asyncio.open_connection(ADDRESS, self._port)
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + sent)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        told = await reader.readexactly(int(headers.get("content-length", "0")))
        writer.close()
        return Answer(int(head[0].split()[1]), headers, told)

    async def get(self, path: str) -> Any:  # noqa: ANN401
        answer = await self.call("GET", path)
        assert answer.status == 200, answer
        return answer.json

    async def finished(self, job: str) -> Any:  # noqa: ANN401
        async with asyncio.timeout(20):
            while True:
                told = await self.get(f"{NODE}/generate/{job}")
                if told["status"] not in ("queued", "running"):
                    return told
                await asyncio.sleep(0.05)

    async def post(self, path: str, body: object = None, status: int = 200) -> Any:  # noqa: ANN401
        answer = await self.call("POST", path, body)
        assert answer.status == status, answer
        return answer.json


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Two pods of the ML node ``one``, which has a number and a host, and another ML node without pods."""
    settings = {"POC_GATEWAY_NETWORK_TOKEN": TOKEN}
    fields = {"number": 1, "host": HOST}
    async with running_world(tmp_path, pods=2, one=fields, also={"other": {}}, **settings) as world:
        yield world


@pytest.fixture
async def port(world: World) -> AsyncIterator[int]:
    port = free_port()
    async with serve(world.app, ADDRESS, port):
        yield port


@pytest.fixture(params=BASES, ids=lambda name: str(name).replace(" ", "-"))
def client(request: pytest.FixtureRequest, port: int) -> GoClient:
    base, host = BASES[request.param]
    return GoClient(port, base, host)


def backends(status: str) -> list[dict[str, Any]]:
    return [{"port": port, "status": status} for port in PORTS]


def statuses(told: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    return [(one["port"], one["status"]) for one in told]


async def test_state_and_versions(client: GoClient) -> None:
    state = await client.get("/api/v1/state")
    assert (state["state"], state["poc_status"], state["loaded_model"]) == ("INFERENCE", "IDLE", "tiny")
    assert (state["inference_healthy"], state["poc_validation_inference"]) == (True, True)
    assert isinstance(state["version"], str)
    versions = await client.get("/api/v1/versions")
    assert (versions["vllm_version"], versions["poc_validation_inference"]) == (VLLM_VERSION, True)
    for prefix in (NODE, "/api/v1/pow"):
        told = await client.get(f"{prefix}/versions")
        assert told == {"vllm_version": VLLM_VERSION, "poc_validation_inference": True, "schemes": ["prefill"]}


async def test_a_round(client: GoClient) -> None:
    started = await client.post(f"{NODE}/init/generate", INIT)
    assert started == {"status": "OK", "backends": 2, "n_groups": 2, "results": backends("OK"), "errors": []}
    status = await client.get(f"{NODE}/status")
    assert (status["status"], statuses(status["backends"])) == ("GENERATING", [(port, "GENERATING") for port in PORTS])
    assert (await client.get("/api/v1/state"))["state"] == "POW"
    assert (await client.call("POST", f"{NODE}/init/generate", INIT | {"block_height": 4712})).status == 409
    assert await client.post(f"{NODE}/stop", {}) == {"status": "OK", "results": backends("OK"), "errors": []}
    assert (await client.get(f"{NODE}/status"))["status"] == "IDLE"
    # The whole ML node is stopped with an empty body.
    assert (await client.post("/api/v1/stop"))["status"] == "OK"


async def test_the_rate_of_each_backend_is_told(world: World, client: GoClient) -> None:
    assert (await client.get(f"{NODE}/status"))["backends"][0]["nonces_per_second"] == 0
    await client.post(f"{NODE}/init/generate", INIT)
    for place, pod in enumerate(world.pods.values()):
        pod.engine.seconds_per_batch = 0.01
        slot = INIT | {"group_id": place, "n_groups": 2, "round_id": "r", "url": None}
        assert (await pod.start({key: value for key, value in slot.items() if value is not None})).status_code == 200
        await pod.reach(lambda status: status.rate_per_second > 0)
    told = (await client.get(f"{NODE}/status"))["backends"]
    assert [one["nonces_per_second"] > 0 for one in told] == [True, True]
    assert [one["stats"]["nonces_per_second"] for one in told] == [one["nonces_per_second"] for one in told]
    assert all(one["stats"]["total_processed"] > 0 for one in told)


async def test_a_validation_is_queued_and_told(client: GoClient) -> None:
    queued = await client.post(f"{NODE}/generate", validation(40))
    assert queued["status"] == "queued"
    told = await client.finished(queued["request_id"])
    assert (told["n_total"], told["n_mismatch"], told["fraud_detected"]) == (200, 40, True)
    assert told["mismatch_nonces"] == NONCES[:40]
    assert 0 < told["p_value"] < 0.01


async def test_a_validation_of_a_thousand_nonces_is_waited_for(client: GoClient) -> None:
    body = validation(wait=True)
    nonces = list(range(1, 1001))
    artifacts = [one | {"nonce": nonce} for nonce in nonces for one in body["validation"]["artifacts"][:1]]
    async with asyncio.timeout(60):
        told = await client.post(f"{NODE}/generate", body | {"nonces": nonces, "validation": {"artifacts": artifacts}})
    assert (told["status"], told["n_total"]) == ("completed", 1000)


async def test_a_callback_is_relayed(world: World, client: GoClient) -> None:
    path = f"{NODE}/callback-relay/{sha256(URL.encode()).hexdigest()[:32]}"
    callback = {name: INIT[name] for name in ("public_key", "block_hash", "block_height", "node_id")}
    for suffix in ("generated", "validated"):
        # No round and no request names the address yet.
        assert (await client.call("POST", f"{path}/{suffix}", callback)).status == 404
    await client.post(f"{NODE}/init/generate", INIT)
    for suffix in ("generated", "validated"):
        # It is known now, and no pod has delivered this.
        refused = await client.call("POST", f"{path}/{suffix}", callback)
        assert (refused.status, refused.json["reason"]) == (403, "NotDelivered")
    assert (await client.call("POST", f"{path}/other", callback)).status == 404
    queued = await client.post(f"{NODE}/generate", validation())
    await client.finished(queued["request_id"])
    (row,) = world.rows(callbacks.select())
    # The pods' verdict may go; the chain is not reached from here.
    unreached = await client.call("POST", f"{path}/validated", json.loads(row["body"]))
    assert (unreached.status, unreached.json["reason"]) == (502, "ReceiverUnreachable")


async def test_the_model_is_brought_up(client: GoClient) -> None:
    body = {"model": "tiny", "dtype": "float16", "additional_args": ["--max-model-len", "1024"]}
    assert (await client.post("/api/v1/inference/up", body))["status"] == "OK"
    await client.post("/api/v1/inference/up/async", body, status=202)
    told = await client.get("/api/v1/inference/up/status")
    assert (told["is_running"], told["status"], told["error"]) == (True, "running", None)
    for path in ("up", "up/async"):
        assert (await client.call("POST", f"/api/v1/inference/{path}", body | {"model": "huge"})).status == 409
    assert (await client.post("/api/v1/inference/down"))["status"] == "OK"
    assert (await client.get("/api/v1/state"))["state"] == "INFERENCE"


async def test_weights(client: GoClient) -> None:
    served, other = ({"hf_repo": name, "hf_commit": None} for name in ("tiny", "org/other"))
    told = await client.post("/api/v1/models/status", served)
    assert told == {"model": served, "status": "DOWNLOADED", "progress": None, "error_message": None}
    assert (await client.post("/api/v1/models/status", other))["status"] == "NOT_FOUND"
    assert (await client.post("/api/v1/models/download", served, status=202))["status"] == "DOWNLOADED"
    ignored = await client.post("/api/v1/models/download", other, status=202)
    assert (ignored["status"], ignored["task_id"], ignored["model"]) == ("IGNORED", "org/other", other)
    assert (await client.get("/api/v1/models/list"))["models"] == [{"model": served, "status": "DOWNLOADED"}]
    assert (await client.call("DELETE", "/api/v1/models", served)).status == 409
    assert (await client.call("DELETE", "/api/v1/models", other)).status == 404
    assert (await client.call("GET", "/api/v1/models/space")).status == 404


async def test_the_machine(client: GoClient) -> None:
    assert await client.get("/api/v1/gpu/devices") == {"devices": [], "count": 0}  # these pods have none
    assert (await client.call("GET", "/api/v1/gpu/driver")).status == 503
    before = time_ns()
    clock = await client.call("GET", "/api/v1/clock")
    assert (clock.status, clock.body) == (204, b"")
    received, sent = (int(clock.headers[f"x-server-{word}-ns"]) for word in ("recv", "send"))
    assert before <= received <= sent <= time_ns()


async def test_health_needs_no_token(client: GoClient) -> None:
    for path in ("/health", "/livez"):
        told = (await client.call("GET", path, token=None)).json
        assert (told["status"], told["service_state"]) == ("healthy", "INFERENCE")
        assert told["gpu"] == {"available": False, "count": 0, "devices": []}
        assert told["managers"]["inference"] == {"running": True, "healthy": True}
        assert "train" in told["managers"]
    ready = await client.call("GET", "/readyz", token=None)
    assert (ready.status, ready.json["ready"]) == (200, True)


async def test_metrics(client: GoClient) -> None:
    answer = await client.call("GET", "/api/v1/metrics")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b'gonka_metrics_schema_info{version="1"} 1\n' in answer.body


@pytest.mark.parametrize("call", ["GET /api/v1/state", f"POST {NODE}/init/generate", "GET /api/v1/clock"])
async def test_every_call_needs_the_token(client: GoClient, call: str) -> None:
    method, path = call.split()
    for token in (None, "other"):
        answer = await client.call(method, path, INIT if method == "POST" else None, token=token)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
