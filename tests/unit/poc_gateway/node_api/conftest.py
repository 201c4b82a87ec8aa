# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest

from poc_gateway.node_api import cluster, create_pocround, dispatch
from poc_operator.clients.pods import client
from tests.unit.poc_gateway.node_api.cluster import World, running_world

#: What the pods' vLLM calls itself.
VLLM_VERSION = "0.25.1"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create_pocround, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(dispatch.Dispatcher.__init__, "__kwdefaults__", {"look_seconds": 0.1})
    monkeypatch.setattr(dispatch, "REST_SECONDS", 0.2)


@pytest.fixture(autouse=True)
def _pods_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may hold up a pod that answers for longer than a gateway would wait for it."""
    monkeypatch.setattr(cluster, "ASK_SECONDS", 20.0)
    monkeypatch.setattr(client, "STATUS_SECONDS", 20.0)


@pytest.fixture(autouse=True)
def _vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", ModuleType("vllm.version"))
    monkeypatch.setattr(sys.modules["vllm.version"], "__version__", VLLM_VERSION, raising=False)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A gateway in front of two pods."""
    async with running_world(tmp_path, pods=2) as world:
        yield world


@pytest.fixture
async def podless(tmp_path: Path) -> AsyncIterator[World]:
    """A gateway without pods."""
    async with running_world(tmp_path, pods=0) as world:
        yield world
