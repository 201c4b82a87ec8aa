# SPDX-License-Identifier: Apache-2.0
"""The queue of ``POST generate`` without ``wait``: one job at a time, first come first served.

queued -> running -> completed or failed; a stop turns queued and running jobs into cancelled. What ended
is kept for ``result_seconds``, whatever is stopped or started meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from uuid import uuid4

from vllm_poc.logs import bound, get_logger
from vllm_poc.server.engine import EngineError
from vllm_poc.server.errors import RefusalError, refusal
from vllm_poc.server.outbox import Letter
from vllm_poc.server.settings import Settings
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, JobResponse, JobState, ValidatedResponse

_log = get_logger(__name__)

Result = GeneratedResponse | ValidatedResponse


@dataclass
class Job:
    """One queued request; ``request`` is dropped at its end, since it may be large."""

    request: GenerateRequest | None
    id: str = field(default_factory=lambda: uuid4().hex)
    state: JobState = JobState.QUEUED
    result: Result | None = None
    letter: Letter | None = None
    error: str | None = None

    def response(self) -> Result | JobResponse:
        """Return what ``GET generate/{id}`` answers."""
        if self.result is None:
            fields = {"status": self.state, "request_id": self.id, "error": self.error}
            return JobResponse.model_validate(fields)
        if self.letter is None:
            return self.result
        callback = {"callback": self.letter.state, "callback_error": self.letter.error}
        return self.result.model_copy(update=callback)


class JobQueue:
    """``ready`` waits until a job may start; ``work`` does it and leaves result and letter in the job."""

    def __init__(
        self,
        *,
        ready: Callable[[], Awaitable[None]],
        work: Callable[[Job, GenerateRequest], Awaitable[None]],
        settings: Settings,
    ) -> None:
        self._ready = ready
        self._work = work
        self._settings = settings
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._nonces = 0
        self._others = 0

    @property
    def load(self) -> tuple[int, int]:
        """How many requests wait or are computed, and their nonces."""
        return len(self._unended()) + self._others, self._nonces

    def submit(self, request: GenerateRequest) -> JobResponse:
        """Queue a request; refused with 429 if too many nonces are queued."""
        self._admit(request)
        job = Job(request)
        self._jobs[job.id] = job
        self._waiting.append(job)
        self._ensure_worker()
        return JobResponse(status=JobState.QUEUED, request_id=job.id, queued_count=self._nonces)

    @contextmanager
    def counted(self, request: GenerateRequest) -> Iterator[None]:
        """Count a request that is not queued, but computed while its client waits; 429 as for the others."""
        self._admit(request)
        self._others += 1
        try:
            yield
        finally:
            self._others -= 1
            self._nonces -= len(request.nonces)

    def find(self, request_id: str) -> Result | JobResponse:
        """Return the state or the result of a job; refused with 404 if there is none."""
        job = self._jobs.get(request_id)
        if job is None:
            kept = f"results are kept for {self._settings.result_seconds:g} s"
            raise refusal(HTTPStatus.NOT_FOUND, "JobNotFound", f"no request {request_id}: {kept}")
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
        self._nonces -= len(job.request.nonces)
        job.state, job.error, job.request = state, error, None
        asyncio.get_running_loop().call_later(self._settings.result_seconds, self._jobs.pop, job.id, None)

    def _admit(self, request: GenerateRequest) -> None:
        queued, limit = self._nonces + len(request.nonces), self._settings.queued_nonces
        if queued <= limit:
            self._nonces = queued
            return
        detail = f"Queue full: {queued} nonces would be queued, and {limit} may; try again when some are done"
        raise refusal(HTTPStatus.TOO_MANY_REQUESTS, "QueueFull", detail)
