# SPDX-License-Identifier: Apache-2.0
"""The network's calls, put together from rounds, pods and jobs."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from poc_gateway.errors import Refusal
from poc_gateway.network import views
from poc_gateway.network.access import check_receiver
from poc_gateway.network.cluster import Backend, Backends, Cluster
from poc_gateway.network.jobs import Jobs
from poc_gateway.network.messages import (
    FIRST_PORT,
    BackendFailure,
    FanOut,
    NetworkGenerate,
    NetworkInit,
    NodeState,
    PodCommand,
    UpRequest,
)
from poc_gateway.network.rounds import NetworkRounds
from poc_gateway.network.template import RoundTemplate
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_operator.clients.pods.client import PodClient
from poc_operator.model import names
from poc_operator.model.round import Round
from poc_operator.observed.pods import PodView
from vllm_poc.wire.messages import PowState


class Network:
    """What stands behind the network's routes; its jobs run between `start` and `close`."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        template: RoundTemplate,
        client: PodClient,
        database: Database,
        settings: Settings,
    ) -> None:
        self.backends = Backends(cluster, template, client)
        self.rounds = NetworkRounds(cluster, template)
        self.jobs = Jobs(database, self.backends, settings)
        self._template = template
        self._settings = settings

    async def start(self) -> None:
        """Take up the jobs of an earlier process."""
        await self.jobs.start()

    async def close(self) -> None:
        """End the jobs' work."""
        await self.jobs.close()

    async def init_generate(self, request: NetworkInit) -> tuple[Round, list[PodView]]:
        """Create the round; return it and the pods that are ready for it."""
        check_receiver(request, self._settings)
        found = await self.backends.poll()
        round_ = await self.rounds.start(request, self._model(request, found))
        return round_, [one.pod for one in found]

    async def stop(self) -> tuple[str | None, list[PodView]]:
        """End the round; return what is left to be done, if anything, and the ready pods."""
        left = await self.rounds.stop()
        pods = await self.backends.ready()
        return (views.unstopped(left[0]) if left else None), pods

    async def look(self) -> tuple[Round | None, list[PodView]]:
        """Return the active round and the ready pods."""
        return await self.rounds.active(), await self.backends.ready()

    async def state(self) -> NodeState:
        """Return the node's state."""
        found = await self.backends.poll()
        models = _models(found)
        return NodeState(
            **views.service_state(await self.rounds.active(), found),
            version=names.VERSION,
            loaded_model=self._name(models) if models else None,
        )

    async def up(self, request: UpRequest) -> None:
        """Refuse with 409 a model that this cluster does not serve; 503 while no pod can tell."""
        models = _models(await self.backends.poll())
        if not models:
            detail = f"model: no pod has told what it serves, so {request.model} may be on its way: try again"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NoBackends", detail, headers={"Retry-After": "10"})
        if request.model not in models:
            detail = f"model: this cluster serves {', '.join(models)}; another is set in its chart, not by request"
            raise Refusal(HTTPStatus.CONFLICT, "ModelMismatch", detail)

    def check(self, request: NetworkGenerate) -> NetworkGenerate:
        """Refuse named nonces whose result could not be delivered."""
        check_receiver(request, self._settings)
        return request

    def _model(self, request: NetworkInit, found: Sequence[Backend]) -> str:
        """Return the model's name; a distance request has none, so it is the template's, or what the pods serve."""
        models = _models(found)
        if request.params is None:
            if (name := self._name(models)) is not None:
                return name
            detail = "no pod tells its model's name: set spec.model.name in the round template, or wait for a pod"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NoBackends", detail, headers={"Retry-After": "10"})
        if models and request.params.model not in models:
            detail = f"params.model: {request.params.model} was requested, but this cluster serves {', '.join(models)}"
            raise Refusal(HTTPStatus.CONFLICT, "ModelMismatch", detail)
        return request.params.model

    def _name(self, models: Sequence[str]) -> str | None:
        """Return the one of the model's names that clients know: the template's, else one that is no path."""
        told = (self._template.spec.get("model") or {}).get("name")
        served = sorted(models, key=lambda name: name.startswith("/"))
        return str(told) if told else next(iter(served), None)


def _models(found: Sequence[Backend]) -> list[str]:
    return list(dict.fromkeys(name for one in found for name in one.models))


def fan_out(pods: Sequence[PodView], **fields: Any) -> FanOut:  # noqa: ANN401 - fields of FanOut
    """Return the node's answer to a call that changed the state of these pods."""
    return FanOut(results=views.backends(pods, "OK"), **fields)


def stopped(left: str | None, pods: Sequence[PodView]) -> FanOut:
    """Return the node's answer to a stop; what is left to be done is an error of the first pod."""
    errors = [BackendFailure(port=FIRST_PORT, error=left)] if left else []
    return fan_out(pods, errors=errors, detail=left)


def pod_command(state: PowState, detail: str | None) -> PodCommand:
    """Return a pod's answer to a call that changed its state."""
    return PodCommand(pow_status={"status": state}, detail=detail)
