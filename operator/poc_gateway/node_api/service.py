# SPDX-License-Identifier: Apache-2.0
"""What stands behind the network's routes: the ready pods, the network's rounds, and the jobs.

How it is told to the network is a matter of the areas: `init_generate`, `generate` and `node`.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from poc_gateway.errors import Refusal, field_refusal
from poc_gateway.node_api.cluster import Cluster, ReadyPod, ReadyPods
from poc_gateway.node_api.jobs import Jobs
from poc_gateway.node_api.messages import NetworkGenerate, NetworkInit
from poc_gateway.node_api.pocrounds import NetworkRounds, RoundTemplate
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.pods.client import PodClient
from poc_operator.observed import PodView
from vllm_poc.wire.messages import CallbackRequest


class NodeApi:
    """The cluster as one ML node; its jobs run between `start` and `close`."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        template: RoundTemplate,
        client: PodClient,
        database: Database,
        settings: Settings,
    ) -> None:
        self.pods = ReadyPods(cluster, client, selector=template.selector, port=template.port)
        self.rounds = NetworkRounds(cluster, template)
        self.jobs = Jobs(database, self.pods, settings)
        self._template = template
        self._settings = settings

    async def start(self) -> None:
        """Take up the jobs of an earlier process."""
        await self.jobs.start()

    async def close(self) -> None:
        """End the jobs' work."""
        await self.jobs.close()

    async def init_generate(self, request: NetworkInit) -> tuple[PoCRound, list[PodView]]:
        """Create the round; return it and the pods that are ready for it."""
        _check_receiver(request, self._settings)
        found = await self.pods.poll()
        round_ = await self.rounds.start(request, self._model(request, found))
        return round_, [one.pod for one in found]

    async def stop(self) -> tuple[PoCRound | None, list[PodView]]:
        """End the round; return it if it has yet to end, and the ready pods."""
        left = await self.rounds.stop()
        return next(iter(left), None), await self.pods.ready()

    async def observe(self) -> tuple[PoCRound | None, list[PodView]]:
        """Return the active round and the ready pods."""
        return await self.rounds.active(), await self.pods.ready()

    def check(self, request: NetworkGenerate) -> NetworkGenerate:
        """Refuse named nonces whose result could not be delivered."""
        _check_receiver(request, self._settings)
        return request

    def model_name(self, served: Sequence[str]) -> str | None:
        """Return the one of the model's names that clients know: the template's, else one that is no path."""
        told = (self._template.spec.get("model") or {}).get("name")
        by_kind = sorted(served, key=lambda name: name.startswith("/"))
        return str(told) if told else next(iter(by_kind), None)

    def _model(self, request: NetworkInit, found: Sequence[ReadyPod]) -> str:
        """Return the model's name; a distance request has none, so it is the template's, or what the pods serve."""
        models = models_of(found)
        if request.params is None:
            if (name := self.model_name(models)) is not None:
                return name
            detail = "no pod tells its model's name: set spec.model.name in the round template, or wait for a pod"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NoBackends", detail, headers={"Retry-After": "10"})
        if models and request.params.model not in models:
            detail = f"params.model: {request.params.model} was requested, but this cluster serves {', '.join(models)}"
            raise Refusal(HTTPStatus.CONFLICT, "ModelMismatch", detail)
        return request.params.model


def models_of(found: Sequence[ReadyPod]) -> list[str]:
    """Return the names of the models that the pods serve, each once."""
    return list(dict.fromkeys(name for one in found for name in one.models))


async def _given(request: Request) -> NodeApi:
    node_api: NodeApi = request.state.node_api
    return node_api


#: What a route asks FastAPI for; `poc_gateway.node_api.routes` puts it there.
Service = Annotated[NodeApi, Depends(_given)]


def _check_receiver(request: CallbackRequest, settings: Settings) -> None:
    """Refuse with 422 a callback that would never be sent: to a host that is not allowed, or with a password."""
    receiver = urlsplit(request.receiver or "")
    field, host = "url" if request.url is not None else "callback_url", receiver.hostname
    if "@" in receiver.netloc:
        raise field_refusal(field, "holds a user or a password, and results are sent without either: take them out")
    if host is not None and not any(fnmatchcase(host, pattern) for pattern in settings.receiver_allow):
        allowed = ", ".join(settings.receiver_allow)
        raise field_refusal(field, f"callbacks to {host} are not allowed; POC_GATEWAY_RECEIVER_ALLOW allows {allowed}")
