# SPDX-License-Identifier: Apache-2.0
"""The network's routes over a real database and real pods; only the API server is a stand-in in memory."""

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvicorn
from pydantic import ValidationError

from poc_gateway.node_api.job_store import fail_foreign_jobs
from poc_gateway.node_api.ml_nodes import MlNode
from poc_gateway.node_api.service import NodeApi
from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.process import Components, network_app
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, LabelSelector
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RoundStatus, Totals
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.clients.errors import ObjectInvalid, StaleObject, StoreError, UnreadableObject
from poc_operator.clients.pods.client import PodClient
from poc_operator.observed import Container, PodView
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import Pod, running_pod

LABELS = {"poc.gonka.ai/worker": "true"}
#: The fleet of every pod that is announced, and the template of an ML node that names it.
FLEET = "h200"
OF_FLEET: dict[str, Any] = {"namespace": "ns", "spec": {"fleetRef": {"name": FLEET}}}


def _invalid(error: ValidationError) -> ObjectInvalid:
    """Return what the API server would say, whose CRD has the same rules."""
    causes = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
    return ObjectInvalid("; ".join(f"{path}: {message}" for path, message in causes), causes)


class MemoryCluster:
    """Rounds and pods in memory, and what an operator would do about the rounds. ``fault`` is raised by every call,
    ``refusal`` by `create`."""

    def __init__(self) -> None:
        self.rounds: dict[str, PoCRound] = {}
        self.specs: list[dict[str, Any]] = []
        self.pods: list[PodView] = []
        self.fault: StoreError | UnreadableObject | None = None
        self.refusal: ObjectInvalid | None = None
        self.operator_runs = True
        self._uids = itertools.count(1)

    async def list_rounds(self) -> list[PoCRound]:
        self._fail()
        return list(self.rounds.values())

    async def create(self, name: str, spec: Mapping[str, Any]) -> PoCRound:
        self._fail()
        if self.refusal is not None:
            raise self.refusal
        if name in self.rounds:
            raise StaleObject("AlreadyExists")
        metadata = {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{next(self._uids)}",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": datetime.now(UTC),
        }
        try:
            made = PoCRound.parse({"metadata": metadata, "spec": dict(spec)})
        except ValidationError as error:
            raise _invalid(error) from error
        self.specs.append(dict(spec))
        self.rounds[name] = made
        if self.operator_runs:
            self.run(name, len(self.pods))
        return made

    async def finish(self, name: str) -> None:
        self._fail()
        found = self.rounds[name]
        metadata = found.metadata.model_copy(update={"generation": 2})
        spec = found.spec.model_copy(update={"finish": True})
        self.rounds[name] = found.model_copy(update={"metadata": metadata, "spec": spec})
        if self.operator_runs:
            self.set_status(name, state=State.COMPLETE, observed_generation=2)

    async def list_pods(self, selector: LabelSelector) -> list[PodView]:
        self._fail()
        return [pod for pod in self.pods if selector.matches(pod.labels)]

    def run(self, name: str, running: int) -> None:
        """Let the first pods compute the round, and the others wait."""
        slots = [
            Assignment(
                node=self.rounds[name].spec.nodes.first,
                group=place,
                uid=pod.uid,
                pod=pod.name,
                state=SlotState.RUNNING if place < running else SlotState.WAITING,
            )
            for place, pod in enumerate(self.pods)
        ]
        totals = Totals(checked=640, valid=600, rate="12.5")
        fields = {"assignments": slots, "slots": len(slots), "groups": len(slots), "totals": totals}
        self.set_status(name, state=State.RUNNING, observed_generation=1, start_time=datetime.now(UTC), **fields)

    def set_status(self, name: str, **fields: Any) -> None:  # noqa: ANN401
        """Change the status of a round."""
        found = self.rounds[name]
        self.rounds[name] = found.model_copy(update={"status": found.status.model_copy(update=fields)})

    def age(self, name: str, created: datetime) -> None:
        """Let a round be as old as that, and unseen by any operator."""
        found = self.rounds[name]
        metadata = found.metadata.model_copy(update={"creation_timestamp": created})
        self.rounds[name] = found.model_copy(update={"metadata": metadata, "status": RoundStatus()})

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault


class World:
    """A gateway, its database, its cluster's pods."""

    def __init__(
        self, stack: AsyncExitStack, folder: Path, settings: Mapping[str, str], one: Mapping[str, Any]
    ) -> None:
        self.clusters: dict[str, MemoryCluster] = {}
        self.ml_nodes: list[MlNode] = []
        self.pods: dict[str, Pod] = {}
        self.port = free_port()
        self.ml_node = self.add_ml_node("one", **one)
        self.cluster = self.clusters["one"]
        self.settings = Settings.from_environment(settings)
        self._file = folder / "gateway.db"
        self._stack = stack
        self._servers: list[uvicorn.Server] = []

    def add_ml_node(self, name: str, **fields: Any) -> MlNode:  # noqa: ANN401
        """Add an ML node with a cluster of its own, before `open`."""
        spec = {"selector": {"matchLabels": LABELS}, "port": self.port, "retry": {"backoffLimit": 5}}
        entry = {"name": name, "template": {"namespace": "ns", "spec": spec}, **fields}
        self.ml_nodes.append(MlNode.model_validate(entry))
        self.clusters[name] = MemoryCluster()
        return self.ml_nodes[-1]

    async def open(self) -> None:
        """Start a gateway process."""
        if not self._file.exists():
            self._file.write_bytes(_new_database())
        self.database = Database.open(f"sqlite:///{self._file}")
        self.client = PodClient()
        self.services = {
            one.name: NodeApi(
                cluster=self.clusters[one.name],
                ml_node=one,
                client=self.client,
                database=self.database,
                settings=self.settings,
                first=one is self.ml_nodes[0],
            )
            for one in self.ml_nodes
        }
        names = list(self.services)
        await self.database.write(lambda connection: fail_foreign_jobs(connection, names))
        for service in self.services.values():
            await service.start()
        self.app = network_app(
            Components(
                settings=self.settings,
                database=self.database,
                rounds=Rounds(self.database, _no_round),
                outbox=Outbox(self.database, self.settings),
                ml_nodes=list(self.services.values()),
            )
        )
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30)

    @property
    def service(self) -> NodeApi:
        """The ML node ``one``."""
        return self.services["one"]

    async def close(self) -> None:
        """End the gateway process."""
        await self.http.aclose()
        for service in self.services.values():
            await service.close()
        await self.client.close()
        self.database.close()

    def stop_pods(self) -> None:
        """Let the servers of all pods end at a time; each takes a fifth of a second."""
        for server in self._servers:
            server.should_exit = True

    async def add_pod(self, host: str, ml_node: str = "one") -> Pod:
        """Start a pod and let the API server tell of it."""
        pod = await self._stack.enter_async_context(running_pod())
        self._servers.append(await self._stack.enter_async_context(serve(pod.app, host, self.port)))
        self.pods[host] = pod
        self.announce(host, ml_node)
        return pod

    def announce(
        self, host: str, ml_node: str = "one", *, ready: bool = True, fleet: str = FLEET, port: int | None = None
    ) -> None:
        """Let the API server tell of a ready pod, whether it is there or not."""
        labels = {**LABELS, FLEET_LABEL: fleet}
        server = Container(id=host, http_port=port or self.port)
        view = PodView(
            name=f"pod-{host}", namespace="ns", uid=host, labels=labels, ip=host, ready=ready, containers=(server,)
        )
        self.clusters[ml_node].pods.append(view)

    async def post(self, path: str, body: object = None) -> httpx.Response:
        return await self.http.post(f"/api/v1/{path}", json=body)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(f"/api/v1/{path}")

    def rows(self, statement: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """Read from the database."""
        with self.database.engine.connect() as connection:
            return [dict(row) for row in connection.execute(statement).mappings()]


@cache
def _new_database() -> bytes:
    """The file of an empty database with the newest schema, which spares most worlds the migrations."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "gateway.db"
        Database.open(f"sqlite:///{file}").close()
        return file.read_bytes()


async def _no_round(_: str, __: str) -> None:
    return None


@asynccontextmanager
async def running_world(
    folder: Path,
    *,
    pods: int,
    one: Mapping[str, Any] | None = None,
    also: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,  # noqa: ANN401
) -> AsyncIterator[World]:
    """Run a gateway in front of some pods of the ML node ``one``, with these fields; ``also`` are more ML nodes."""
    async with AsyncExitStack() as stack:
        world = World(stack, folder, settings, one or {})
        for name, fields in (also or {}).items():
            world.add_ml_node(name, **fields)
        for number in range(1, pods + 1):
            await world.add_pod(f"127.0.0.{number}")
        await world.open()
        try:
            yield world
        finally:
            await world.close()
            world.stop_pods()
