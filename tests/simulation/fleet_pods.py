# SPDX-License-Identifier: Apache-2.0
"""Simulated pods of PoCFleets beside an API server without a kubelet and without kwok.

A pod that was created gets a Kubernetes node, and becomes ready at an address of its own. One that was deleted ends
with its grace period. What runs in it is the simulated kubelet's.

Pods that end at once would hold up later evictions. A budget remembers the names of evicted pods until its controller
has seen them end. One that sees only the next pod of the name counts it as away, for two minutes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from time import monotonic
from typing import Any

from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from tests.support.servers.api_server import ApiServer

PODS = "/api/v1/namespaces/default/pods"
NODE = "simulated"
FLEETS = "/apis/poc.gonka.ai/v1alpha1/namespaces/default/pocfleets"
PAUSE_SECONDS = 0.1

Body = dict[str, Any]


def pods_of(api: ApiServer, fleet: str) -> list[Body]:
    """Return the pods of a fleet."""
    found: list[Body] = api.request("GET", PODS, labelSelector=f"{FLEET_LABEL}={fleet}")[1]["items"]
    return found


def is_ready(pod: Body) -> bool:
    """Whether the API server says that a pod is ready."""
    return any(one["type"] == "Ready" for one in pod.get("status", {}).get("conditions", []))


@asynccontextmanager
async def becoming_ready(api: ApiServer, fleet: str) -> AsyncIterator[None]:
    """Let each pod of a fleet become ready soon after it was created, and end once deleted, until the block ends."""
    addresses = (f"127.2.{number // 250}.{number % 250 + 1}" for number in count())
    ending: dict[str, float] = {}  # since when pods are on their way out, by uid

    async def run() -> None:
        while True:
            for pod in await asyncio.to_thread(pods_of, api, fleet):
                if "deletionTimestamp" in pod["metadata"]:
                    await asyncio.to_thread(_end, api, pod, ending)
                elif not is_ready(pod):
                    await asyncio.to_thread(_become_ready, api, pod, next(addresses))
            await asyncio.sleep(PAUSE_SECONDS)

    async with _running(run()):
        yield


def _end(api: ApiServer, pod: Body, ending: dict[str, float]) -> None:
    """End a pod whose grace period is over."""
    metadata = pod["metadata"]
    since = ending.setdefault(metadata["uid"], monotonic())
    if monotonic() - since >= metadata["deletionGracePeriodSeconds"]:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        api.request("DELETE", f"{PODS}/{metadata['name']}", options)


def _become_ready(api: ApiServer, pod: Body, address: str) -> None:
    name = pod["metadata"]["name"]
    # The API server lets a pod without a Kubernetes node end at once.
    api.request("POST", f"{PODS}/{name}/binding", {"metadata": {"name": name}, "target": {"name": NODE}})
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    container: Body = {"name": "vllm", "ready": True, "started": True, "restartCount": 0, "image": "a", "imageID": "b"}
    container |= {"containerID": f"simulated://{pod['metadata']['uid']}", "state": {"running": {"startedAt": now}}}
    status = {
        "phase": "Running",
        "startTime": now,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
        "containerStatuses": [container],
    }
    api.request("PATCH", f"{PODS}/{name}/status", {"status": status})


@asynccontextmanager
async def _running(work: Any) -> AsyncIterator[None]:  # noqa: ANN401 - a coroutine
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
