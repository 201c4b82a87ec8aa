# SPDX-License-Identifier: Apache-2.0
"""A background task that dies takes the process with it, and says so: an idle process would only look alive."""

import asyncio
import os
import subprocess
import sys

import pytest

from poc_operator.controller.supervision import supervised

PROGRAM = """
import asyncio, logging, sys
from poc_operator.controller.supervision import supervised

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
