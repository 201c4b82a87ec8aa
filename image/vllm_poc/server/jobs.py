# SPDX-License-Identifier: Apache-2.0
"""``POST generate`` and ``POST validate``: nonces that a client names, and the verdict on what others claim of them.

The life of a queued request; with ``wait`` it is computed while its client waits, and cancelled if that goes away:

    queued -> running -> completed    its result is kept for ``result_seconds``, and its callback sent
       |         |----> failed
       +---------+----> cancelled     by a stop

Queued requests are computed one at a time, first come first served, while no round generates. Verdicts are
`vllm_poc.server.verdicts`'s.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from uuid import uuid4

from vllm_poc.logs import bound, get_logger
from vllm_poc.server import metrics
from vllm_poc.server.autotune import GaveWayError, SliceSize
from vllm_poc.server.bodies import off_loop
from vllm_poc.server.callbacks import payloads
from vllm_poc.server.callbacks.outbox import Outbox, TrackedCallback
from vllm_poc.server.chains import Computers
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.engine import EngineError, WeightsChangedError
from vllm_poc.server.errors import RefusalError, refusal
from vllm_poc.server.gate import RequestShare, nobody
from vllm_poc.server.scheduler import Item, count_values, keeps_on, look_ahead
from vllm_poc.server.verdicts import artifact_verdict, proof_verdict
from vllm_poc.settings import Settings
from vllm_poc.wire.generate import (
    GeneratedResponse,
    GenerateRequest,
    JobResponse,
    JobState,
    ProofBatch,
    ProofVerdict,
    ValidatedResponse,
)
from vllm_poc.wire.messages import Protocol, RoundRequest, SlotRequest, WireMessage

_log = get_logger(__name__)

Result = GeneratedResponse | ValidatedResponse
#: Seconds after which whoever finds the queue full may ask again.
_FULL_SECONDS = 5
#: About the bytes that a job takes in memory without its result, one nonce in a result, and a step of its chain.
_JOB_BYTES, _NONCE_BYTES, _STEP_BYTES = 2_048, 400, 8
#: Waits until work may begin.
Ready = Callable[[], Awaitable[None]]
#: Is told of each call to the workers, and while the work waits for its share.
Progress = Callable[[], None]


async def _at_once() -> None:
    """Wait for nothing."""


@dataclass
class Job:
    """One queued request; ``request`` is dropped at its end, since it may be large."""

    request: GenerateRequest | None
    id: str = field(default_factory=lambda: uuid4().hex)
    state: JobState = JobState.QUEUED
    result: Result | None = None
    callback: TrackedCallback | None = None
    error: str | None = None
    fetched: bool = False
    #: Memory that its result takes, or will take.
    bytes: int = 0

    @property
    def is_answered(self) -> bool:
        """Whether whoever asked has the result."""
        delivered = self.callback is not None and self.callback.state == "delivered"
        return self.state is JobState.COMPLETED and (self.fetched or delivered)

    def response(self) -> Result | JobResponse:
        """Return what ``GET generate/{id}`` answers."""
        if self.result is None:
            fields = {"status": self.state, "request_id": self.id, "error": self.error}
            return JobResponse.model_validate(fields)
        if self.callback is None:
            return self.result
        return self.result.model_copy(update={"callback": self.callback.state, "callback_error": self.callback.error})


class Waits(Enum):
    """What a request waits for. Each kind has a bound of its own, so that one that cannot run keeps no other out."""

    #: Its turn in the queue; its client asks for the result later.
    IN_QUEUE = auto()
    #: The end of a round; its client waits for the answer.
    FOR_ROUND = auto()
    #: The next slice beside a round; its client waits for the answer.
    BESIDE_ROUND = auto()


def result_bytes(request: GenerateRequest) -> int:
    """Return about how many bytes of memory the result of a request takes."""
    if request.validation is not None or request.params is None:
        return _JOB_BYTES + _NONCE_BYTES * len(request.nonces)
    steps, numbers = request.params.max_tokens, request.params.k_dim
    values = _STEP_BYTES * steps if request.protocol is Protocol.DECODE else -(-2 * numbers // 3) * 4
    return _JOB_BYTES + (_NONCE_BYTES + values) * len(request.nonces)


class JobQueue:
    """``ready`` waits until a job may start; ``work`` does it and leaves result and callback in the job."""

    def __init__(
        self,
        *,
        ready: Ready,
        work: Callable[[Job, GenerateRequest], Awaitable[None]],
        settings: Settings,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._ready = ready
        self._work = work
        self._settings = settings
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._nonces = Counter[Waits]()
        self._others = 0
        self._bytes = 0  # of all jobs

    @property
    def load(self) -> tuple[int, int]:
        """How many requests wait or are computed, and their nonces."""
        return len(self._unended()) + self._others, self._nonces.total()

    def submit(self, request: GenerateRequest) -> JobResponse:
        """Queue a request; refused with 429 if too many nonces are queued, or results kept."""
        job = Job(request, bytes=result_bytes(request))
        making_way = self._making_way(job.bytes)
        self._admit(len(request.nonces), Waits.IN_QUEUE)
        for answered in making_way:  # once nothing refuses the request any more
            self._forget(answered)
        self._jobs[job.id] = job
        self._bytes += job.bytes
        self._waiting.append(job)
        self._ensure_worker()
        return JobResponse(status=JobState.QUEUED, request_id=job.id, queued_count=self._nonces.total())

    @contextmanager
    def counted(self, nonces: int, waits: Waits) -> Iterator[None]:
        """Count a request that is not queued, but computed while its client waits; 429 as for the others."""
        self._admit(nonces, waits)
        self._others += 1
        try:
            yield
        finally:
            self._others -= 1
            self._nonces[waits] -= nonces

    def find(self, request_id: str) -> Result | JobResponse:
        """Return the state or the result of a job; refused with 404 if there is none."""
        job = self._jobs.get(request_id)
        if job is None:
            kept = f"results are kept for {self._settings.result_seconds:g} s"
            raise refusal(HTTPStatus.NOT_FOUND, "JobNotFound", f"no request {request_id}: {kept}")
        job.fetched = job.result is not None
        return job.response()

    async def cancel(self, reason: str) -> None:
        """Cancel what waits and what runs; ``reason`` becomes their error."""
        jobs = self._unended()
        self._waiting.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        for job in jobs:
            self._end(job, JobState.CANCELLED, reason)
        self._ensure_worker()  # for what came while the old one ended

    async def ended(self) -> None:
        """Wait until no request waits or is computed."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])

    def _unended(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.request is not None]

    def _ensure_worker(self) -> None:
        if self._waiting and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._waiting:
            await self._perform(self._waiting.popleft())

    async def _perform(self, job: Job) -> None:
        assert job.request is not None  # noqa: S101 - it is dropped at the end only
        try:
            with bound(request=job.id):
                await self._ready()
                job.state = JobState.RUNNING
                await self._work(job, job.request)
        except (EngineError, RefusalError) as error:
            self._end(job, JobState.FAILED, str(error))
        except Exception as error:
            with bound(request=job.id):
                _log.exception("a queued request failed")
            self._end(job, JobState.FAILED, f"{type(error).__name__}: {error}")
        else:
            self._end(job, JobState.COMPLETED)

    def _end(self, job: Job, state: JobState, error: str | None = None) -> None:
        if job.request is None:
            return  # it ended before it could be cancelled
        self._nonces[Waits.IN_QUEUE] -= len(job.request.nonces)
        job.state, job.error, job.request = state, error, None
        if job.result is None:
            self._bytes -= job.bytes - _JOB_BYTES
            job.bytes = _JOB_BYTES
        self._clock.call_later(self._settings.result_seconds, partial(self._forget, job.id))

    def _forget(self, job_id: str) -> None:
        job = self._jobs.pop(job_id, None)
        self._bytes -= job.bytes if job is not None else 0

    def _making_way(self, wanted: int) -> list[str]:
        """Return the answered jobs that have to go so that so many bytes have room; 429 if these are not enough."""
        limit, left, found = self._settings.result_bytes, self._bytes, list[str]()
        answered = (job for job in self._jobs.values() if job.is_answered)
        while left and left + wanted > limit:
            if (oldest := next(answered, None)) is None:
                detail = f"{self._bytes} bytes of results are kept or to be computed, and {limit} may"
                raise _full(f"{detail}; fetch them, or try again later")
            left -= oldest.bytes
            found.append(oldest.id)
        return found

    def _admit(self, nonces: int, waits: Waits) -> None:
        queued, limit = self._nonces[waits] + nonces, self._settings.queued_nonces
        if queued > limit:
            raise _full(f"{queued} nonces would be queued, and {limit} may; try again when some are done")
        self._nonces[waits] = queued


class RequestWorker:
    """Computes named nonces slice by slice: while no round generates, for which ``ready`` waits, or beside it."""

    def __init__(self, computers: Computers, outbox: Outbox, ready: Ready, share: RequestShare) -> None:
        self._computers = computers
        self._outbox = outbox
        self._ready = ready
        self._share = share

    async def result(
        self, request: GenerateRequest, request_id: str, limit: int, progress: Progress = nobody
    ) -> Result:
        """Return artifacts, distances or a verdict; ``progress`` is called after each call to the workers.

        EngineError if the engine fails, or the weights become others after the first slice: a result of both is worth
        nothing.
        """
        ready = _at_once if request.beside_round else self._ready
        slices = self._slices(request, request.nonces, limit, ready, progress)
        if request.validation is not None:
            result: Result = await artifact_verdict(request, request_id, slices)
        else:
            items = [item async for part in slices for item in part]
            result = await off_loop(count_values(items), partial(payloads.generated, request, items, request_id))
        return payloads.with_codebook(result, rebuilt=self._computers.rebuilt(request))

    async def perform(self, job: Job, request: GenerateRequest, limit: int) -> None:
        """Leave the result in the job and send its callback."""
        await self._outbox.wait_for_capacity()
        job.result = await self.result(request, job.id, limit)
        if request.receiver is not None:
            job.callback = self._send(request.receiver, request, job.result)

    async def proof(
        self, round_: SlotRequest, batch: ProofBatch, limit: int, progress: Progress = nobody
    ) -> ProofVerdict:
        """Recompute a batch, also between the slices of a round that generates, and send the callback."""
        await self._outbox.wait_for_capacity()
        request = round_.model_copy(update={"public_key": batch.public_key})
        slices = self._slices(request, batch.nonces, limit, _at_once, progress)
        items = [item async for part in slices for item in part]
        verdict, callback = await off_loop(len(items), partial(proof_verdict, round_, batch, items))
        if round_.receiver is not None:
            self._outbox.send(f"{round_.receiver}/validated", [callback], _only)
        return verdict

    def _send(self, receiver: str, request: GenerateRequest, result: Result) -> TrackedCallback:
        if isinstance(result, ValidatedResponse):
            return self._outbox.send(f"{receiver}/validated", [payloads.verdict_callback(request, result)], _only)
        rebuilt = self._computers.rebuilt(request)
        payload = partial(payloads.callback, request, request_id=result.request_id, rebuilt=rebuilt)
        return self._outbox.send(f"{receiver}/generated", payloads.callback_items(result), payload)

    async def _slices(
        self, request: RoundRequest, nonces: Sequence[int], limit: int, ready: Ready, progress: Progress
    ) -> AsyncIterator[list[Item]]:
        await ready()
        computer = self._computers.of(request)
        size, ahead, done = await self._size(request, len(nonces), limit), deque[list[int]](), 0
        gives_way = keeps_on if ready is _at_once else self._share.round_computes

        def following(known: int) -> list[int]:
            return list(nonces[done + known : done + known + size.nonces])

        while done < len(nonces):
            await ready()
            part = ahead.popleft() if ahead else following(0)
            done += len(part)
            look_ahead(ahead, size, following)
            try:
                async with self._share.slice(progress, of_chains=request.protocol is Protocol.DECODE) as busy:
                    result = await computer.run(request, part, size, ahead, busy=busy, gives_way=gives_way)
            except GaveWayError:
                done -= len(part)
                continue
            except WeightsChangedError:
                if done > len(part):
                    raise
                size, ahead, done = await self._size(request, len(nonces), limit), deque(), 0
                continue
            metrics.count_nonces(request.protocol, "request", computed=len(part), not_finite=result.rejected)
            yield result.items

    async def _size(self, request: RoundRequest, nonces: int, limit: int) -> SliceSize:
        computer = self._computers.of(request)
        if nonces > limit and not self._share.round_computes():  # which a search would hold up
            await computer.autotune(request, nonces, self._share.round_computes)
        return computer.slice_size(request, limit)


def _full(detail: str) -> RefusalError:
    headers = {"Retry-After": str(_FULL_SECONDS)}
    return refusal(HTTPStatus.TOO_MANY_REQUESTS, "QueueFull", f"Queue full: {detail}", headers)


def _only(callbacks: Sequence[WireMessage]) -> WireMessage:
    return callbacks[0]
