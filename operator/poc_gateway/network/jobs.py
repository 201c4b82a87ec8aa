# SPDX-License-Identifier: Apache-2.0
"""``POST generate``: what is queued is written down first, so that a restart of the gateway takes it up again.

queued -> completed or failed; a queued job of which a pod has begun a chunk is told as running. A result and its
callbacks become durable together, so that neither is there without the other.
"""

import asyncio
import logging
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from poc_gateway.errors import Refusal
from poc_gateway.network import job_rows
from poc_gateway.network.cluster import Backends
from poc_gateway.network.dispatch import Dispatcher
from poc_gateway.network.messages import FIRST_PORT
from poc_gateway.network.verdicts import Result, callbacks_of, check_validation, result_of
from poc_gateway.network.work import Work
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.results import JobResponse, JobState

_log = logging.getLogger(__name__)

#: Nonces that may wait or be computed at once.
MAX_QUEUED_NONCES = 100_000
#: Pause before a result is written again that the database did not take.
_RETRY_SECONDS = 1.0


class Jobs:
    """The requests for named nonces. `start` takes up those of an earlier process."""

    def __init__(self, database: Database, backends: Backends, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._dispatcher = Dispatcher(backends)
        self._works: dict[str, Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Take up queued jobs, and begin to give out work."""
        self._spawn(self._dispatcher.run())
        for job_id, request in await self._database.read(job_rows.unfinished):
            parsed = GenerateRequest.model_validate_json(request)
            self._follow(job_id, parsed, self._dispatcher.add(parsed))

    async def close(self) -> None:
        """Stop the work; queued jobs are taken up by the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def compute(self, request: GenerateRequest) -> Result:
        """Return the result of a request whose client waits. Refusal if there is none."""
        self._admit(request)
        values = await self._dispatcher.finish(self._dispatcher.add(request))
        return result_of(request, _new_id(), values)

    async def submit(self, request: GenerateRequest) -> JobResponse:
        """Queue a request; refused with 429 if too many nonces are queued."""
        self._admit(request)
        job_id, text = _new_id(), request.model_dump_json(exclude_none=True)
        # Counted from here on, since the next request may come while this one is written.
        work = self._dispatcher.add(request)
        try:
            await self._database.write(lambda connection: job_rows.insert(connection, job_id, text))
        except BaseException:
            self._dispatcher.drop(work)
            raise
        self._follow(job_id, request, work)
        return JobResponse(status=JobState.QUEUED, request_id=job_id, queued_count=self._dispatcher.nonces)

    async def find(self, job_id: str) -> str:
        """Return the JSON of a job's state or result; refused with 404 if there is none."""
        row = await self._database.read(lambda connection: job_rows.find(connection, job_id))
        if row is None:
            detail = f"no request {job_id}: results are kept for {job_rows.KEEP_SECONDS} s"
            raise Refusal(HTTPStatus.NOT_FOUND, "JobNotFound", detail)
        if row.result is not None:
            return row.result
        work = self._works.get(job_id)
        state = JobState.RUNNING if work is not None and work.begun else JobState(row.state)
        fields = {"status": state, "request_id": job_id, "error": row.error}
        return JobResponse.model_validate(fields).model_dump_json(exclude_none=True)

    def _admit(self, request: GenerateRequest) -> None:
        check_validation(request)
        queued = self._dispatcher.nonces + len(request.nonces)
        if queued > MAX_QUEUED_NONCES:
            detail = f"Queue full: {queued} nonces would be queued, and {MAX_QUEUED_NONCES} may; try again later"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, "QueueFull", detail, headers={"Retry-After": "30"})

    def _follow(self, job_id: str, request: GenerateRequest, work: Work) -> None:
        self._works[job_id] = work
        self._spawn(self._perform(job_id, request, work))

    async def _perform(self, job_id: str, request: GenerateRequest, work: Work) -> None:
        try:
            result = result_of(request, job_id, await self._dispatcher.finish(work))
        except Refusal as error:
            await self._write(job_rows.Outcome(job_id, error=error.detail))
        else:
            found = callbacks_of(request, result, self._settings.payload_artifacts) if request.receiver else []
            callbacks = [(f"{request.receiver}{path}", body.model_dump_json(exclude_none=True)) for path, body in found]
            await self._write(job_rows.Outcome(job_id, result.model_dump_json(exclude_none=True), callbacks=callbacks))
        finally:
            del self._works[job_id]

    async def _write(self, outcome: job_rows.Outcome) -> None:
        while True:
            try:
                return await self._database.write(lambda connection: job_rows.finish(connection, outcome))
            except DatabaseError as error:
                _log.warning("the result of request %s waits: %s", outcome.job_id, error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("work of the network's routes failed", exc_info=task.exception())


def _new_id() -> str:
    return f"{FIRST_PORT}:{uuid4().hex}"
