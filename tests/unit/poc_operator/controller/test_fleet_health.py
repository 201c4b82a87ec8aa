# SPDX-License-Identifier: Apache-2.0
"""Looks at pods: whom they ask, how often, and what they leave behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from poc_operator.clients.errors import NotAPodOfOurs, PodTimeout
from poc_operator.controller.fleet_health import GPU_SECONDS, LOOK_SECONDS, FleetHealth
from poc_operator.fleets.progress import SERIES, hung
from poc_operator.fleets.stages import GpuErrors
from poc_operator.observed import Container, PodView
from tests.unit.poc_operator.fleets.test_healing import SERVER, metrics
from vllm_poc.wire.answers import Gpu, GpusResponse


class Pods:
    """Pods that all answer the same, and when it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.text = metrics(running=1)
        self.fault: Exception | None = None
        self.devices = [
            Gpu(index=0, ecc_double_bit_errors=1, xid_errors=0),
            Gpu(index=1, ecc_double_bit_errors=2, xid_errors=2, last_xid=79),
            Gpu(index=2),
        ]
        self.asked: list[str] = []
        self.gpus_asked = 0

    async def of(self, namespace: str) -> "Pods":
        return self

    async def metrics(self, base: str, names: Sequence[str]) -> str:
        assert names == SERIES
        self.asked.append(base)
        if self.fault is not None:
            raise self.fault
        return self.text

    async def gpus(self, base: str) -> GpusResponse:
        self.gpus_asked += 1
        if not self.devices:
            raise NotAPodOfOurs("no such route")
        return GpusResponse(devices=self.devices)


def a_pod(number: int, *, ready: bool = True) -> PodView:
    containers = [Container(id=SERVER)]
    return PodView(
        name=f"demo-{number}",
        namespace="ns",
        uid=f"u{number}",
        ip=f"10.0.0.{number}",
        ready=ready,
        containers=containers,
    )


@pytest.fixture
def pods() -> Pods:
    return Pods()


@pytest.fixture
async def health(pods: Pods) -> AsyncIterator[FleetHealth]:
    found = FleetHealth(cast(Any, pods), lambda: pods.now)
    yield found
    await found.stop()


async def looked(health: FleetHealth, pods: Pods, *seen: PodView) -> None:
    """Look once, and wait until it is done."""
    before = len(pods.asked)
    health.see("f", seen, 8000)
    async with asyncio.timeout(20):
        while len(pods.asked) < before + sum(pod.ready for pod in seen):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)


async def test_ready_pods_are_asked_now_and_then(health: FleetHealth, pods: Pods) -> None:
    await looked(health, pods, a_pod(1), a_pod(2, ready=False))
    assert pods.asked == ["http://10.0.0.1:8000/api/v1/pow"]
    for pods.now in (1.0, LOOK_SECONDS - 1):
        health.see("f", [a_pod(1)], 8000)
        await asyncio.sleep(0.01)
    assert len(pods.asked) == 1
    pods.now = LOOK_SECONDS
    await looked(health, pods, a_pod(1))
    assert (len(pods.asked), pods.gpus_asked) == (2, 1)
    assert hung(health.found("f")["u1"], int(LOOK_SECONDS)) is not None
    assert health.gpu_errors("f") == {"u1": GpuErrors(memory=3, xids=2, last_xid=79)}


async def test_a_pod_that_does_not_answer_is_not_said_to_be_hung(health: FleetHealth, pods: Pods) -> None:
    for pods.now in (0.0, LOOK_SECONDS):
        await looked(health, pods, a_pod(1))
    pods.now, pods.fault = 2 * LOOK_SECONDS, PodTimeout("no answer")
    await looked(health, pods, a_pod(1))
    assert hung(health.found("f")["u1"], 60) is None
    pods.now, pods.fault = 3 * LOOK_SECONDS, None
    await looked(health, pods, a_pod(1))
    assert hung(health.found("f")["u1"], 60) is not None


async def test_pods_without_counters_of_errors(health: FleetHealth, pods: Pods) -> None:
    pods.devices = [Gpu(index=0)]
    await looked(health, pods, a_pod(1))
    assert health.gpu_errors("f") == {"u1": GpuErrors()}
    pods.now, pods.devices = GPU_SECONDS, []
    await looked(health, pods, a_pod(1))
    assert (health.gpu_errors("f"), pods.gpus_asked) == ({"u1": GpuErrors()}, 2)


async def test_pods_and_fleets_that_are_gone_are_forgotten(health: FleetHealth, pods: Pods) -> None:
    await looked(health, pods, a_pod(1), a_pod(2))
    health.see("f", [a_pod(2)], 8000)
    assert set(health.found("f")) == {"u2"}
    health.forget("f")
    assert health.found("f") == {}
