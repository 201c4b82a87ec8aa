# SPDX-License-Identifier: Apache-2.0
"""An operator's loop and the pods it drives over HTTP. Only the API server and the engine are fakes, so that they
can be made to fail at an exact moment."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Generic, TypeVar, cast

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import WorkStatus
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.kinds import CalibrationPlanner, Planner, RoundPlanner, Sources, ValidationPlanner
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache, PodPoller
from poc_operator.controller.reconciler import Reconciler
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import Work, WorkEvent
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.without_pods import WithoutPods
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import Pod, running_pod
from tests.unit.poc_operator.build import UID, a_calibration, a_pod, a_round, a_validation, newborn
from vllm_poc.server.clock import SYSTEM_CLOCK

WorkT = TypeVar("WorkT", bound=Work)
AsgiApp = Callable[..., Awaitable[None]]


class MemoryStore(WithoutPods, Generic[WorkT]):
    """One object in memory; ``fault`` is raised by the next write, before or after it took effect.

    ``entry`` is what the entry of every ConfigMap has, ``secret`` what every Secret has, or why it cannot be read.
    """

    def __init__(self, work: WorkT) -> None:
        self.work: WorkT | None = work
        self.fault: Exception | None = None
        self.fault_after_write = False
        self.entry: str | None = None
        self.secret: BasicAuth | Exception = LookupError()

    async def get(self, resource: type, namespace: str, name: str) -> WorkT | None:
        """Return the object."""
        return self.work

    async def write_status(self, work: WorkT, status: WorkStatus) -> None:
        """Store the status, as the API server would."""
        fault, self.fault = self.fault, None
        if fault is None or self.fault_after_write:
            stored: Any = work.model_copy(update={"status": type(status).model_validate(status.stored())})
            self.work = stored
        if fault is not None:
            raise fault

    async def list_bodies(self, resource: type, namespaces: object) -> list[Mapping[str, Any]]:
        """Return the object as the API server has it, if there is one."""
        if self.work is None:
            return []
        told: dict[str, Any] = self.work.model_dump(mode="json", by_alias=True, exclude_none=True)
        return [{**told, "status": self.work.status.stored()}]

    async def unserved(self, resources: object) -> list[str]:
        """Serve all kinds."""
        return []

    async def namespace_uid(self, name: str) -> str:
        """Return the UID of a namespace."""
        return f"uid-of-{name}"

    async def config_map_entry(self, namespace: str, name: str, key: str) -> tuple[str, str | None]:
        """Return the ConfigMap's version, another one for each content, and the entry."""
        return str(hash(self.entry)), self.entry

    async def basic_auth(self, namespace: str, name: str) -> BasicAuth:
        """Return the user and the password."""
        if isinstance(self.secret, Exception):
            raise self.secret
        return self.secret

    async def delete(self, work: WorkT) -> None:
        """Forget the object."""
        self.work = None

    async def close(self) -> None:
        """Have nothing open."""


class Fleet(Generic[WorkT]):
    """Two pods, a receiver, an operator; pods can be restarted, the operator replaced. ``work`` is what they do."""

    def __init__(
        self,
        stack: AsyncExitStack,
        receiver: CallbackReceiver,
        client: PodClient,
        *,
        kind: type[Planner[WorkT]],
        make: Callable[[int, str], WorkT],
        gateway: GatewayClient | None = None,
    ) -> None:
        """``make`` is given the port of the pods' server and the receiver's address."""
        self._stack = stack
        self._client = client
        self._kind = kind
        self.collector = gateway
        self._servers: dict[str, AsyncExitStack] = {}
        self._pods = PodCache(time.monotonic)
        self.clock = SYSTEM_CLOCK  # of the pods
        self.port = free_port()
        self.receiver = receiver
        self.events: list[WorkEvent] = []
        self.store = MemoryStore(make(self.port, receiver.url))
        self.metrics = Metrics()
        self.operator = self.new_operator()

    def new_operator(self) -> Reconciler[WorkT]:
        """Return an operator that knows nothing but the stored object."""
        return Reconciler(
            self._kind,
            ObjectRef("ns", "r", UID),
            sources=Sources(store=cast(ObjectStore, self.store), gateway=self.collector),
            clients=self._client,
            poller=PodPoller(self._client, time.monotonic),
            pods=self._pods,
            metrics=self.metrics,
            emit=self.events.append,
        )

    async def start_pod(self, host: str, face: Callable[[AsgiApp], AsgiApp] = lambda app: app) -> Pod:
        """Start a pod, or restart it: a new process, a new session. ``face`` wraps what it serves."""
        if host in self._servers:
            await self._servers[host].aclose()
        servers = self._servers[host] = await self._stack.enter_async_context(AsyncExitStack())
        pod = await servers.enter_async_context(running_pod(self.clock))
        await servers.enter_async_context(serve(face(pod.app), host, self.port))
        self.see(a_pod(f"pod-{host}", ip=host))
        return pod

    def see(self, pod: PodView) -> None:
        """Let the watch tell of a pod."""
        self._pods.put(pod)

    def change(self, **fields: object) -> None:
        """Change the spec."""
        assert self.store.work is not None
        changed: Any = self.store.work.model_copy(update={"spec": self.store.work.spec.model_copy(update=fields)})
        self.store.work = changed

    def suspend(self, suspend: bool) -> None:
        """Set ``spec.suspend``."""
        self.change(suspend=suspend)

    def delete(self) -> None:
        """Mark the object as deleted; its finalizer holds it."""
        assert self.store.work is not None
        metadata = self.store.work.metadata
        deleted = {"deletion_timestamp": datetime.now(UTC), "generation": metadata.generation + 1}
        changed: Any = self.store.work.model_copy(update={"metadata": metadata.model_copy(update=deleted)})
        self.store.work = changed

    async def reconcile_to_release(self, seconds: float = 60) -> None:
        """Reconcile the deleted object until nothing holds it."""
        deadline = monotonic() + seconds
        while await self.operator.reconcile():
            assert monotonic() < deadline, self.store.work
            await asyncio.sleep(0.01)

    async def reconcile_until(self, reached: Callable[[Any], bool], seconds: float = 60) -> Any:  # noqa: ANN401
        """Reconcile until the stored status is as wanted, and return it: it is of the object's kind."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            assert self.store.work is not None
            if reached(self.store.work.status):
                return self.store.work.status
            await self.operator.reconcile()
            # Actions run beside the loop.
            await asyncio.sleep(0.01)
        raise AssertionError(f"not reached: {self.store.work}")


class RoundFleet(Fleet[PoCRound]):
    """A fleet for a round of small artifacts that stops after 400 nonces, changed by ``spec`` (camelCase)."""

    def __init__(
        self,
        stack: AsyncExitStack,
        receiver: CallbackReceiver,
        client: PodClient,
        *,
        gateway: GatewayClient | None = None,
        **spec: Any,  # noqa: ANN401
    ) -> None:
        def make(port: int, callback_url: str) -> PoCRound:
            fields = {"rTarget": None, "callbackURL": callback_url, "stop": {"afterNonces": 400}}
            return newborn(a_round(**small(port) | fields | spec))

        super().__init__(stack, receiver, client, kind=RoundPlanner, make=make, gateway=gateway)


class ValidationFleet(Fleet[PoCValidation]):
    """A fleet for a validation of small artifacts, changed by ``spec`` (camelCase)."""

    def __init__(
        self,
        stack: AsyncExitStack,
        receiver: CallbackReceiver,
        client: PodClient,
        *,
        gateway: GatewayClient | None = None,
        **spec: Any,  # noqa: ANN401
    ) -> None:
        def make(port: int, _: str) -> PoCValidation:
            return newborn(a_validation(**small(port) | spec))

        super().__init__(stack, receiver, client, kind=ValidationPlanner, make=make, gateway=gateway)


class CalibrationFleet(Fleet[PoCCalibration]):
    """A fleet for a calibration, changed by ``spec`` (camelCase)."""

    def __init__(self, stack: AsyncExitStack, receiver: CallbackReceiver, client: PodClient, **spec: Any) -> None:  # noqa: ANN401
        def make(port: int, _: str) -> PoCCalibration:
            fields = small(port)
            del fields["artifact"]
            return newborn(a_calibration(**fields | spec))

        super().__init__(stack, receiver, client, kind=CalibrationPlanner, make=make)


def small(port: int) -> dict[str, Any]:
    """The part of a spec (camelCase) that says what the fake pods serve."""
    return {
        "artifact": {"kDim": 4},
        "model": {"name": "tiny", "seqLen": 64},
        "batchSize": 8,
        "port": port,
    }
