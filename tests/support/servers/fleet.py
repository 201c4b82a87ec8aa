# SPDX-License-Identifier: Apache-2.0
"""An operator's loop and the pods it drives over HTTP. Only the API server and the engine are fakes, so that they
can be made to fail at an exact moment."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any, cast

from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.kube.rounds import RoundStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.logs import RoundRef
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache
from poc_operator.controller.reconciler import Reconciler
from poc_operator.model.checks import Proof
from poc_operator.model.round import Round
from poc_operator.model.status import RoundStatus
from poc_operator.rounds.snapshot import RoundEvent
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import Pod, running_pod
from tests.unit.poc_operator.build import UID, a_pod, a_round

AsgiApp = Callable[..., Awaitable[None]]


class MemoryStore:
    """One round in memory; ``fault`` is raised by the next write, before or after it took effect."""

    def __init__(self, round_: Round) -> None:
        self.round: Round | None = round_
        self.fault: Exception | None = None
        self.fault_after_write = False

    async def get(self, namespace: str, name: str) -> Round | None:
        """Return the round."""
        return self.round

    async def write_status(self, round_: Round, status: RoundStatus) -> None:
        """Store the status."""
        fault, self.fault = self.fault, None
        if fault is None or self.fault_after_write:
            self.round = round_.model_copy(update={"status": status})
        if fault is not None:
            raise fault

    async def proofs(self, round_: Round) -> Sequence[Proof] | str:
        """Return the proofs that stand in the round."""
        return (round_.spec.proofs.inline if round_.spec.proofs else None) or ()

    async def delete(self, round_: Round) -> None:
        """Forget the round."""
        self.round = None


class Fleet:
    """Two pods, a receiver, an operator; pods can be restarted, the operator replaced."""

    def __init__(
        self,
        stack: AsyncExitStack,
        receiver: CallbackReceiver,
        client: PodClient,
        *,
        gateway: GatewayClient | None = None,
        **spec: Any,  # noqa: ANN401
    ) -> None:
        self.spec = spec
        self._stack = stack
        self._client = client
        self._gateway = gateway
        self._servers: dict[str, AsyncExitStack] = {}
        self._pods = PodCache(time.monotonic)
        self.port = free_port()
        self.receiver = receiver
        self.events: list[RoundEvent] = []
        self.store = MemoryStore(self._round())
        self.metrics = Metrics()
        self.operator = self.new_operator()

    def _round(self) -> Round:
        fields: dict[str, Any] = {
            "rTarget": None,
            "artifact": {"kDim": 4},
            "model": {"name": "tiny", "seqLen": 64},
            "stop": {"afterNonces": 400},
            "batchSize": 8,
            "port": self.port,
            "callbackURL": self.receiver.url,
            "startDeadlineSeconds": 10**9,  # the builder's round was created long ago
        }
        return a_round(**fields | self.spec)

    def new_operator(self) -> Reconciler:
        """Return an operator that knows nothing but the stored round."""
        store = cast(RoundStore, self.store)
        return Reconciler(
            RoundRef("ns", "r", UID),
            store=store,
            client=self._client,
            pods=self._pods,
            metrics=self.metrics,
            emit=self.events.append,
            gateway=self._gateway,
        )

    async def start_pod(self, host: str, face: Callable[[AsgiApp], AsgiApp] = lambda app: app) -> Pod:
        """Start a pod, or restart it: a new process, a new session. ``face`` wraps what it serves."""
        if host in self._servers:
            await self._servers[host].aclose()
        servers = self._servers[host] = await self._stack.enter_async_context(AsyncExitStack())
        pod = await servers.enter_async_context(running_pod())
        await servers.enter_async_context(serve(face(pod.app), host, self.port))
        self._pods.put(a_pod(f"pod-{host}", ip=host))
        return pod

    def suspend(self, suspend: bool) -> None:
        """Set ``spec.suspend``."""
        assert self.store.round is not None
        spec = self.store.round.spec.model_copy(update={"suspend": suspend})
        self.store.round = self.store.round.model_copy(update={"spec": spec})

    async def reconcile_until(self, reached: Callable[[RoundStatus], bool], seconds: float = 60) -> RoundStatus:
        """Tick until the stored status is as wanted."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            assert self.store.round is not None
            if reached(self.store.round.status):
                return self.store.round.status
            await self.operator.reconcile()
            # Actions run beside the loop.
            await asyncio.sleep(0.01)
        raise AssertionError(f"not reached: {self.store.round}")
