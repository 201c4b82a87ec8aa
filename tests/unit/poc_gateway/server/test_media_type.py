# SPDX-License-Identifier: Apache-2.0
"""Every route that takes JSON takes it from the network's own client, which sends no Content-Type.

The requests are written to a socket, byte by byte what Go's net/http writes: client libraries of Python add headers.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.process import Components, inside_app
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from tests.support.builders.deliveries import ROUND, artifacts
from tests.support.builders.gateway_seeds import read_round, store_seeds
from tests.support.servers.http_server import free_port, serve
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import BLOCK, INIT, PARAMS
from vllm_poc.wire.answers import ErrorResponse
from vllm_poc.wire.messages import is_json

HOST = "127.0.0.1"
#: By the end of a route's path: a body that it takes. A new route needs its own here.
BODIES: Mapping[str, Any] = {
    "/generated": json.loads(artifacts([101])),
    "/validated": ROUND | {"n_total": 3, "fraud_detected": False},
    "/replay": {"nonces": [3]},
    "/rivals": {"uid": "uid-1", "decisions": [{"nonce": 3, "truth": "neither", "up_to": 1, "pod": "pod"}]},
    "/init/generate": INIT,
    "/pow/generate": BLOCK | {"params": PARAMS, "nonces": [1], "wait": True},
    "/inference/up": {"model": "tiny"},
    "/up/async": {"model": "tiny", "dtype": "float16", "additional_args": ["--max-model-len=1024"]},
    "/down": {},
    "/models/status": {"hf_repo": "tiny", "hf_commit": None},
    "/models/download": {"hf_repo": "tiny", "hf_commit": None},
    "/callback-relay/{token}/{suffix}": json.loads(artifacts([101])),
    "/stop": {},
    "/init": INIT,
    "/init/validate": INIT,
    "/phase/generate": {},
    "/phase/validate": {},
    "/validate": {},
}
NAMES = {"namespace": "ns", "name": "round-uid-1", "uid": "uid-1", "token": "0" * 32, "suffix": "generated"}
#: Some calls of the protocol do not exist for a whole cluster, and say so; and no round names the address of a token.
READ = {"NotSupported", "CallbackUnknown"}
WRONG = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml", "/"]

Answer = tuple[int, Any]


class Served:
    """An app on a port, and its routes."""

    def __init__(self, app: FastAPI, port: int) -> None:
        posts = [(path, item["post"]) for path, item in app.openapi()["paths"].items() if "post" in item]
        # Two ways to send again take parameters, and no body.
        self.routes = [path for path, post in posts if "requestBody" in post or not path.endswith("/replay")]
        self._port = port

    async def post(self, path: str, content_type: str | None) -> Answer:
        """Send what a Go client sends, and the Content-Type if there is one."""
        end = max((end for end in BODIES if path.endswith(end)), key=len)
        body = json.dumps(BODIES[end], separators=(",", ":")).encode()
        lines = [
            f"POST {path.format_map(NAMES)} HTTP/1.1",
            f"Host: {HOST}:{self._port}",
            "User-Agent: Go-http-client/1.1",
            f"Content-Length: {len(body)}",
            *([] if content_type is None else [f"Content-Type: {content_type}"]),
            "Accept-Encoding: gzip",
            "Connection: close",
        ]
        reader, writer = await asyncio.open_connection(HOST, self._port)
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), json.loads(answer)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_world(tmp_path, pods=1) as world:
        yield world


@pytest.fixture
async def apps(world: World) -> AsyncIterator[list[Served]]:
    """The network's app and the inside's, over one database."""
    await store_seeds(world.database)
    inside = inside_app(_parts(world.database, world))
    ports = free_port(), free_port()
    async with serve(world.app, HOST, ports[0]), serve(inside, HOST, ports[1]):
        yield [Served(world.app, ports[0]), Served(inside, ports[1])]


def _parts(database: Database, world: World) -> Components:
    rounds, outbox = Rounds(database, read_round), Outbox(database, world.settings)
    return Components(settings=world.settings, database=database, rounds=rounds, outbox=outbox)


@pytest.mark.parametrize("content_type", [None, "", "application/json", "application/json; charset=utf-8"])
async def test_json_is_taken_from_every_client(apps: list[Served], content_type: str | None) -> None:
    for app in apps:
        assert len(app.routes) >= 3
        for path in app.routes:
            status, answer = await app.post(path, content_type)
            assert status in (200, 202) or answer["reason"] in READ, (path, status, answer)


@pytest.mark.parametrize("content_type", WRONG)
async def test_other_types_are_refused_by_name(apps: list[Served], content_type: str) -> None:
    for app in apps:
        for path in app.routes:
            status, answer = await app.post(path, content_type)
            error = ErrorResponse.model_validate(answer)
            assert (status, error.reason) == (415, "UnsupportedMediaType"), (path, answer)
            assert content_type in error.detail
            assert "application/json" in error.detail


@pytest.mark.parametrize("content_type", WRONG)
async def test_without_a_body_its_type_says_nothing(world: World, content_type: str) -> None:
    answer = await world.http.post("/api/v1/pow/stop", headers={"Content-Type": content_type})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/json", True),
        ("Application/JSON;charset=UTF-8", True),
        ("application/problem+json", True),
        ("text/json", False),
        ("json", False),
        ("application/jsonl", False),
        ("application/x/y+json", False),
        ("", True),
    ],
)
def test_which_types_are_json(content_type: str, *, expected: bool) -> None:
    assert is_json(content_type) is expected
