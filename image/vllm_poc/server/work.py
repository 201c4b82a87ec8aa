# SPDX-License-Identifier: Apache-2.0
"""Named nonces, computed slice by slice, and what is made of them."""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from vllm_poc.server import metrics, payloads
from vllm_poc.server.comparison import artifact_verdict, proof_verdict
from vllm_poc.server.jobs import Job, Result
from vllm_poc.server.outbox import Letter, Outbox
from vllm_poc.server.scheduler import Item, Scheduler, look_ahead
from vllm_poc.wire.generate import GenerateRequest, ProofBatch, ProofVerdict, ValidatedResponse
from vllm_poc.wire.messages import RoundRequest, SlotRequest, WireMessage

Ready = Callable[[], Awaitable[None]]


class NamedNonces:
    """Computes what ``POST generate`` names: while no round generates, for which ``ready`` waits, or beside it."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox, ready: Ready) -> None:
        self._scheduler = scheduler
        self._outbox = outbox
        self._ready = ready

    async def result(self, request: GenerateRequest, request_id: str, limit: int) -> Result:
        """Return artifacts, distances or a verdict. EngineError if the engine fails."""
        slices = self._slices(request, request.nonces, limit, _at_once if request.beside_round else self._ready)
        if request.validation is not None:
            return await artifact_verdict(request, request_id, slices)
        return payloads.generated(request, [item async for part in slices for item in part], request_id)

    async def perform(self, job: Job, request: GenerateRequest, limit: int) -> None:
        """Leave the result in the job and send its callback."""
        await self._outbox.room()
        job.result = await self.result(request, job.id, limit)
        if request.receiver is not None:
            job.letter = self._send(request.receiver, request, job.result)

    async def proof(self, round_: SlotRequest, batch: ProofBatch, limit: int) -> ProofVerdict:
        """Recompute a batch, also between the slices of a round that generates, and send the callback."""
        await self._outbox.room()
        request = round_.model_copy(update={"public_key": batch.public_key})
        slices = self._slices(request, batch.nonces, limit, _at_once)
        items = [item async for part in slices for item in part]
        verdict, callback = proof_verdict(round_, batch, items)
        if round_.receiver is not None:
            self._outbox.send(f"{round_.receiver}/validated", [callback], _only)
        return verdict

    def _send(self, receiver: str, request: GenerateRequest, result: Result) -> Letter:
        if isinstance(result, ValidatedResponse):
            return self._outbox.send(f"{receiver}/validated", [payloads.verdict_callback(request, result)], _only)
        payload = partial(payloads.callback, request, request_id=result.request_id)
        return self._outbox.send(f"{receiver}/generated", payloads.callback_items(result), payload)

    async def _slices(
        self, request: RoundRequest, nonces: Sequence[int], limit: int, ready: Ready
    ) -> AsyncIterator[list[Item]]:
        if len(nonces) > limit:
            await self._scheduler.autotune(request)
        size, ahead, done = self._scheduler.slice_size(request, limit), deque[list[int]](), 0

        def following(known: int) -> list[int]:
            return list(nonces[done + known : done + known + size.nonces])

        while done < len(nonces):
            await ready()
            part = ahead.popleft() if ahead else following(0)
            done += len(part)
            look_ahead(ahead, size, following)
            result = await self._scheduler.run(request, part, size, ahead)
            metrics.count_nonces(request.protocol, "request", computed=len(part), not_finite=result.rejected)
            yield result.items


async def _at_once() -> None:
    """Wait for nothing."""


def _only(callbacks: Sequence[WireMessage]) -> WireMessage:
    return callbacks[0]
