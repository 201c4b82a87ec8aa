# SPDX-License-Identifier: Apache-2.0
"""What stands behind the network's routes: the ready pods, the network's rounds, and the jobs.

How it is told to the network is a matter of the areas: `init_generate`, `generate` and `node`.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

from poc_gateway import __version__
from poc_gateway.errors import Refusal, field_refusal
from poc_gateway.node_api.callback_relay import CallbackRelay
from poc_gateway.node_api.chat import ChatProxy
from poc_gateway.node_api.cluster import Cluster, ReadyPod, ReadyPods
from poc_gateway.node_api.create_pocround import NetworkRounds
from poc_gateway.node_api.job_results import stat_test_of
from poc_gateway.node_api.job_store import fail_foreign_jobs
from poc_gateway.node_api.jobs import Jobs
from poc_gateway.node_api.messages import NetworkGenerate, NetworkInit, NodeVersions
from poc_gateway.node_api.ml_nodes import MlNode, load_ml_nodes
from poc_gateway.node_api.node_metrics import NodeMetrics
from poc_gateway.node_api.pod_versions import common_schemes, plugin_release
from poc_gateway.outbox.guard import RECEIVER_ALLOW
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import StoreError
from poc_operator.clients.pods.client import PodClient
from poc_operator.observed import PodView
from vllm_poc.wire.messages import CallbackRequest, Protocol, Scheme

_log = logging.getLogger(__name__)

#: Pods that a message names.
_NAMED = 3
#: What helps where no pod offers the decode scheme.
DECODE_REMEDY = "add pods of the network's plugin 0.2 or later, or others whose GET versions lists decode in schemes"
#: What helps where pods compute chains that the network does not know.
CODEBOOK_REMEDY = "set VLLM_POC_DECODE_CODEBOOK of pods with a rebuilt codebook to the network's file"
#: What an ML node's rounds and pods are looked up in.
ClusterOf = Callable[[MlNode], Cluster]


class NodeApi:
    """One ML node: pods, rounds and jobs of its own. The jobs run between `start` and `close`.

    The ``first`` of a gateway's ML nodes has its jobs from before there were several. If the database is ``shared``
    with other processes, the one that owns it computes what is queued.

    ValueError if a token of the ML node cannot be read.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        ml_node: MlNode,
        client: PodClient,
        database: Database,
        settings: Settings,
        first: bool = False,
        shared: bool = False,
    ) -> None:
        template = ml_node.template
        self.ml_node = ml_node
        self.tokens = ml_node.token.read_several() if ml_node.token is not None else settings.network_token
        self.pods = ReadyPods(cluster, client, selector=template.selector, port=template.port)
        self.rounds = NetworkRounds(cluster, ml_node, shared=shared)
        self.jobs = Jobs(database, self.pods, settings, ml_node.name, first=first, shared=shared)
        self._relay = CallbackRelay(database, settings, self.rounds, self.jobs)
        self.metrics = NodeMetrics(self.pods, model=template.model, version=__version__)
        self.chat = ChatProxy(
            self.pods,
            guarded=bool(self.tokens),
            token=ml_node.chat_token.read() if ml_node.chat_token is not None else None,
        )
        self._settings = settings

    async def start(self) -> None:
        """Take up the jobs of an earlier process."""
        await self.jobs.start()

    async def close(self) -> None:
        """End the jobs' work, and the connections of chat and of relayed callbacks."""
        await self.jobs.close()
        await self.chat.close()
        await self._relay.close()

    async def init_generate(self, request: NetworkInit) -> tuple[PoCRound, list[PodView]]:
        """Create the round; return it and the pods that are ready for it."""
        _check_receiver(request, self._settings)
        found = await self.pods.poll()
        if request.protocol is Protocol.DECODE:
            await self._require_decode([one.pod for one in found])
        round_ = await self.rounds.start(request, self._model(request, found))
        return round_, [one.pod for one in found]

    async def stop(self) -> tuple[PoCRound | None, list[PodView]]:
        """End the round; return it if it has yet to end, and the ready pods."""
        left = await self.rounds.stop()
        return next(iter(left), None), await self.pods.ready()

    async def observe(self) -> tuple[PoCRound | None, Sequence[ReadyPod]]:
        """Return the active round, and the ready pods with what they answer."""
        return await self.rounds.active(), await self.pods.poll()

    async def versions(self) -> NodeVersions:
        """Return what runs here. Chat goes on in a validation, and a scheme is offered, if all ready pods say so."""
        pods = await self.pods.ready()
        told = await self.pods.versions(pods)
        first = next((one.vllm_version for one in told if one is not None and one.vllm_version), None)
        proven = bool(pods) and all(one is not None and one.poc_validation_inference for one in told)
        return NodeVersions(
            version=__version__,
            vllm_version=first,
            gonka_poc_version=plugin_release(told),
            poc_validation_inference=proven,
            schemes=common_schemes(told),
        )

    async def relay(self, token: str, suffix: str, body: bytes) -> int:
        """Send a callback of this ML node once more; return its receiver's status. Refusal if it is none."""
        return await self._relay.send(token, suffix, body)

    async def check(self, request: NetworkGenerate) -> NetworkGenerate:
        """Return the request with its whole fraud test.

        Refused if its result could not be delivered, or is of a scheme that no ready pod offers.
        """
        _check_scheme(request)
        _check_receiver(request, self._settings)
        if request.protocol is Protocol.DECODE:
            with suppress(StoreError):  # like all that is queued, it waits until pods can be listed
                await self._require_decode(await self.pods.ready())
        if request.validation is None:
            return request
        return request.model_copy(update={"stat_test": stat_test_of(request, self._settings)})

    def model_name(self, served: Sequence[str]) -> str | None:
        """Return the one of the model's names that clients know: the template's, else one that is no path."""
        by_kind = sorted(served, key=lambda name: name.startswith("/"))
        return self.ml_node.template.model or next(iter(by_kind), None)

    async def _require_decode(self, pods: Sequence[PodView]) -> None:
        """Refuse work of the decode scheme if every ready pod says that it does not offer it."""
        told = await self.pods.versions(pods)
        if pods and all(one is not None and Scheme.DECODE not in one.offers for one in told):
            names = ", ".join(pod.name for pod in pods[:_NAMED])
            rebuilt = any(one is not None and one.rebuilt_codebook for one in told)
            remedy = f"{CODEBOOK_REMEDY}, or {DECODE_REMEDY}" if rebuilt else DECODE_REMEDY
            message = f"asks for the decode scheme, which none of the ready pods offers ({names}): {remedy}"
            raise field_refusal("params.decode", message)

    def _model(self, request: NetworkInit, found: Sequence[ReadyPod]) -> str:
        """Return the model's name; a distance request has none, so it is the template's, or what the pods serve."""
        models = models_of(found)
        if request.params is None:
            if (name := self.model_name(models)) is not None:
                return name
            detail = "no pod tells its model's name: set spec.model.name in the ML node's template, or wait for a pod"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NoBackends", detail, headers={"Retry-After": "10"})
        if models and request.params.model not in models:
            detail = f"params.model: {request.params.model} was requested, but this cluster serves {', '.join(models)}"
            raise Refusal(HTTPStatus.CONFLICT, "ModelMismatch", detail)
        return request.params.model


@asynccontextmanager
async def running_ml_nodes(
    settings: Settings, database: Database, cluster_of: ClusterOf | None, *, shared: bool = False
) -> AsyncIterator[Sequence[NodeApi]]:
    """Run the ML nodes of the settings' file. ValueError if it, or a token that it names, cannot be read.

    If the database is ``shared``, jobs are left to the process that owns it.
    """
    if cluster_of is None or settings.ml_nodes is None:
        yield ()
        return
    listed = load_ml_nodes(settings.ml_nodes)
    names = [one.name for one in listed]
    lost = 0 if shared else await database.write(partial(fail_foreign_jobs, ml_nodes=names))
    if lost:
        _log.warning("%d requests for named nonces have failed: their ML nodes are not in %s", lost, settings.ml_nodes)
    async with AsyncExitStack() as stack:
        token = settings.pod_token.get_secret_value() if settings.pod_token is not None else None
        client = await stack.enter_async_context(PodClient(token))
        found = [
            NodeApi(
                cluster=cluster_of(one),
                ml_node=one,
                client=client,
                database=database,
                settings=settings,
                first=one is listed[0],
                shared=shared,
            )
            for one in listed
        ]
        for one in found:
            stack.push_async_callback(one.close)
            await one.start()
        yield found


def models_of(found: Sequence[ReadyPod]) -> list[str]:
    """Return the names of the models that the pods serve, each once."""
    return list(dict.fromkeys(name for one in found for name in one.models))


def _check_scheme(request: NetworkGenerate) -> None:
    if request.protocol is Protocol.DECODE and request.validation is None:
        message = "chains of named nonces are compared here, and not told: send those to compare with, in validation"
        raise field_refusal("params.decode", message)


def _check_receiver(request: CallbackRequest, settings: Settings) -> None:
    """Refuse with 422 a callback that would never be sent: to a host that is not allowed, or with a password."""
    receiver = urlsplit(request.receiver or "")
    field, host = "url" if request.url is not None else "callback_url", receiver.hostname
    if "@" in receiver.netloc:
        raise field_refusal(field, "holds a user or a password, and results are sent without either: take them out")
    if host is not None and not any(fnmatchcase(host, pattern) for pattern in settings.receiver_allow):
        allowed = ", ".join(settings.receiver_allow)
        raise field_refusal(field, f"callbacks to {host} are not allowed; {RECEIVER_ALLOW} allows {allowed}")
