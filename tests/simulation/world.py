# SPDX-License-Identifier: Apache-2.0
"""A simulation from the cluster to the operator, with everything removed at the end."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any
from uuid import uuid4

from kubernetes.aio import client, config

from hack.cluster.kwok import kwok
from hack.cluster.layout import admin_kubeconfig
from hack.cluster.up import kubectl, up
from hack.images.site import ROOT
from hack.toolchain.common import UserError, exclusive
from tests.simulation import manifests
from tests.simulation.api_server import ApiServer
from tests.simulation.gateway import Gateway
from tests.simulation.kubelet import Kubelet
from tests.simulation.operator_process import OperatorProcess
from tests.simulation.receiver import CountingReceiver
from tests.simulation.rounds import Rounds
from tests.simulation.server import FleetServer
from tests.simulation.session import PodServer, Session

READY_SECONDS = 120.0
#: Seconds more for each pod: the cluster's controllers make a hundred pods a second at most, fewer beside other work.
SECONDS_PER_POD = 0.2
NODES = ",".join(f"{key}={value}" for key, value in manifests.NODE_LABEL.items())
CRDS = str(ROOT / "crds")
#: Settings of the simulated pods: a slow fake batch is no reason for smaller ones.
POD_SETTINGS = {
    "VLLM_POC_SLICE_SECONDS": "60",
    "VLLM_POC_RETRY_LIMIT_SECONDS": "2",
    # With these a pod offers the decode scheme. The fake engine opens no codebook.
    "VLLM_POC_DECODE_CODEBOOK": "/sphere_codebook.pt",
    "VLLM_POC_DECODE_RESERVE_BYTES": "100000",
}


@dataclass(frozen=True, kw_only=True)
class World:
    """What a test or a benchmark acts upon."""

    core: client.CoreV1Api
    namespace: str
    rounds: Rounds
    server: FleetServer
    kubelet: Kubelet
    receiver: CountingReceiver
    operator: OperatorProcess
    api_server: ApiServer
    gateway: Gateway | None

    async def delete_pod(self, name: str, grace: int = 0) -> None:
        """Delete a pod, which computes on for its grace period; its Deployment makes another one at once."""
        await self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=grace, _request_timeout=5)

    async def relabel_pod(self, name: str, fleet: str) -> None:
        """Change the label by which rounds and Deployments find a pod."""
        labels = {"metadata": {"labels": {manifests.LABEL: fleet}}}
        merge = "application/merge-patch+json"
        await self.core.patch_namespaced_pod(name, self.namespace, labels, _request_timeout=5, _content_type=merge)

    async def lose_node(self, pod: str) -> None:
        """Switch off the node that a pod is on, for good, and take it out of the cluster, as its owner would."""
        pods: Any = await self.core.list_namespaced_pod(self.namespace)
        node = next(found.spec.node_name for found in pods.items if found.metadata.name == pod)
        await self.kubelet.switch_off(found.metadata.uid for found in pods.items if found.spec.node_name == node)
        await self.core.delete_node(node)

    async def wait_for_pods(self, count: int) -> None:
        """Wait until so many pods serve; fails after some minutes."""
        deadline = monotonic() + READY_SECONDS + SECONDS_PER_POD * count
        while len(self.kubelet.pods) != count:
            assert monotonic() < deadline, f"{len(self.kubelet.pods)} of {count} pods serve"
            await asyncio.sleep(0.1)


@asynccontextmanager
async def world(
    fleets: Mapping[str, int],
    *,
    seconds_per_batch: float,
    operator_options: tuple[str, ...] = (),
    nodes: int = 1,
    with_gateway: bool = False,
    pod_server: Callable[[str, float], PodServer] = Session,
) -> AsyncIterator[World]:
    """Bring up the cluster, kwok, nodes, a Deployment of each of ``fleets`` (name, replicas), and prepare an operator.

    Neither the operator nor the gateway, which it uses if there is one, is started. Their logs are kept if the block
    fails.
    """
    os.environ.update(POD_SETTINGS)
    sys.modules["vllm.version"] = ModuleType("vllm.version")  # pods tell it, and it is not installed here
    sys.modules["vllm.version"].__version__ = "0.32.0"  # type: ignore[attr-defined]
    # A fleet of pods logs more than anybody reads.
    for noisy in ("vllm", "httpx"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    await asyncio.to_thread(_cluster_up)
    namespace = f"simulation-{uuid4().hex[:6]}"
    async with AsyncExitStack() as stack:
        stack.enter_context(kwok())
        await config.load_kube_config(str(admin_kubeconfig()))  # type: ignore[no-untyped-call]
        api = await stack.enter_async_context(client.ApiClient())
        core, server, receiver = client.CoreV1Api(api), FleetServer(), CountingReceiver()
        folder = Path(tempfile.mkdtemp(prefix=f"{namespace}-"))
        gateway = Gateway(folder) if with_gateway else None
        made = World(
            core=core,
            namespace=namespace,
            rounds=Rounds(api, namespace),
            server=server,
            kubelet=Kubelet(core, namespace, server, seconds_per_batch, pod_server),
            receiver=receiver,
            operator=OperatorProcess(namespace, folder / "operator.log", *operator_options, gateway=gateway),
            api_server=ApiServer(),
            gateway=gateway,
        )
        await asyncio.to_thread(_create, namespace, fleets, nodes)
        stack.push_async_callback(_remove, made)
        await stack.enter_async_context(receiver.receiving())
        await stack.enter_async_context(server.serving())
        following = asyncio.create_task(made.kubelet.run())
        stack.push_async_callback(_end, made.kubelet, following)
        await made.wait_for_pods(sum(fleets.values()))
        yield made
        shutil.rmtree(folder)


def _cluster_up() -> None:
    with exclusive("cluster"):
        up()


def _create(namespace: str, fleets: Mapping[str, int], nodes: int) -> None:
    if "vllm-poc-operator" in kubectl("get", "deployments", "--all-namespaces", "--output", "name"):
        raise UserError("An operator is installed in the local cluster and would act too: run make demo-down first.")
    kubectl("apply", "--server-side", "--filename", CRDS)
    kubectl("wait", "--for=condition=Established", "--filename", CRDS, "--timeout=30s")
    for number in range(nodes):
        kubectl("apply", "--filename", "-", stdin=json.dumps(manifests.node(number)))
    kubectl("create", "namespace", namespace)
    _take_an_address(namespace)
    deployments = [manifests.deployment(name, replicas) for name, replicas in fleets.items()]
    items = {"apiVersion": "v1", "kind": "List", "items": deployments}
    # A second for each twenty of them, and as long as usual besides.
    kubectl("--namespace", namespace, "apply", "--filename", "-", stdin=json.dumps(items), limit=60 + len(fleets) / 20)


def _take_an_address(namespace: str) -> None:
    """Let kwok give an address to one pod alone: the first two that come at once may get the same."""
    kubectl("--namespace", namespace, "apply", "--filename", "-", stdin=json.dumps(manifests.pod("alone")))
    kubectl("--namespace", namespace, "wait", "pod", "alone", "--for=jsonpath={.status.podIP}", "--timeout=60s")
    kubectl("--namespace", namespace, "delete", "pod", "alone", "--wait")


async def _end(kubelet: Kubelet, following: asyncio.Task[None]) -> None:
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    await kubelet.end()


async def _remove(made: World) -> None:
    await made.rounds.delete_all()
    await asyncio.to_thread(kubectl, "delete", "namespace", made.namespace, "--timeout=120s", limit=130)
    await asyncio.to_thread(kubectl, "delete", "node", "--selector", NODES)
    # Helm takes over no CRDs that it has not made.
    await asyncio.to_thread(kubectl, "delete", "--filename", CRDS, "--timeout=60s")
