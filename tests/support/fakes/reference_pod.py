# SPDX-License-Identifier: Apache-2.0
"""A server with the behaviour of the protocol's reference implementation: no rounds, no sessions, no resumption.

It refuses a start while it computes, with 409; begins at index 0; reports nothing
but the state, the round's parameters while it computes, and how many nonces it has processed; sends its results in
batches and drops what waits at a stop; ignores unknown fields and query parameters; answers requests for named nonces
only after its round. Its errors are vLLM's, byte by byte. From release 0.2 on it computes the decode scheme, too: its
artifacts have chains then, and a stop is answered when the last passes have run, while it says that it is idle.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from vllm_poc.wire.messages import API_PREFIX
from vllm_poc.wire.partition import NonceSlot

MODEL = "tiny"
#: Seconds for one batch, and between two callbacks: a hundredth of the reference's.
BATCH_SECONDS, CALLBACK_SECONDS = 0.005, 0.05


#: So many characters of what was sent stand in an explanation.
_INPUT = 200


class Params(BaseModel):
    """``params``: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")
    model: str
    seq_len: int
    k_dim: int = 12
    scheme: str = "prefill"
    decode: bool = False
    max_tokens: int = 0


class InitGenerate(BaseModel):
    """Body of a start: unknown keys are ignored."""

    block_hash: str
    block_height: int
    public_key: str
    node_id: int
    node_count: int
    group_id: int = 0
    n_groups: int = 1
    batch_size: int = 32
    params: Params
    url: str | None = None


class ReferencePod:
    """One server process; a restart is a new one."""

    def __init__(self, release: str = "0.1.7") -> None:
        self.release = release
        self.tried = 0  # starts of a scheme that it does not know
        self.drain_seconds = 0.0
        self.draining = False
        self.overlapped = False  # whether something was started while passes of the round before still ran
        self.request: InitGenerate | None = None
        self.processed = 0
        self.starts = 0
        self.hangs = False
        self.engine_runs = True
        self._tasks: list[asyncio.Task[None]] = []
        self._buffer: list[int] = []
        self.app = FastAPI()
        self.app.exception_handler(HTTPException)(_http_error)
        self.app.exception_handler(RequestValidationError)(_invalid)
        self.app.exception_handler(TypeError)(_failure)
        self.asked = 0
        self.app.post(f"{API_PREFIX}/init/generate")(self.start)
        self.app.post(f"{API_PREFIX}/stop")(self.stop)
        self.app.get(f"{API_PREFIX}/status")(self.status)
        self.app.get(f"{API_PREFIX}/versions")(self.versions)
        self.app.post(f"{API_PREFIX}/generate")(self.generate)

    async def start(self, body: InitGenerate) -> dict[str, Any]:
        """Start at index 0, unless something is being computed."""
        if not self.engine_runs:
            raise HTTPException(503, "Engine not available")
        if self.request is not None:
            raise HTTPException(409, "Already generating")
        if body.params.model != MODEL:
            raise HTTPException(409, {"error": "params mismatch", "requested": body.params.model_dump()})
        if body.params.decode and self.release < "0.2":
            self.tried += 1
            raise HTTPException(422, "params.decode: Extra inputs are not permitted")
        self.overlapped |= self.draining
        self.request, self.processed, self.starts = body, 0, self.starts + 1
        self._tasks = [asyncio.create_task(self._compute(body)), asyncio.create_task(self._send(body))]
        return {"status": "OK", "pow_status": {"status": "GENERATING"}}

    async def status(self) -> dict[str, Any]:
        """State, parameters and progress."""
        if self.request is None:
            return {"status": "IDLE", "config": None, "stats": None}
        config = self.request.model_dump(exclude={"batch_size", "params", "url"})
        config |= self.request.params.model_dump(exclude={"model", "scheme", "decode", "max_tokens"})
        stats = {"total_processed": self.processed, "nonces_per_second": 1.5}
        return {"status": "GENERATING", "config": config, "stats": stats}

    async def versions(self) -> dict[str, Any]:
        """What runs here; the schemes are a matter of the release."""
        return {"vllm_version": "0.30.0", "gonka_poc_version": self.release, "poc_validation_inference": True}

    async def generate(self, request: Request) -> dict[str, Any]:
        """Named nonces: they wait until the round is over."""
        self.asked += 1
        while self.request is not None:  # noqa: ASYNC110 - as the server does
            await asyncio.sleep(BATCH_SECONDS)
        raise HTTPException(503, "Engine not available")

    async def stop(self) -> dict[str, Any]:
        """Stop whatever runs; what was not sent is lost."""
        await self.end()
        self.draining = True
        await asyncio.sleep(self.drain_seconds)
        self.draining = False
        return {"status": "OK", "pow_status": {"status": "STOPPED"}}

    async def end(self) -> None:
        """Cancel everything."""
        self.request, self._buffer = None, []
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    async def _compute(self, body: InitGenerate) -> None:
        slot = NonceSlot(**body.model_dump(include={"node_id", "node_count", "group_id", "n_groups"}))
        while True:
            await asyncio.sleep(BATCH_SECONDS)
            if not self.hangs:
                self._buffer += slot.nonces(self.processed, body.batch_size)
                self.processed += body.batch_size

    async def _send(self, body: InitGenerate) -> None:
        shown = body.model_dump(include={"block_hash", "block_height", "public_key", "node_id"})
        encoding = {"dtype": "f16", "k_dim": body.params.k_dim, "endian": "le"}
        async with httpx.AsyncClient(timeout=30) as client:
            while True:
                await asyncio.sleep(CALLBACK_SECONDS)
                sent, self._buffer = self._buffer, []
                artifacts = [_artifact(body.params, nonce) for nonce in sent]
                if sent and body.url:
                    await client.post(
                        f"{body.url}/generated", json=shown | {"artifacts": artifacts, "encoding": encoding}
                    )


def chain(nonce: int, max_tokens: int) -> list[int]:
    """The chain that the fake gives a nonce."""
    return [(nonce * 7 + step) % 16 for step in range(max_tokens + 1)]


def _artifact(params: Params, nonce: int) -> dict[str, Any]:
    told: dict[str, Any] = {"nonce": nonce, "vector_b64": ""}
    return told | {"k_points_steps": chain(nonce, params.max_tokens)} if params.decode else told


def _wrapped(message: str, kind: str, code: int, param: str | None = None) -> JSONResponse:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=code)


async def _http_error(_: Request, error: Any) -> JSONResponse:  # noqa: ANN401 - FastAPI's handlers
    # vLLM cleans the text of addresses in memory, and fails on what is none.
    text = re.sub(r" at 0x[0-9a-f]+>", ">", error.detail)
    return _wrapped(text, HTTPStatus(error.status_code).phrase, error.status_code)


async def _invalid(_: Request, error: Any) -> JSONResponse:  # noqa: ANN401
    mistakes = error.errors()
    lines = [
        f"  {one | {'input': str(one['input'])[:_INPUT], 'loc': '.'.join(map(str, one['loc']))}}" for one in mistakes
    ]
    label = "error" if len(mistakes) == 1 else "errors"
    text = f"{len(mistakes)} validation {label}:\n" + "\n".join(lines)
    return _wrapped(text, "Bad Request", HTTPStatus.BAD_REQUEST, ".".join(map(str, mistakes[0]["loc"])))


async def _failure(_: Request, error: Any) -> JSONResponse:  # noqa: ANN401
    return _wrapped(str(error), "BadRequestError", HTTPStatus.BAD_REQUEST)


@contextlib.asynccontextmanager
async def reference_pod(release: str = "0.1.7") -> AsyncIterator[ReferencePod]:
    """Run a server process of a release."""
    pod = ReferencePod(release)
    try:
        yield pod
    finally:
        await pod.end()
