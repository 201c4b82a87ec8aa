# SPDX-License-Identifier: Apache-2.0
"""What ends the process is told: a background task that died, and what its health says."""

import asyncio
import os
import subprocess
import sys

import httpx
import pytest

from poc_operator.controller.health import serve_health, supervised
from tests.support.servers.http_server import free_port

PROGRAM = """
import asyncio, logging, sys
from poc_operator.controller.health import supervised

async def fail():
    raise RuntimeError("a defect")

async def end():
    pass

async def main():
    supervised("the keeper", {work}(), forever={forever})
    await asyncio.sleep(1)
    sys.exit(0)

logging.basicConfig(level=logging.INFO)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("work", "forever", "status", "said"),
    [
        ("fail", True, 1, "RuntimeError: a defect"),
        ("fail", False, 1, "RuntimeError: a defect"),
        ("end", True, 1, ""),
        ("end", False, 0, ""),
    ],
)
def test_an_unexpected_end_ends_the_process(work: str, forever: bool, status: int, said: str) -> None:
    program = PROGRAM.format(work=work, forever=forever)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert ended.returncode == status, ended.stderr
    assert said in ended.stderr
    assert ("the keeper has ended unexpectedly: ending the process" in ended.stderr) is (status == 1)


async def test_a_cancelled_task_ends_nothing() -> None:
    task = supervised("one", asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_health_is_told_over_both_protocols(host: str) -> None:
    findings, port = list[str](), free_port()
    async with serve_health(lambda: findings, port), httpx.AsyncClient(timeout=30) as client:
        answer = await client.get(f"http://{host}:{port}/healthz")
        assert (answer.status_code, answer.text) == (200, "ok")
        findings += ["the Lease is not renewed", "pod ns/a is not what the watch told"]
        answer = await client.get(f"http://{host}:{port}/healthz")
        assert (answer.status_code, answer.text.splitlines()) == (503, findings)


async def test_a_port_that_is_taken_is_an_error() -> None:
    port = free_port()
    async with serve_health(list, port, host="127.0.0.1"):
        with pytest.raises(OSError, match="in use"):
            async with serve_health(list, port, host="127.0.0.1"):
                pass
