# SPDX-License-Identifier: Apache-2.0
"""A pod in this process: an ASGI app that looks like vLLM's, with the PoC middleware, over a fake engine."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request, Response, WebSocket
from prometheus_client import make_asgi_app
from starlette.routing import Mount

from tests.support.fakes.clock import STEP, FakeClock
from tests.support.fakes.engine import FakeEngineClient
from vllm_poc.server.app import PocMiddleware
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.vllm_routes import INFERENCE_PATHS
from vllm_poc.wire.answers import StatusResponse
from vllm_poc.wire.messages import API_PREFIX

ROUND: dict[str, Any] = {"block_hash": "abc123", "block_height": 7, "public_key": "node1"}
SLOT: dict[str, Any] = {"node_id": 1, "node_count": 3, "group_id": 1, "n_groups": 2}
ARTIFACT: dict[str, Any] = ROUND | {"params": {"model": "tiny", "seq_len": 64, "k_dim": 4}}
DISTANCE: dict[str, Any] = ROUND | {"r_target": 1.405, "seq_len": 64}
#: vLLM's own commands, during or after which nothing may be computed.
PAUSING = (
    *("/sleep", "/release_kv_cache_memory", "/wake_up", "/pause", "/resume"),
    *("/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update"),
    *("/collective_rpc", "/weight_checker"),
)


class Pod:
    """The pod's HTTP face, and the engine behind it."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.engine = FakeEngineClient(clock)
        self._clock = clock
        self.app = FastAPI()
        self.app.add_middleware(PocMiddleware, clock=clock)
        self.app.get("/v1/models")(lambda: {"data": ["tiny"]})
        self.app.get("/health")(_nothing)
        self.app.api_route("/ping", methods=["GET", "POST"])(_nothing)
        for path in INFERENCE_PATHS - {"/v1/realtime"}:
            self.app.post(path)(_infer)
        self.app.websocket("/v1/realtime")(_talk)
        self.refusing: set[str] = set()
        self.received: list[bytes] = []  # bodies of vLLM's own commands
        self.seconds_per_command = 0.05
        self.met_in_flight = 0  # calls to the workers that vLLM's own commands met
        for path in PAUSING:
            self.app.post(path)(partial(self._command, path))
        self.app.post("/tokenize")(_infer)
        metrics = Mount("/metrics", make_asgi_app())
        metrics.path_regex = re.compile("^/metrics(?P<path>.*)$")  # as vLLM does, so that nothing is redirected
        self.app.routes.append(metrics)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://pod")

    async def _command(self, path: str, request: Request) -> dict[str, str]:
        self.received.append(await request.body())
        self.met_in_flight += self.engine.in_flight
        await asyncio.sleep(self.seconds_per_command)
        self.met_in_flight += self.engine.in_flight
        if path in self.refusing:
            raise HTTPException(500)
        return {"status": "done"}

    def become_ready(self) -> None:
        """Set what vLLM sets in the app's state once its engine runs."""
        path = SimpleNamespace(name="tiny", model_path="/models/tiny")
        self.app.state.args = getattr(self.app.state, "args", SimpleNamespace())
        self.app.state.openai_serving_models = SimpleNamespace(base_model_paths=[path])
        self.app.state.engine_client = self.engine

    async def post(self, route: str, body: object = None) -> httpx.Response:
        """POST to a PoC route."""
        return await self.http.post(f"{API_PREFIX}/{route}", json=body)

    async def start(self, body: dict[str, Any]) -> httpx.Response:
        """Start a round."""
        return await self.post("init/generate", body)

    async def status(self) -> StatusResponse:
        """Return the status."""
        answer = await self.http.get(f"{API_PREFIX}/status")
        assert answer.status_code == 200, answer.text
        return StatusResponse.model_validate(answer.json())

    async def reach(self, reached: Callable[[StatusResponse], bool], seconds: float = 30) -> StatusResponse:
        """Poll the status until ``reached``."""
        deadline = monotonic() + seconds
        while not reached(status := await self.status()):
            assert monotonic() < deadline, f"not reached in {seconds} s: {status}"
            await self.pause()
        return status

    async def pause(self) -> None:
        """Wait a moment by the pod's clock."""
        await (self._clock.tick() if isinstance(self._clock, FakeClock) else asyncio.sleep(STEP))


async def _infer(seconds: float = 0) -> dict[str, bool]:
    await asyncio.sleep(seconds)
    return {"done": True}


async def _nothing() -> Response:
    return Response()


async def _talk(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.close()


@asynccontextmanager
async def running_pod(clock: Clock = SYSTEM_CLOCK, api_key: list[str] | None = None) -> AsyncIterator[Pod]:
    """Run a pod with its lifespan, ready to serve, by the ``clock``; ``api_key`` is vLLM's option.

    Its engine is there after the start, where vLLM's is there before: a test can still say what the model is like.
    """
    pod = Pod(clock)
    pod.app.state.args = SimpleNamespace(api_key=api_key)
    async with lifespan(pod.app), pod.http:
        pod.become_ready()
        yield pod


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Send the ASGI lifespan events that a server sends."""
    events: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    answers: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    serving = asyncio.create_task(app({"type": "lifespan"}, events.get, answers.put))  # type: ignore[arg-type]
    await events.put({"type": "lifespan.startup"})
    begun = asyncio.create_task(answers.get())
    await asyncio.wait({begun, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        begun.cancel()
        await serving  # which raises what went wrong
    assert begun.result()["type"] == "lifespan.startup.complete"
    yield
    await events.put({"type": "lifespan.shutdown"})
    await serving
