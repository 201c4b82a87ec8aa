# SPDX-License-Identifier: Apache-2.0
"""What the network's routes need of the API server, and the pods behind it.

The network calls a pod a backend; here it is a pod until it is written into an answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from poc_gateway.node_api.pod_versions import PodVersionsCache
from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.work import DEFAULT_PORT
from poc_operator.clients.errors import PodError
from poc_operator.clients.pods.client import PodClient, base_url
from poc_operator.clients.pods.reference_pods import PodVersions, ReferenceStatus
from poc_operator.observed import PodView
from vllm_poc.wire.answers import GpusResponse, PowState, StatusResponse
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse
from vllm_poc.wire.messages import API_PREFIX

#: Pods that are asked at once.
_CONCURRENCY = 100
#: A pod that needs longer does not answer. The network's client gives up after 5 s on what takes two such questions.
ASK_SECONDS = 2.0

T = TypeVar("T")


class Cluster(Protocol):
    """The API server; `poc_operator.clients.kube.labelled_rounds.LabelledRounds` is one.

    Errors are of ``clients.errors``.
    """

    async def list_rounds(self) -> list[PoCRound]:
        """Return the ML node's rounds; UnreadableObject if one that is not over cannot be understood."""
        ...

    async def create(self, name: str, spec: Mapping[str, Any]) -> PoCRound:
        """Create a round; StaleObject if there is one of this name, ObjectInvalid if its spec is refused."""
        ...

    async def finish(self, name: str) -> None:
        """Let a round end now."""
        ...

    async def list_pods(self, selector: LabelSelector) -> list[PodView]:
        """Return the pods that are selected."""
        ...


@dataclass(frozen=True)
class ReadyPod:
    """A ready pod; ``status`` is None if it does not answer."""

    pod: PodView
    status: StatusResponse | ReferenceStatus | None

    @property
    def models(self) -> list[str]:
        """The names of its model; none if it does not tell them."""
        return list(self.status.model.names) if isinstance(self.status, StatusResponse) else []

    @property
    def idle(self) -> bool:
        """Whether it computes no round."""
        return self.status is not None and self.status.status is not PowState.GENERATING

    @property
    def computes_named_nonces(self) -> bool:
        """Whether it can be asked for named nonces now.

        A reference pod lets them wait until its round ends, and one whose vLLM sleeps or is paused refuses them.
        """
        if isinstance(self.status, StatusResponse):
            return self.status.paused_by is None
        return self.idle


class ReadyPods:
    """The ready pods with these labels, whose servers listen on ``port``; None: on that which each pod calls http."""

    def __init__(self, cluster: Cluster, client: PodClient, *, selector: LabelSelector, port: int | None) -> None:
        self._cluster = cluster
        self._client = client
        self._selector = selector
        self._port = port
        self._versions = PodVersionsCache()

    async def ready(self) -> list[PodView]:
        """Return the ready pods, by name. StoreError if the API server cannot be asked."""
        pods = await self._cluster.list_pods(self._selector)
        return sorted((pod for pod in pods if pod.ready and pod.ip and pod.stays), key=lambda pod: pod.name)

    async def starting(self) -> bool:
        """Whether there are pods that are not ready yet. StoreError if the API server cannot be asked."""
        return any(not pod.ready and pod.stays for pod in await self._cluster.list_pods(self._selector))

    async def poll(self) -> Sequence[ReadyPod]:
        """Return the ready pods with what they answer."""
        pods = await self.ready()
        answers = await self._ask(self._client.status, pods)
        return [ReadyPod(pod, answer) for pod, answer in zip(pods, answers, strict=True)]

    async def versions(self, pods: Sequence[PodView]) -> Sequence[PodVersions | None]:
        """Return what runs in these pods; None for one that does not tell. A server is asked once in a while."""
        servers = [(pod.uid, pod.server(self._port_of(pod))) for pod in pods]
        due = self._versions.due(servers)
        asked = {server: pod for pod, server in zip(pods, servers, strict=True) if server in due}
        answers = await self._ask(self._client.versions, list(asked.values()))
        self._versions.put(dict(zip(asked, answers, strict=True)), servers=servers)
        return [self._versions.get(server) for server in servers]

    async def gpus(self) -> Sequence[GpusResponse | None]:
        """Return the GPUs of each ready pod; None for one that does not tell of them."""
        return await self._ask(self._client.gpus, await self.ready())

    async def metrics(self) -> Sequence[str | None]:
        """Return the metrics of each ready pod's vLLM; None for one that does not answer."""
        return await self._ask(self._client.metrics, await self.ready())

    async def _ask(self, question: Callable[[str], Awaitable[T]], pods: Sequence[PodView]) -> Sequence[T | None]:
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def ask(pod: PodView) -> T | None:
            async with limit:
                try:
                    async with asyncio.timeout(ASK_SECONDS):
                        return await question(self._base(pod))
                except (PodError, TimeoutError):
                    return None

        return await asyncio.gather(*[ask(pod) for pod in pods])

    async def generate(self, pod: PodView, request: GenerateRequest) -> GeneratedResponse | ValidatedResponse:
        """Let a pod compute named nonces. PodError if it does not."""
        return await self._client.generate(self._base(pod), request)

    def address(self, pod: PodView) -> str:
        """Return the address of a pod's server, without a path."""
        return self._base(pod).removesuffix(API_PREFIX)

    def _base(self, pod: PodView) -> str:
        return base_url(pod.ip or "", self._port_of(pod))

    def _port_of(self, pod: PodView) -> int:
        # Pods of one fleet may have several ports while it changes.
        return self._port if self._port is not None else pod.serving_port(pod.http_port or DEFAULT_PORT)
