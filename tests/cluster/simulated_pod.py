# SPDX-License-Identifier: Apache-2.0
"""A pod of the cluster that has our server over an engine of a formula, and a fault of that engine.

python -m tests.cluster.simulated_pod FAULT … runs it in a container, where FAULT is a value of `Ill`. Arguments of vLLM
that follow are not looked at.
"""

import os
import socket
import sys
from enum import StrEnum
from types import ModuleType

import uvicorn

from tests.support.fakes.engine import FakeEngineClient
from tests.support.servers.pod import Pod
from vllm_poc.rpc import BatchRequest, BatchResult

PORT = 8000
#: What it serves, and the release of vLLM that it says to be.
MODEL, RELEASE = "tiny", "0.32"
#: The number of the pod of a fleet whose GPU computes wrongly.
SICK = 2
#: What the container says at its end when the engine dies.
LAST_WORDS = "EngineDeadError: this block is too much for the engine"
_FOR_EVER, _DRIFT = 86_400.0, 50


class Ill(StrEnum):
    """What is wrong with the engine."""

    NOTHING = "nothing"
    HANGS = "hangs"
    DIES = "dies"
    IS_SICK = "is-sick"


class _DyingEngine(FakeEngineClient):
    """Takes the whole process with it, as soon as it computes."""

    def _compute(self, batch: BatchRequest) -> BatchResult:
        os.write(sys.stderr.fileno(), LAST_WORDS.encode())
        os._exit(1)


def engine(ill: Ill) -> FakeEngineClient:
    """Return an engine with this fault."""
    if ill is Ill.DIES:
        return _DyingEngine()
    made = FakeEngineClient()
    if ill is Ill.HANGS:
        made.seconds_per_batch = _FOR_EVER
    if ill is Ill.IS_SICK and socket.gethostname().endswith(f"-{SICK}"):
        made.drift = _DRIFT
    return made


def main(ill: Ill) -> None:
    """Serve until a signal."""
    # Of vLLM the server asks the version alone, and without it loads nothing.
    sys.modules["vllm.version"] = version = ModuleType("vllm.version")
    version.__version__ = RELEASE  # type: ignore[attr-defined]
    pod = Pod()
    pod.engine = engine(ill)
    pod.become_ready()
    uvicorn.run(pod.app, host="0.0.0.0", port=PORT, log_level="warning")


if __name__ == "__main__":
    main(Ill(sys.argv[1]))
