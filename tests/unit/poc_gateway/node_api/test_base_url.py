# SPDX-License-Identifier: Apache-2.0
"""Base URLs: which ML node a path or a host means, and that ML nodes do not see each other."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from poc_gateway.node_api.base_url import split
from poc_gateway.store import schema
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import BLOCK, INIT, PARAMS, error_of, validation

HOST = "b.example.org"


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Two ML nodes with a pod each; the second has a number, a host, and a token of its own."""
    monkeypatch.setenv("TOKEN_OF_B", "secret-b")
    fields = {"number": 2, "host": HOST, "token": {"env": "TOKEN_OF_B"}}
    token = {"POC_GATEWAY_NETWORK_TOKEN": "secret-one"}
    async with running_world(tmp_path, pods=1, one=None, also={"b": fields}, **token) as world:
        await world.add_pod("127.0.0.2", "b")
        yield world


async def ask(
    world: World, method: str, path: str, *, of: str = "one", body: object = None, host: str = "gateway:8082"
) -> httpx.Response:
    headers = {"Authorization": f"Bearer secret-{of}", "Host": host}
    return await world.http.request(method, path, json=body, headers=headers)


async def over(world: World, path: str) -> dict[str, Any]:
    """Poll a job of the second ML node until it is over."""
    async with asyncio.timeout(20):
        while True:
            body: dict[str, Any] = (await ask(world, "GET", path, of="b")).json()
            if body["status"] not in ("queued", "running"):
                return body
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "name", "rest"),
    [
        ("*", None, "*"),
        ("/api/v1/state", None, "/api/v1/state"),
        ("/v1/models", None, "/v1/models"),
        ("/v3.0.8/api/v1/state", None, "/api/v1/state"),
        ("/v3.0.16-post5/v1/models", None, "/v1/models"),
        ("/v1/v1/models", None, "/v1/models"),
        ("/3.1.0/readyz", None, "/readyz"),
        ("/nodes/a/api/v1/state", "a", "/api/v1/state"),
        ("/nodes/a/v1/chat/completions", "a", "/v1/chat/completions"),
        ("/nodes/a/v3.0.8/api/v1/state", "a", "/api/v1/state"),
        ("/v3.0.8/nodes/a/api/v1/state", "a", "/api/v1/state"),
        ("/v3.0.8/nodes/a/v3.0.8/api/v1/state", "a", "/v3.0.8/api/v1/state"),  # one version, not two
        ("/nodes/a", "a", "/"),
        ("/nodes/a/", "a", "/"),
        ("/v3.0.8/v3.0.8/api/v1/state", None, "/v3.0.8/v3.0.8/api/v1/state"),
        ("/latest/api/v1/state", None, "/latest/api/v1/state"),
        ("/v1/models/v1/x", None, "/v1/models/v1/x"),
        ("/", None, "/"),
    ],
)
def test_a_path_is_split(path: str, name: str | None, rest: str) -> None:
    assert split(path) == (name, rest)


@pytest.mark.parametrize("path", ["", "/v3.0.8", "/nodes/one", "/nodes/one/v3.0.8", "/v3.0.8/nodes/one"])
async def test_an_only_ml_node_needs_no_name(world: World, path: str) -> None:
    assert (await world.http.get(f"{path}/api/v1/state")).json()["state"] == "INFERENCE"


async def test_several_ml_nodes_are_told_apart_by_path_and_host(pair: World) -> None:
    assert (await ask(pair, "GET", "/nodes/one/api/v1/state")).status_code == 200
    assert (await ask(pair, "GET", "/nodes/b/api/v1/state", of="b")).status_code == 200
    for host in (HOST, f"{HOST}:8082", HOST.upper()):
        assert (await ask(pair, "GET", "/v3.0.8/api/v1/state", of="b", host=host)).status_code == 200
    # A path says more than a host.
    assert (await ask(pair, "GET", "/nodes/one/api/v1/state", host=HOST)).status_code == 200
    unnamed = error_of(await ask(pair, "GET", "/api/v1/state"), 404, "MlNodeNotFound")
    assert "put /nodes/NAME in front of the path" in unnamed.detail
    for path in ("/nodes/c/api/v1/state", "/nodes/c/readyz"):
        assert "no ML node is called c" in error_of(await ask(pair, "GET", path), 404, "MlNodeNotFound").detail
    # The gateway itself is ready whichever ML nodes it has.
    assert (await ask(pair, "GET", "/readyz")).status_code == 200


async def test_an_ml_node_takes_its_own_token_alone(pair: World) -> None:
    for path, token in (("/nodes/one", "b"), ("/nodes/b", "one"), ("", "b"), ("/nodes/c", "b")):
        error_of(await ask(pair, "GET", f"{path}/api/v1/state", of=token), 401, "Unauthorized")
    error_of(await ask(pair, "GET", "/api/v1/state", of="one", host=HOST), 401, "Unauthorized")


async def test_rounds_of_different_ml_nodes_run_side_by_side(pair: World) -> None:
    init, status = "api/v1/inference/pow/init/generate", "api/v1/inference/pow/status"
    other = INIT | {"block_height": 4712, "node_id": 2}
    assert (await ask(pair, "POST", f"/nodes/one/{init}", body=INIT)).status_code == 200
    assert (await ask(pair, "GET", f"/nodes/b/{status}", of="b")).json()["status"] == "IDLE"
    assert (await ask(pair, "POST", f"/nodes/b/{init}", of="b", body=other)).status_code == 200
    assert [len(cluster.rounds) for cluster in pair.clusters.values()] == [1, 1]
    error_of(await ask(pair, "POST", f"/nodes/one/{init}", body=other), 409, "RoundConflict")
    assert (await ask(pair, "POST", "/nodes/b/api/v1/stop", of="b")).status_code == 200
    assert (await ask(pair, "GET", f"/nodes/one/{status}")).json()["status"] == "GENERATING"


async def test_the_same_round_of_two_ml_nodes_has_two_names(pair: World) -> None:
    body = INIT | {"node_id": 2}
    for name, token in (("one", "one"), ("b", "b")):
        path = f"/nodes/{name}/api/v1/pow/init/generate"
        assert (await ask(pair, "POST", path, of=token, body=body)).status_code == 200
    names = [name for cluster in pair.clusters.values() for name in cluster.rounds]
    assert len(set(names)) == 2


async def test_a_round_for_another_number_is_refused(pair: World) -> None:
    answer = await ask(pair, "POST", "/nodes/b/api/v1/pow/init/generate", of="b", body=INIT)
    error = error_of(answer, 422, "InvalidRequest")
    assert error.errors[0].field == "node_id"
    assert "1 was sent to ML node b, which is number 2" in error.detail
    assert pair.clusters["b"].rounds == {}


async def test_jobs_of_an_ml_node_are_its_own(pair: World) -> None:
    for pod in pair.pods.values():
        pod.engine.seconds_per_batch = 0.2
    path = "api/v1/pow/generate"
    queued = (await ask(pair, "POST", f"/nodes/b/{path}", of="b", body=validation())).json()
    job = queued["request_id"]
    assert job.startswith("5001:b.")
    error_of(await ask(pair, "GET", f"/nodes/one/{path}/{job}"), 404, "JobNotFound")
    await asyncio.sleep(0.1)
    await pair.close()
    for pod in pair.pods.values():
        pod.engine.seconds_per_batch = 0.001
    await pair.open()
    body = await over(pair, f"/nodes/b/{path}/{job}")
    assert body["n_total"] == 200
    assert pair.pods["127.0.0.1"].engine.computed == []


async def test_jobs_of_an_ml_node_that_is_gone_fail(pair: World) -> None:
    pair.clusters["b"].pods.clear()
    body = BLOCK | {"params": PARAMS, "nonces": [1]}
    kept, lost = [
        (await ask(pair, "POST", f"/nodes/{name}/api/v1/pow/generate", of=name, body=body)).json()["request_id"]
        for name in ("one", "b")
    ]
    await pair.close()
    pair.ml_nodes.pop()
    await pair.open()
    rows = {row["id"]: row for row in pair.rows(select(schema.jobs))}
    assert (rows[lost]["state"], rows[kept]["error"]) == ("failed", None)
    assert "was removed from the gateway's configuration" in rows[lost]["error"]


async def test_without_an_ml_node_the_routes_say_so(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=0) as world:
        await world.close()
        world.ml_nodes.clear()
        await world.open()
        error = error_of(await world.get("inference/pow/status"), 503, "NotConfigured")
        assert "gateway.mlNodes" in error.detail
        assert "POC_GATEWAY_ML_NODES" in error.detail
        assert (await world.http.get("/readyz")).status_code == 200


async def test_a_slash_too_many_is_no_redirect_to_another_ml_node(pair: World) -> None:
    error_of(await ask(pair, "GET", "/nodes/b/api/v1/state/", of="b"), 404, "NotFound")
