# SPDX-License-Identifier: Apache-2.0
"""What the network's routes need of the API server, and the pods behind it.

The network calls a pod a backend; here it is a pod until it is written into an answer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import PodError
from poc_operator.clients.pods.client import PodClient, base_url
from poc_operator.clients.pods.reference import ReferenceStatus
from poc_operator.observed import PodView
from vllm_poc.wire.answers import PowState, StatusResponse
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse

#: Pods that are asked for their status at once.
_CONCURRENCY = 100


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
        """Whether it can be asked for named nonces now; a reference pod lets them wait until its round ends."""
        return self.idle or isinstance(self.status, StatusResponse)


class ReadyPods:
    """The ready pods with these labels, whose servers listen on ``port``."""

    def __init__(self, cluster: Cluster, client: PodClient, *, selector: LabelSelector, port: int) -> None:
        self._cluster = cluster
        self._client = client
        self._selector = selector
        self._port = port

    async def ready(self) -> list[PodView]:
        """Return the ready pods, by name. StoreError if the API server cannot be asked."""
        pods = await self._cluster.list_pods(self._selector)
        return sorted((pod for pod in pods if pod.ready and pod.ip and not pod.gone), key=lambda pod: pod.name)

    async def poll(self) -> Sequence[ReadyPod]:
        """Return the ready pods with what they answer."""
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def ask(pod: PodView) -> ReadyPod:
            async with limit:
                try:
                    return ReadyPod(pod, await self._client.status(self._base(pod)))
                except PodError:
                    return ReadyPod(pod, None)

        return await asyncio.gather(*[ask(pod) for pod in await self.ready()])

    async def generate(self, pod: PodView, request: GenerateRequest) -> GeneratedResponse | ValidatedResponse:
        """Let a pod compute named nonces. PodError if it does not."""
        return await self._client.generate(self._base(pod), request)

    def _base(self, pod: PodView) -> str:
        return base_url(pod.ip or "", self._port)
