# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import AsyncIterator
from types import ModuleType

import pytest

from poc_operator.controller import stored_object
from tests.support.fakes.callback_receiver import CallbackReceiver, callback_receiver
from tests.support.fakes.clock import FakeClock, LeaseClock
from tests.support.servers.pod import Pod, running_pod
from vllm_poc.server.clock import SYSTEM_CLOCK

VLLM_VERSION = "0.32.0"
QUICK = {
    "CHAT_BACKOFF_SECONDS": "0.01",
    "CALLBACK_INTERVAL_SECONDS": "0.01",
    "RETRY_FIRST_SECONDS": "0.01",
    "RETRY_LIMIT_SECONDS": "0.05",
    # A post that a busy machine answers late would be sent, and arrive, twice.
    "CALLBACK_SECONDS": "10",
    "ENGINE_SECONDS": "20",
    "FLUSH_SECONDS": "0.5",
    "REFUSED_SECONDS": "0.2",
}


@pytest.fixture
def pod_settings() -> dict[str, str]:
    """Settings of one test beyond the quick ones; parametrise this name to set some."""
    return {}


@pytest.fixture
def clock() -> FakeClock:
    """What the pod's leases go by, in a test that asks for it."""
    return LeaseClock()


@pytest.fixture
async def pod(
    pod_settings: dict[str, str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pod]:
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else SYSTEM_CLOCK
    for name, value in (QUICK | pod_settings).items():
        monkeypatch.setenv(f"VLLM_POC_{name}", value)
    monkeypatch.setitem(sys.modules, "vllm.version", ModuleType("vllm.version"))
    monkeypatch.setattr(sys.modules["vllm.version"], "__version__", VLLM_VERSION, raising=False)
    async with running_pod(clock) as pod:
        yield pod


@pytest.fixture(autouse=True)
def _counters_are_recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_object, "COUNTERS_SECONDS", 0.0)


@pytest.fixture
async def receiver() -> AsyncIterator[CallbackReceiver]:
    async with callback_receiver() as receiver:
        yield receiver
