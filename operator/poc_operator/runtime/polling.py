# SPDX-License-Identifier: Apache-2.0
"""One poll of all pods of a round."""

import asyncio
from collections.abc import Callable, Iterable

from poc_operator.model.pods import PodReport, PodView
from poc_operator.model.round import Round
from poc_operator.podapi.client import PodClient, base_url
from poc_operator.podapi.errors import PodError
from poc_operator.podapi.reference import ReferenceStatus, as_ours
from vllm_poc.wire.messages import StatusResponse

#: Polls in flight at once; a poll is cheap, 1 000 pods take about a second. Up to so many pods that do not answer
#: make a poll no longer than one of them does.
_CONCURRENCY = 500


async def poll(
    client: PodClient, pods: Iterable[PodView], round_: Round, failed: Callable[[PodError], None]
) -> dict[str, PodReport]:
    """Ask every pod that has an address for its status. Pods that do not answer yield their error."""
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def ask(pod: PodView, ip: str) -> tuple[str, PodReport]:
        async with limit:
            try:
                answer = await client.status(base_url(ip, round_.spec.port))
                return pod.uid, _report(answer, pod, round_)
            except PodError as error:
                failed(error)
                return pod.uid, PodReport(error=str(error))

    asks = [ask(pod, pod.ip) for pod in pods if pod.ip and not pod.gone]
    return dict(await asyncio.gather(*asks))


def _report(answer: StatusResponse | ReferenceStatus, pod: PodView, round_: Round) -> PodReport:
    if isinstance(answer, StatusResponse):
        return PodReport(status=answer)
    return PodReport(status=as_ours(answer, pod, round_), resumes=False)
