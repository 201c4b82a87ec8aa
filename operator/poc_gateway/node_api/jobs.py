# SPDX-License-Identifier: Apache-2.0
"""``POST generate``: what is queued is written down first, so that a restart of the gateway takes it up again.

queued -> completed, failed or cancelled; a queued job of which a pod has begun a chunk is told as running. A job that
has not ended when a callback of its age would expire has failed, so that each ends some day.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Set
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from poc_gateway.errors import Refusal
from poc_gateway.metrics import JOBS_ENDED, JobKind, JobResult
from poc_gateway.node_api.cluster import ReadyPods
from poc_gateway.node_api.dispatch import Dispatcher, Work
from poc_gateway.node_api.job_results import Result, callbacks_of, check_validation, result_of
from poc_gateway.node_api.job_store import (
    KEEP_SECONDS,
    MAX_QUEUED_NONCES,
    JobEnd,
    find_job,
    finish_job,
    insert_job,
    mark_running,
    names_no_ml_node,
    prefix_of,
    queue_job,
    receivers_of_jobs,
    request_of,
    unfinished_ids,
    unfinished_jobs,
)
from poc_gateway.node_api.messages import FIRST_PORT, QueuedRequests
from poc_gateway.outbox import ledger
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError
from poc_gateway.store.retention import STEADY_SECONDS, Clock
from vllm_poc.logs import bound
from vllm_poc.wire.generate import GenerateRequest, JobResponse, JobState, ValidatedResponse

_log = logging.getLogger(__name__)

#: Pause before a result is written again that the database did not take.
_RETRY_SECONDS = 1.0
#: Seconds between two looks for what other processes have queued.
_LOOK_SECONDS = 1.0
#: Seconds between two looks for requests that have expired.
EXPIRY_LOOK_SECONDS = 60.0
#: Most requests that are listed.
MOST_LISTED = 1_000
_CANCELLED = "it was given up by DELETE generate/ID"


class Jobs:
    """An ML node's requests for named nonces. `start` takes up those of an earlier process.

    The ``first`` ML node has those besides whose ids name none. If several processes have the database, which is
    ``shared`` then, each computes what its clients wait for. What is queued is computed by `run_queued`, in the process
    that owns the database, whichever took the request.
    """

    def __init__(
        self,
        database: Database,
        ready_pods: ReadyPods,
        settings: Settings,
        ml_node: str,
        *,
        first: bool = False,
        shared: bool = False,
    ) -> None:
        self._is_shared = shared
        self._news = asyncio.Event()
        self._database = database
        self._prefix = prefix_of(ml_node)
        self._is_first = first
        self._settings = settings
        self._dispatcher = Dispatcher(ready_pods)
        self._works: dict[str, Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._followed: set[asyncio.Task[None]] = set()  # those of `_works`

    async def start(self) -> None:
        """Begin to give out work, and take up queued jobs unless another process may have them."""
        self._spawn(self._dispatcher.run())
        if not self._is_shared:
            await self._take_up()
            self._spawn(self._expire(Clock(self._database)))

    async def run_queued(self, clock: Clock | None = None) -> None:
        """Compute what any process has queued, until cancelled; what is not done then is for the next owner.

        ``clock`` is the owner's: no two should write down how it runs.
        """
        told = set[str]()
        expiring = asyncio.create_task(self._expire(clock or Clock(self._database)))
        try:
            while True:
                self._news.clear()
                try:
                    await self._take_up()
                    begun = {job_id for job_id, work in self._works.items() if work.begun}
                    if begun - told:
                        await self._database.write(partial(mark_running, job_ids=sorted(begun - told)))
                        told = begun
                except DatabaseError as error:
                    _log.warning("queued requests cannot be looked for yet: %s", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._news.wait()
        finally:
            followed = [*self._followed, expiring]
            for task in followed:
                task.cancel()
            await asyncio.gather(*followed, return_exceptions=True)

    async def _take_up(self) -> None:
        known = set(self._works)  # of which some may end while the others are looked for
        waiting = [job_id for job_id in await self._database.read(unfinished_ids) if self.has(job_id)]
        for job_id in known.difference(waiting):
            self._drop(job_id, _CANCELLED)  # by way of another process, unless it has just ended
        for job_id in waiting:
            if job_id in known:
                continue
            request = await self._database.read(partial(request_of, job_id=job_id))
            if request is None:
                continue
            try:
                parsed = GenerateRequest.model_validate_json(request)
            except ValidationError as error:
                _log.error("request %s cannot be read any more, and has failed: %s", job_id, error)
                end = JobEnd(job_id, error="this release cannot read the request: send it again")
                await self._database.write(partial(finish_job, end=end))
            else:
                self._follow(job_id, parsed, self._dispatcher.add(job_id, parsed))

    async def _expire(self, clock: Clock) -> None:
        """End what has waited for too long, once a minute until cancelled."""
        while True:
            try:
                await self._end_old(clock)
            except DatabaseError as error:
                _log.warning("requests that have expired cannot be looked for yet: %s", error)
            await asyncio.sleep(EXPIRY_LOOK_SECONDS)

    async def _end_old(self, clock: Clock) -> None:
        seconds = self._settings.delivery_seconds
        if not seconds or not await clock.is_steady(STEADY_SECONDS):
            return
        old = await self._database.read(partial(unfinished_ids, before=ledger.now() - seconds * 1_000))
        why = f"the pods did not compute it within {seconds} s (POC_GATEWAY_DELIVERY_SECONDS): send it again"
        expired = [job_id for job_id in old if self.has(job_id)]
        for job_id in expired:
            await self._database.write(partial(finish_job, end=JobEnd(job_id, error=why)))
            self._drop(job_id, why)
        if expired:
            _log.error("%d requests for named nonces have expired: pods did not compute them in time", len(expired))

    def _drop(self, job_id: str, why: str) -> None:
        if (work := self._works.get(job_id)) is not None:
            work.give_up(why)

    async def close(self) -> None:
        """Stop the work; queued jobs are taken up by the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def compute(self, request: GenerateRequest) -> Result:
        """Return the result of a request whose client waits. Refusal if there is none."""
        self._admit(request)
        job_id = self._new_id()
        try:
            values = await self._dispatcher.finish(self._dispatcher.add(job_id, request))
            result = result_of(request, job_id, values)
        except Refusal:
            _count_end(request, "failed")
            raise
        except asyncio.CancelledError:
            _count_end(request, "dropped")
            raise
        _count_end(request, _verdict(result))
        return result

    async def submit(self, request: GenerateRequest) -> JobResponse:
        """Queue a request; refused with 429 if too many nonces are queued."""
        self._admit(request)
        job_id, text = self._new_id(), request.model_dump_json(exclude_none=True)
        if self._is_shared:
            queue = partial(queue_job, job_id=job_id, request=text, nonces=len(request.nonces), prefix=self._prefix)
            queued = await self._database.write(queue, grows=True)
            if queued > MAX_QUEUED_NONCES:
                raise _full(queued)
            self._news.set()
            return JobResponse(status=JobState.QUEUED, request_id=job_id, queued_count=queued)
        # Counted from here on, since the next request may come while this one is written.
        work = self._dispatcher.add(job_id, request)
        try:
            insert = partial(insert_job, job_id=job_id, request=text, nonces=len(request.nonces))
            await self._database.write(insert, grows=True)
        except BaseException:
            self._dispatcher.drop(work)
            raise
        self._follow(job_id, request, work)
        return JobResponse(status=JobState.QUEUED, request_id=job_id, queued_count=self._dispatcher.nonces)

    def counts(self) -> Mapping[tuple[JobKind, str], int]:
        """Return how many requests have not ended, by kind and by ``queued`` or ``running``."""
        works = self._dispatcher.works
        return Counter((_kind(work.request), "running" if work.begun else "queued") for work in works)

    async def find(self, job_id: str) -> str:
        """Return the JSON of a job's state or result; refused with 404 if there is none, 400 if that is no id."""
        if ":" not in job_id:
            detail = f"request_id: must be {FIRST_PORT}:ID, as POST generate answered it"
            raise Refusal(HTTPStatus.BAD_REQUEST, "InvalidRequest", detail)
        row = None
        if self.has(job_id):
            row = await self._database.read(lambda connection: find_job(connection, job_id))
        if row is None:
            detail = f"no request {job_id}: results are kept for {KEEP_SECONDS} s"
            raise Refusal(HTTPStatus.NOT_FOUND, "JobNotFound", detail)
        if row.result is not None:
            return row.result
        work = self._works.get(job_id)
        state = JobState.RUNNING if work is not None and work.begun else JobState(row.state)
        fields = {"status": state, "request_id": job_id, "error": row.error}
        return JobResponse.model_validate(fields).model_dump_json(exclude_none=True)

    async def give_up(self, job_id: str) -> str:
        """End a job that has not ended; return what `find` does."""
        if self.has(job_id):
            await self._database.write(partial(finish_job, end=JobEnd(job_id, error=_CANCELLED, cancelled=True)))
            self._drop(job_id, _CANCELLED)
        return await self.find(job_id)

    async def unfinished(self) -> QueuedRequests:
        """Return the jobs that have not ended, the oldest first."""
        found = [one for one in await self._database.read(unfinished_jobs) if self.has(one.request_id)]
        begun = {job_id for job_id, work in self._works.items() if work.begun}
        listed = [
            one.model_copy(update={"status": JobState.RUNNING}) if one.request_id in begun else one
            for one in found[:MOST_LISTED]
        ]
        return QueuedRequests(total=len(found), requests=listed)

    async def receivers(self) -> Set[str]:
        """Return the addresses that results go to, those of requests that are over included while these are kept."""
        ended = await self._database.read(receivers_of_jobs)
        waiting = (work.request.receiver for work in self._works.values())
        return {url for job_id, url in ended if self.has(job_id)} | {url for url in waiting if url is not None}

    def has(self, job_id: str) -> bool:
        """Return whether a job is of this ML node, by its id."""
        return job_id.startswith(self._prefix) or (self._is_first and names_no_ml_node(job_id))

    def _new_id(self) -> str:
        return f"{self._prefix}{uuid4().hex}"

    def _admit(self, request: GenerateRequest) -> None:
        check_validation(request)
        queued = self._dispatcher.nonces + len(request.nonces)
        if queued > MAX_QUEUED_NONCES:
            raise _full(queued)

    def _follow(self, job_id: str, request: GenerateRequest, work: Work) -> None:
        self._works[job_id] = work
        with bound(request=job_id):
            task = self._spawn(self._perform(job_id, request, work))
        self._followed.add(task)
        task.add_done_callback(self._followed.discard)

    async def _perform(self, job_id: str, request: GenerateRequest, work: Work) -> None:
        try:
            result = result_of(request, job_id, await self._dispatcher.finish(work))
        except Refusal as error:
            await self._write(JobEnd(job_id, error=error.detail))
            _count_end(request, "failed")
        else:
            found = callbacks_of(request, result, self._settings.payload_artifacts) if request.receiver else []
            callbacks = [(f"{request.receiver}{path}", body.model_dump_json(exclude_none=True)) for path, body in found]
            await self._write(JobEnd(job_id, result.model_dump_json(exclude_none=True), callbacks=callbacks))
            _count_end(request, _verdict(result))
        finally:
            del self._works[job_id]

    async def _write(self, end: JobEnd) -> None:
        while True:
            try:
                return await self._database.write(lambda connection: finish_job(connection, end), grows=True)
            except DatabaseError as error:
                _log.warning("a result waits: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("work of the network's routes failed", exc_info=task.exception())


def _kind(request: GenerateRequest) -> JobKind:
    return "generate" if request.validation is None else "validate"


def _verdict(result: Result) -> JobResult:
    if isinstance(result, ValidatedResponse):
        return "fraud" if result.fraud_detected else "honest"
    return "completed"


def _count_end(request: GenerateRequest, result: JobResult) -> None:
    JOBS_ENDED.labels(_kind(request), result).inc()


def _full(queued: int) -> Refusal:
    detail = f"Queue full: {queued} nonces would be queued, and {MAX_QUEUED_NONCES} may; try again later"
    return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "QueueFull", detail, headers={"Retry-After": "30"})
