# SPDX-License-Identifier: Apache-2.0
"""A whole ML node in this process: the gateway with its database, the operator's loops, and pods over HTTP.

Only the API server is a stand-in in memory, and the engines are fakes. All times are those of production.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
from sqlalchemy import select
from starlette.types import Receive, Scope, Send

from poc_gateway.node_api.ml_nodes import MlNode
from poc_gateway.node_api.service import NodeApi
from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.process import Components, inside_app, network_app
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import WorkStatus
from poc_operator.clients.errors import StaleObject
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.kinds import RoundPlanner
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.manager import Manager
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import Work, WorkEvent
from tests.support.servers.fleet import AsgiApp
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import Pod, running_pod

LABELS = {"poc.gonka.ai/worker": "true"}


class ApiServer:
    """Rounds and pods in memory, for the gateway and the operator."""

    def __init__(self) -> None:
        self.rounds: dict[str, PoCRound] = {}
        self.pods: list[PodView] = []
        self.manager: Manager
        self.events: list[WorkEvent] = []
        self._versions = itertools.count(1)

    async def list_rounds(self) -> list[PoCRound]:
        """Return all rounds."""
        return list(self.rounds.values())

    async def list_pods(self, *of: Any) -> list[PodView]:  # noqa: ANN401
        """Return the pods that are selected. The operator names their namespace before the selector."""
        selector: LabelSelector = of[-1]
        return [pod for pod in self.pods if selector.matches(pod.labels)]

    async def create(self, name: str, spec: Mapping[str, Any]) -> PoCRound:
        """Create a round, and begin to reconcile it."""
        metadata = {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "generation": 1,
            "resourceVersion": str(next(self._versions)),
            "creationTimestamp": datetime.now(UTC),
        }
        made = self.rounds[name] = PoCRound.parse({"metadata": metadata, "spec": dict(spec)})
        self._tell(name)
        return made

    async def finish(self, name: str) -> None:
        """Set ``spec.finish``, and tell the operator."""
        found = self.rounds[name]
        generation = found.metadata.generation + 1
        spec = found.spec.model_copy(update={"finish": True})
        self._put(name, spec=spec, generation=generation)
        self._tell(name)

    async def get(self, _: type, namespace: str, name: str) -> PoCRound | None:
        """Return a round."""
        assert namespace == "ns"
        return self.rounds.get(name)

    async def read(self, namespace: str, name: str) -> PoCRound | None:
        """Return a round, as the gateway asks for it."""
        return await self.get(PoCRound, namespace, name)

    async def write_status(self, work: Work, status: WorkStatus) -> None:
        """Replace a round's status; StaleObject if the round changed meanwhile."""
        name = work.metadata.name
        if self.rounds[name].metadata.resource_version != work.metadata.resource_version:
            raise StaleObject(name)
        self._put(name, status=type(status).model_validate(status.stored()))

    async def close(self) -> None:
        """Have nothing open."""

    def _tell(self, name: str) -> None:
        """Let the watch tell of a round."""
        body = self.rounds[name].model_dump(mode="json", by_alias=True, exclude_none=True)
        self.manager.work_changed(RoundPlanner, body, self.events.append)

    def _put(self, name: str, *, generation: int | None = None, **fields: object) -> None:
        found = self.rounds[name]
        changed: dict[str, object] = {"resource_version": str(next(self._versions))}
        if generation is not None:
            changed["generation"] = generation
        metadata = found.metadata.model_copy(update=changed)
        self.rounds[name] = found.model_copy(update={"metadata": metadata, **fields})


class WholeMlNode:
    """What tests do with it."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.api = ApiServer()
        self.pods: dict[str, Pod] = {}
        #: Hosts of pods that take requests, and answer none from now on.
        self.hung = set[str]()
        self.http: httpx.AsyncClient
        self._stack = stack
        self._folder = folder
        self._port = free_port()

    async def open(self, pods: int) -> None:
        """Start everything."""
        stack, inside = self._stack, free_port()
        url = f"http://127.0.0.1:{inside}"
        client = await stack.enter_async_context(PodClient())
        collector = await stack.enter_async_context(GatewayClient(url))
        lease = cast(LeaderElection, SimpleNamespace(held=True, close=AsyncMock()))
        self.api.manager = Manager(cast(ObjectStore, self.api), lease, client, collector)
        stack.push_async_callback(self.api.manager.close)
        for number in range(1, pods + 1):
            await self._add_pod(f"127.0.0.{number}")
        parts = await self._components(client)
        await stack.enter_async_context(serve(inside_app(parts), "127.0.0.1", inside))
        self.app = network_app(parts)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://node", timeout=60)
        stack.push_async_callback(self.http.aclose)

    async def post(self, path: str, body: object = None) -> httpx.Response:
        """POST to one of the network's routes."""
        return await self.http.post(f"/api/v1/inference/pow/{path}", json=body)

    async def stored(self, height: int) -> set[int]:
        """Return the nonces that the gateway has of the round at this height."""
        tables = schema.artifacts.join(schema.slots).join(schema.rounds, schema.rounds.c.id == schema.slots.c.round_id)
        of_height = select(schema.artifacts.c.nonce).select_from(tables).where(schema.rounds.c.block_height == height)
        return set(await self._database.read(lambda connection: connection.scalars(of_height).all()))

    async def _add_pod(self, host: str) -> None:
        pod = self.pods[host] = await self._stack.enter_async_context(running_pod())
        pod.engine.seconds_per_batch = 0.02
        await self._stack.enter_async_context(serve(self._hanging(pod.app, host), host, self._port))
        view = PodView(name=f"pod-{host}", namespace="ns", uid=host, labels=LABELS, ip=host, ready=True)
        self.api.pods.append(view)
        self.api.manager.pod_changed(view)

    def _hanging(self, app: AsgiApp, host: str) -> AsgiApp:
        async def served(scope: Scope, receive: Receive, send: Send) -> None:
            if host in self.hung:
                await asyncio.Event().wait()
            await app(scope, receive, send)

        return served

    async def _components(self, client: PodClient) -> Components:
        settings = Settings.from_environment({"POC_GATEWAY_RECEIVER_PRIVATE": "127.0.0.0/8"})
        database = self._database = Database.open(f"sqlite:///{self._folder}/gateway.db")
        self._stack.push_async_callback(asyncio.to_thread, database.close)
        spec = {"selector": {"matchLabels": LABELS}, "port": self._port}
        ml_node = MlNode.model_validate({"name": "one", "template": {"namespace": "ns", "spec": spec}})
        node = NodeApi(cluster=self.api, ml_node=ml_node, client=client, database=database, settings=settings)
        await node.start()
        self._stack.push_async_callback(node.close)
        outbox = Outbox(database, settings)
        forwarding = asyncio.create_task(outbox.run())
        self._stack.push_async_callback(_ended, forwarding)
        rounds = Rounds(database, self.api.read)
        return Components(settings=settings, database=database, rounds=rounds, outbox=outbox, ml_nodes=[node])


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def whole_ml_node(folder: Path, *, pods: int) -> AsyncIterator[WholeMlNode]:
    """Run an ML node with so many pods."""
    async with AsyncExitStack() as stack:
        node = WholeMlNode(stack, folder)
        await node.open(pods)
        yield node
