# SPDX-License-Identifier: Apache-2.0
"""What the operator's process begins at its start, and that it ends when one of its tasks does."""

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import kopf
import pytest
from kubernetes.aio.client import ApiClient

from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller import manager
from poc_operator.controller.health import supervised
from poc_operator.handlers import process
from tests.support.fakes.lease_api import lease_api
from tests.support.servers.http_server import free_port
from tests.unit.poc_operator.handlers.test_holding import OPTIONS


@asynccontextmanager
async def started() -> AsyncIterator[SimpleNamespace]:
    """Start the operator as kopf does, with an API server that has a Lease and serves our kinds; yield its options."""
    options = SimpleNamespace(namespace=[], health_port=free_port(), metrics_port=free_port(), **OPTIONS)
    start: Any = process.start
    end: Any = process.end

    async with lease_api() as (_, connection):

        async def connect() -> tuple[ApiClient, str]:
            return ApiClient(connection.configuration), "ns"

        async def unserved(*_: object) -> list[str]:
            return []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager, "connect", connect)
            patch.setattr(ObjectStore, "unserved", unserved)
            memo = kopf.Memo(options=options)
            try:
                await start(settings=kopf.OperatorSettings(), memo=memo)
                yield options
            finally:
                await end(memo=memo)
                gc.enable()  # which the operator does itself, as it sets objects aside
                gc.unfreeze()


@pytest.fixture(autouse=True)
def _pytest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for long lets a lease run out, which ends the process."""
    monkeypatch.setattr(os, "_exit", lambda _: None)


async def test_what_is_to_run_for_ever_is_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends unseen would leave a process that only looks alive."""
    names = list[str]()

    def noted(name: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        names.append(name)
        return supervised(name, work)

    monkeypatch.setattr(process, "supervised", noted)
    async with started():
        pass
    assert sorted(names) == [
        "fleets",
        "lag of the event loop",
        "leader election",
        "reaper",
        "search for garbage",
        "watch check",
    ]


PROGRAM = """
import asyncio, logging, sys
from poc_operator.controller.leader_election import LeaderElection
from tests.unit.poc_operator.handlers.test_process import started

async def keep(_):
    {what}

async def main():
    LeaderElection.keep = keep
    async with started():
        await asyncio.sleep(1)
    sys.exit(0)

logging.basicConfig(level=logging.INFO)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise RuntimeError('a defect')", ["the lease cannot be kept", "RuntimeError: a defect"]),
        ("return", []),
    ],
    ids=["it fails", "the lease is lost"],
)
def test_without_the_keeper_of_the_lease_the_process_ends_and_says_why(what: str, said: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM.format(what=what)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1, ended.stderr
    for text in (*said, "the lease is not renewed in time: ending at once, so that no two operators act"):
        assert text in ended.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_health_and_metrics_are_told_over_both_protocols(host: str) -> None:
    async with started() as options, httpx.AsyncClient(timeout=30) as client:
        health = await client.get(f"http://{host}:{options.health_port}/healthz")
        metrics = await client.get(f"http://{host}:{options.metrics_port}/metrics")
    assert (health.status_code, metrics.status_code) == (200, 200)
