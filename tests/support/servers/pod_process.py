# SPDX-License-Identifier: Apache-2.0
"""A pod in a process of its own, which takes signals as a release of vLLM does.

python -m tests.support.servers.pod_process PORT RELEASE FILE: serve on this port of the loopback interface until a
signal, as vLLM 0.23 or 0.32 does. At the end the file has the nonces that the engine answered, as JSON. ``POST /chat``
with ``seconds`` keeps the engine busy with chat, and ``POST /break`` lets all its calls fail.

`serving` runs one. What the launchers do is taken from ``vllm/entrypoints/launcher.py`` of 0.23 and
``vllm/entrypoints/launchers/launcher.py`` of 0.32.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import httpx
import uvicorn
import uvloop

from tests.support.servers.http_server import free_port
from tests.support.servers.pod import Pod
from vllm_poc.wire.answers import StatusResponse
from vllm_poc.wire.messages import API_PREFIX

ROOT = Path(__file__).resolve().parents[3]
#: Releases whose launchers differ in how they take signals.
RELEASES = ("0.23", "0.32")
_START_SECONDS, _END_SECONDS = 30, 60
_SECONDS_PER_BATCH = 0.02


class PodProcess:
    """A running process, and its HTTP face."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient, file: Path) -> None:
        self.http = http
        self._process = process
        self._file = file

    async def post(self, route: str, body: object = None) -> httpx.Response:
        """POST to a PoC route."""
        return await self.http.post(f"{API_PREFIX}/{route}", json=body)

    async def status(self) -> StatusResponse:
        """Return the status."""
        answer = await self.http.get(f"{API_PREFIX}/status")
        assert answer.status_code == 200, answer.text
        return StatusResponse.model_validate(answer.json())

    async def reach(self, reached: Callable[[StatusResponse], bool], seconds: float = 20) -> StatusResponse:
        """Poll the status until ``reached``."""
        deadline = monotonic() + seconds
        while not reached(status := await self.status()):
            assert monotonic() < deadline, f"not reached in {seconds} s: {status}"
            await asyncio.sleep(0.01)
        return status

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def ended(self) -> float:
        """Wait until the process has ended; return how many seconds that took."""
        started = monotonic()
        await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        return monotonic() - started

    @property
    def computed(self) -> list[int]:
        """Every nonce that the engine of the ended process had answered, in order."""
        nonces: list[int] = json.loads(self._file.read_text())
        return nonces


@contextlib.asynccontextmanager
async def serving(release: str, folder: Path, settings: Mapping[str, str]) -> AsyncIterator[PodProcess]:
    """Run a pod until the block ends, with ``VLLM_POC_*`` settings by their names without the prefix."""
    port, file = free_port(), folder / f"computed-{monotonic():.3f}.json"
    environment = {f"VLLM_POC_{name}": value for name, value in settings.items()}
    path = os.pathsep.join([str(ROOT), str(ROOT / "image"), str(ROOT / "operator")])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.servers.pod_process", str(port), release, str(file)),
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        try:
            await _wait_until_ready(process, http)
            yield PodProcess(process, http, file)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _wait_until_ready(process: asyncio.subprocess.Process, http: httpx.AsyncClient) -> None:
    deadline = monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/v1/models")).status_code == 200:
                return
        assert process.returncode is None, "the pod's process ended"
        assert monotonic() < deadline, f"the pod did not start within {_START_SECONDS} s"
        await asyncio.sleep(0.05)


@dataclass
class _Engine:
    """What vLLM's launcher ends before its HTTP server; nothing is computed after that."""

    pod: Pod

    def shutdown(self) -> None:
        self.pod.engine.fault = RuntimeError("EngineCore encountered an issue")


class _NoSignalServer(uvicorn.Server):
    """Takes no signals itself, as in vLLM 0.32; in 0.23 uvicorn and the loop both take them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: uvicorn.Server, engine: _Engine) -> Coroutine[Any, Any, None]:
    loop = asyncio.get_running_loop()
    serving_ = loop.create_task(server.serve())
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)

    async def shut_down() -> None:
        await asked.wait()
        await loop.run_in_executor(None, engine.shutdown)
        server.should_exit = True
        serving_.cancel()

    shutting_down = loop.create_task(shut_down())
    try:
        await serving_
        return _nothing()
    except asyncio.CancelledError:
        return server.shutdown()
    finally:
        shutting_down.cancel()


async def _nothing() -> None:
    """Nothing is left to do."""


async def _main(port: int, release: str, file: Path) -> None:
    pod = Pod()
    pod.become_ready()
    pod.engine.seconds_per_batch = _SECONDS_PER_BATCH

    @pod.app.post("/chat")
    async def chat(seconds: float) -> None:
        pod.engine.output_processor.busy = True
        await asyncio.sleep(seconds)
        pod.engine.output_processor.busy = False

    @pod.app.post("/break")
    async def break_engine() -> None:
        pod.engine.fault = RuntimeError("CUDA error")

    config = uvicorn.Config(pod.app, host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config) if release == "0.23" else _NoSignalServer(config)
    try:
        await (await _serve(server, _Engine(pod)))
    finally:
        await asyncio.to_thread(file.write_text, json.dumps(pod.engine.computed))


if __name__ == "__main__":
    sys.modules["vllm.version"] = version = ModuleType("vllm.version")
    version.__version__ = sys.argv[2]  # type: ignore[attr-defined]
    uvloop.run(partial(_main, int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))())
