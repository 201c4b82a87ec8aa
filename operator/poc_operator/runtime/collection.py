# SPDX-License-Identifier: Apache-2.0
"""What one round learns from the gateway. It is asked beside the poll of the pods, which it never holds up for long."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from poc_operator.model.checks import Proof, RoundSample, parse_proofs
from poc_operator.model.gateway import GatewayReport
from poc_operator.podapi.collector import CollectorClient
from poc_operator.podapi.errors import GatewayError
from poc_operator.runtime.logs import RoundLogger, RoundRef
from vllm_poc.wire.messages import Protocol

#: Least seconds between two questions.
ASK_SECONDS = 2.0
#: So long one look waits for an answer; one that comes later is for the next look.
WAIT_SECONDS = 0.5


class Collection:
    """The answers about one round. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, client: CollectorClient, ref: RoundRef, log: RoundLogger, clock: Callable[[], float]) -> None:
        self._client = client
        self._ref = ref
        self._log = log
        self._clock = clock
        self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._samples: dict[RoundSample, Sequence[Proof]] = {}  # the one that was read
        self._report = GatewayReport(callback=client.callback_url(*ref))

    async def look(self) -> GatewayReport:
        """Return what is known, after a question if one is due."""
        if self._asking is None and self._clock() - self._asked >= ASK_SECONDS:
            self._asked = self._clock()
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=WAIT_SECONDS)
        return self._report

    async def proofs(self, source: RoundSample, protocol: Protocol) -> Sequence[Proof] | str:
        """Return the results of another round that the gateway picked, or why they cannot be had.

        They are read once: the gateway may pick others while that round goes on.
        """
        if source not in self._samples:
            found = await self._sample(source, protocol)
            if isinstance(found, str):
                return found
            self._samples = {source: found}
        return self._samples[source]

    async def _sample(self, source: RoundSample, protocol: Protocol) -> Sequence[Proof] | str:
        where = f'the gateway\'s sample of round "{source.name}"'
        try:
            body = await self._client.sample(self._ref.namespace, source.name, source.nonces, source.seed)
        except GatewayError as error:
            return f"{where} cannot be had: {error}"
        if body is None:
            return f'the gateway has no results of a round "{source.name}" in namespace "{self._ref.namespace}"'
        return parse_proofs(where, body, protocol)

    async def cancel(self) -> None:
        """Give up the question that is under way."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _ask(self) -> None:
        # As exact as the times of the plan, so that "later" means the same for both.
        asked = datetime.now(UTC).replace(microsecond=0)
        try:
            collected = await self._client.progress(*self._ref)
        except GatewayError as error:
            if self._report.error != str(error):
                self._log.warning("%s", error)
            self._report = replace(self._report, error=str(error))
        else:
            self._report = replace(self._report, collected=collected, asked=asked, error=None)
        finally:
            self._asking = None
