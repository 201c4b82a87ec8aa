# SPDX-License-Identifier: Apache-2.0
"""Start a real server, wait for it within a limit, and stop it with all its processes."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hack.vllm.environment import ROOT
from tests.support.patience import PATIENCE
from tests.support.servers.http_server import free_port
from tests.vllm.client import Client
from tests.vllm.device import SERVER_FLAGS

MODEL_NAME = "tiny"
READY_SECONDS = 180 * PATIENCE
STOP_SECONDS = 20
LOG_LINES = 40
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # Adds POST /collective_rpc, by which the tests reach their own worker methods.
    "VLLM_SERVER_DEV_MODE": "1",
}
# Few KV blocks, so that a checksum takes no time.
FLAGS = (*SERVER_FLAGS, "--max-model-len", "1024", "--num-gpu-blocks-override", "256")


@contextmanager
def serving(
    model: Path, log: Path, flags: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Client]:
    """Serve ``model`` on a free port while the context lasts; RuntimeError with the log's end if it does not start."""
    words = ["-m", "vllm_poc", "serve", str(model), "--served-model-name", MODEL_NAME, "--host", "127.0.0.1"]
    with running(lambda port: [*words, "--port", str(port), *FLAGS, *flags], log, environment) as client:
        yield client


@contextmanager
def running(
    words: Callable[[int], Sequence[str]],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    key: str | None = None,
) -> Iterator[Client]:
    """Run Python with what ``words`` returns for a free port, as `serving` does; the client sends ``key``, if any."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words(port)],
            env={**command_environment(), **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, port, log)
            yield Client(f"http://127.0.0.1:{port}", MODEL_NAME, log, key)
        finally:
            _stop(process)


def command_environment() -> dict[str, str]:
    """Return the environment in which the commands of the worker's image run."""
    folders = [ROOT / "image", ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": ":".join(map(str, folders))}


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while not _is_healthy(port):
        if process.poll() is not None or time.monotonic() > end:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise RuntimeError(f"the server is not ready (exit status {process.returncode}); its log ends:\n{tail}")
        time.sleep(0.5)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    # The engine and its workers are in the server's process group and must not outlive it.
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_SECONDS)
