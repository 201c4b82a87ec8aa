# SPDX-License-Identifier: Apache-2.0
"""Jobs in the database."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, exists, select

from poc_gateway.store import schema
from poc_gateway.store.schema import one_line
from vllm_poc.wire.results import JobState

#: Seconds that a result is kept.
KEEP_SECONDS = 300

_jobs, _callbacks = schema.jobs.c, schema.callbacks.c


@dataclass(frozen=True)
class JobRow:
    """What ``GET generate/{id}`` tells of; ``result`` is JSON."""

    state: str
    result: str | None
    error: str | None


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with a result (JSON) and its callbacks (URL and JSON), or with an error."""

    job_id: str
    result: str | None = None
    error: str | None = None
    callbacks: Sequence[tuple[str, str]] = ()


def now() -> int:
    """Return the milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def insert(connection: Connection, job_id: str, request: str) -> None:
    """Write a queued job down, and delete those that are over and whose callbacks have gone out."""
    _expire(connection)
    values = {"id": job_id, "request": request, "state": JobState.QUEUED, "created_at": now()}
    connection.execute(schema.jobs.insert().values(**values))


def unfinished(connection: Connection) -> Sequence[tuple[str, str]]:
    """Return id and request of the jobs that have not ended, oldest first."""
    found = select(_jobs.id, _jobs.request).where(_jobs.finished_at.is_(None)).order_by(_jobs.created_at)
    return [(row.id, row.request) for row in connection.execute(found)]


def find(connection: Connection, job_id: str) -> JobRow | None:
    """Return a job; None if there is none, or its result is older than it is kept."""
    where = (_jobs.id == job_id) & (_jobs.finished_at.is_(None) | (_jobs.finished_at > _oldest()))
    row = connection.execute(select(_jobs.state, _jobs.result, _jobs.error).where(where)).first()
    return JobRow(*row) if row is not None else None


def finish(connection: Connection, outcome: Outcome) -> None:
    """Write a job's end down, with its callbacks. Its request is dropped, since it may be large."""
    ended = {
        "state": JobState.COMPLETED if outcome.error is None else JobState.FAILED,
        "result": outcome.result,
        # A pod's words are in it.
        "error": one_line(outcome.error) if outcome.error is not None else None,
        "request": "{}",
        "finished_at": now(),
    }
    connection.execute(schema.jobs.update().where(_jobs.id == outcome.job_id).values(**ended))
    if outcome.callbacks:
        common = {"job_id": outcome.job_id, "state": "waiting", "created_at": now()}
        rows = [common | {"url": url, "body": body} for url, body in outcome.callbacks]
        connection.execute(schema.callbacks.insert(), rows)


def _expire(connection: Connection) -> None:
    waits = exists().where((_callbacks.job_id == _jobs.id) & (_callbacks.state == "waiting"))
    connection.execute(schema.jobs.delete().where((_jobs.finished_at <= _oldest()) & ~waits))


def _oldest() -> int:
    return now() - KEEP_SECONDS * 1000
