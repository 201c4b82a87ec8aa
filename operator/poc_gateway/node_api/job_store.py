# SPDX-License-Identifier: Apache-2.0
"""Jobs as rows of the database, and what their ids tell.

A job's id names its ML node, which alone tells of it and takes it up. Ids from before there were several name none: the
first ML node of the list is the one that the gateway had then.

A result and its callbacks become durable together, so that neither is there without the other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, exists, func, select

from poc_gateway.node_api.messages import FIRST_PORT, QueuedRequest
from poc_gateway.outbox import callback_ledger, ledger
from poc_gateway.store import schema
from poc_gateway.store.schema import one_line
from vllm_poc.wire.generate import JobState

#: Nonces that may wait or be computed at once.
MAX_QUEUED_NONCES = 100_000
#: Seconds that a result is kept.
KEEP_SECONDS = 300

_OLD_ID = re.compile(rf"{FIRST_PORT}:[0-9a-f]{{32}}")
_jobs, _callbacks = schema.jobs.c, schema.callbacks.c


@dataclass(frozen=True)
class JobRow:
    """What ``GET generate/{id}`` tells of; ``result`` is JSON."""

    state: str
    result: str | None
    error: str | None


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: with a result (JSON) and its callbacks (URL and JSON), or with an error.

    ``cancelled`` if somebody has given it up.
    """

    job_id: str
    result: str | None = None
    error: str | None = None
    callbacks: Sequence[tuple[str, str]] = ()
    cancelled: bool = False

    @property
    def state(self) -> JobState:
        """The state of a job that ended so."""
        if self.cancelled:
            return JobState.CANCELLED
        return JobState.COMPLETED if self.error is None else JobState.FAILED


def prefix_of(ml_node: str) -> str:
    """Return what the ids of an ML node's jobs begin with. A name has no dot, so that none begins another's."""
    return f"{FIRST_PORT}:{ml_node}."


def names_no_ml_node(job_id: str) -> bool:
    """Return whether a job's id is from before there were several ML nodes."""
    return _OLD_ID.fullmatch(job_id) is not None


def insert_job(connection: Connection, job_id: str, request: str, nonces: int = 0) -> None:
    """Write a queued job down, and delete those that are over and whose callbacks have gone out."""
    _expire(connection)
    values = {"id": job_id, "request": request, "state": JobState.QUEUED, "created_at": ledger.now()}
    connection.execute(schema.jobs.insert().values(**values, nonces=nonces))


def queue_job(connection: Connection, job_id: str, request: str, nonces: int, prefix: str) -> int:
    """Write a job down unless too many nonces of its ML node are queued; return how many are, or would be.

    Processes that ask at the same moment do not see each other's, and may exceed the limit by these.
    """
    mine = _jobs.finished_at.is_(None) & _jobs.id.startswith(prefix, autoescape=True)
    waiting = connection.scalar(select(func.coalesce(func.sum(_jobs.nonces), 0)).where(mine))
    queued = int(waiting or 0) + nonces
    if queued <= MAX_QUEUED_NONCES:
        insert_job(connection, job_id, request, nonces)
    return queued


def unfinished_ids(connection: Connection, before: int | None = None) -> Sequence[str]:
    """Return the ids of the jobs that have not ended, oldest first; those created by ``before``, if that is given."""
    found = select(_jobs.id).where(_jobs.finished_at.is_(None)).order_by(_jobs.created_at, _jobs.id)
    return connection.scalars(found if before is None else found.where(_jobs.created_at <= before)).all()


def unfinished_jobs(connection: Connection) -> list[QueuedRequest]:
    """Return the jobs that have not ended, oldest first."""
    columns = select(_jobs.id, _jobs.state, _jobs.nonces, _jobs.created_at)
    rows = connection.execute(columns.where(_jobs.finished_at.is_(None)).order_by(_jobs.created_at, _jobs.id))
    return [
        QueuedRequest.model_validate(
            {
                "request_id": id_,
                "status": state,
                "nonces": nonces,
                "created_at": datetime.fromtimestamp(at / 1_000, UTC),
            }
        )
        for id_, state, nonces, at in rows
    ]


def request_of(connection: Connection, job_id: str) -> str | None:
    """Return the JSON of a job that has not ended; None if it has."""
    return connection.scalar(select(_jobs.request).where(_jobs.id == job_id, _jobs.finished_at.is_(None)))


def mark_running(connection: Connection, job_ids: Sequence[str]) -> None:
    """Write down that pods have begun the jobs, for other processes to tell."""
    begun = schema.jobs.update().where(_jobs.id.in_(job_ids), _jobs.finished_at.is_(None))
    connection.execute(begun.values(state=JobState.RUNNING))


def find_job(connection: Connection, job_id: str) -> JobRow | None:
    """Return a job; None if there is none, or its result is older than it is kept."""
    where = (_jobs.id == job_id) & (_jobs.finished_at.is_(None) | (_jobs.finished_at > _oldest()))
    row = connection.execute(select(_jobs.state, _jobs.result, _jobs.error).where(where)).first()
    return JobRow(*row) if row is not None else None


def receivers_of_jobs(connection: Connection) -> Sequence[tuple[str, str]]:
    """Return the addresses of the callbacks of jobs, each with its job's id."""
    found = select(_callbacks.job_id, _callbacks.url).where(_callbacks.job_id.is_not(None), _callbacks.url.is_not(None))
    return [(row.job_id, row.url.rpartition("/")[0]) for row in connection.execute(found.distinct())]


def finish_job(connection: Connection, end: JobEnd) -> None:
    """Write a job's end down, with its callbacks, unless it has ended: only the first process's end counts.

    Its request is dropped, since it may be large.
    """
    ended = {
        "state": end.state,
        "result": end.result,
        # A pod's words are in it.
        "error": one_line(end.error) if end.error is not None else None,
        "request": "{}",
        "finished_at": ledger.now(),
    }
    ending = schema.jobs.update().where(_jobs.id == end.job_id, _jobs.finished_at.is_(None))
    if connection.execute(ending.values(**ended)).rowcount == 0:
        return
    callback_ledger.add_job_callbacks(connection, end.job_id, end.callbacks)


def fail_foreign_jobs(connection: Connection, ml_nodes: Sequence[str], *, after_seconds: float = 0.0) -> int:
    """End the jobs whose ML node is gone, and return how many: nobody would ever compute them.

    With ``after_seconds`` only those that wait since then: another gateway may know an ML node that this one does not
    know yet.
    """
    prefixes = tuple(prefix_of(name) for name in ml_nodes)
    oldest = ledger.now() - int(after_seconds * 1_000)
    waiting = unfinished_ids(connection, before=oldest)
    ids = [job_id for job_id in waiting if not (ml_nodes and names_no_ml_node(job_id))]
    foreign = [job_id for job_id in ids if not job_id.startswith(prefixes)]
    for job_id in foreign:
        finish_job(connection, JobEnd(job_id, error="its ML node was removed from the gateway's configuration"))
    return len(foreign)


def _expire(connection: Connection) -> None:
    waits = exists().where((_callbacks.job_id == _jobs.id) & (_callbacks.state == "waiting"))
    connection.execute(schema.jobs.delete().where((_jobs.finished_at <= _oldest()) & ~waits))


def _oldest() -> int:
    return ledger.now() - KEEP_SECONDS * 1000
