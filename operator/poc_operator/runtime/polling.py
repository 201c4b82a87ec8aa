# SPDX-License-Identifier: Apache-2.0
"""One poll of all pods of a round."""

import asyncio
from collections.abc import Iterable

from poc_operator.model.pods import PodReport, PodView
from poc_operator.podapi.client import PodClient, base_url
from poc_operator.podapi.errors import PodError

#: Polls in flight at once; a poll is cheap, 1 000 pods take about a second. Up to so many pods that do not answer
#: make a poll no longer than one of them does.
_CONCURRENCY = 500


async def poll(client: PodClient, pods: Iterable[PodView], port: int) -> dict[str, PodReport]:
    """Ask every pod that has an address for its status. Pods that do not answer yield their error."""
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def ask(pod: PodView, ip: str) -> tuple[str, PodReport]:
        async with limit:
            try:
                return pod.uid, PodReport(status=await client.status(base_url(ip, port)))
            except PodError as error:
                return pod.uid, PodReport(error=str(error))

    asks = [ask(pod, pod.ip) for pod in pods if pod.ip and not pod.gone]
    return dict(await asyncio.gather(*asks))
