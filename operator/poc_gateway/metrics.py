# SPDX-License-Identifier: Apache-2.0
"""The series that the gateway counts as it works; `poc_gateway.server.gauges` has those that are read when asked for.

No label names a round, a pod, a receiver or a path as it was sent, so that the number of series is bounded.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import Counter, Gauge, Histogram

RECEIVED = Counter("poc_gateway_received", "Artifacts in deliveries that could be read")
STORED = Counter("poc_gateway_stored", "Artifacts stored")
DUPLICATES = Counter("poc_gateway_duplicate", "Artifacts that were stored already, with the same content")
CONFLICTS = Counter("poc_gateway_conflict", "Artifacts that were stored already, with other content")
REFUSED = Counter("poc_gateway_refused", "Artifacts refused", ["reason"])


#: What is sent: an artifact of a round, or a callback row (a verdict, a job's result).
Content = Literal["artifact", "callback"]
#: Why a post was not accepted; ``address`` is one that the settings forbid, ``secret`` one that cannot be had.
FailureKind = Literal["address", "secret", "connection", "timeout", "http_3xx", "http_4xx", "http_5xx"]
_FAILURES: tuple[FailureKind, ...] = get_args(FailureKind)

FORWARDED = Counter("poc_gateway_forwarded", "Results that their receiver has accepted", ["content"])
DEAD = Counter("poc_gateway_dead", "Results that their receiver refused for good", ["content"])
EXPIRED = Counter("poc_gateway_expired", "Results that no receiver accepted in time", ["content"])
FAILURES = Counter("poc_gateway_forward_failures", "Posts to receivers that were not accepted", ["kind"])
OPEN_CIRCUITS = Gauge("poc_gateway_open_circuits", "Addresses of receivers in trouble, tried one post at a time")

ARCHIVED = Counter("poc_gateway_archived_rounds", "Rounds whose archive was completed")
ARCHIVE_FAILURES = Counter("poc_gateway_archive_failures", "Attempts to archive a round that failed")
ARCHIVE_WAITING = Gauge("poc_gateway_archive_waiting_rounds", "Rounds that have ended and are not in the archive yet")

#: Up to what a statement of the database and a body of a request may take.
_COMMIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_HTTP_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COMMIT_SECONDS = Histogram(
    "poc_gateway_commit_seconds", "Transactions that write, with syncing", buckets=_COMMIT_BUCKETS
)
#: It has a series only where the network's port speaks TLS: a 0 would say that the certificate expired long ago.
CERTIFICATE_EXPIRATION = Gauge(
    "poc_gateway_certificate_expiration_timestamp_seconds", "When the certificate that a port serves expires", ["port"]
)
WAITING_ARTIFACTS = Gauge("poc_gateway_waiting_artifacts", "Artifacts received that wait for their transaction")

#: What a job does: nonces computed, or artifacts of others compared.
JobKind = Literal["generate", "validate"]
#: How it ends: ``dropped`` if its client did not wait for the result, ``honest`` and ``fraud`` are of validations.
JobResult = Literal["completed", "honest", "fraud", "failed", "dropped"]
_JOB_RESULTS: tuple[JobResult, ...] = get_args(JobResult)
JOBS_ENDED = Counter("poc_gateway_jobs_ended", "Requests for named nonces that have ended", ["kind", "result"])

HTTP_REQUESTS = Counter("poc_gateway_http_requests", "Requests over HTTP", ["port", "method", "route", "status"])
#: ``status`` is the class of the answer, like 2xx: refusals are quick, and would hide what answers take.
HTTP_SECONDS = Histogram(
    "poc_gateway_http_request_seconds",
    "Time until an answer begins",
    ["port", "route", "status"],
    buckets=_HTTP_BUCKETS,
)
HTTP_REFUSALS = Counter("poc_gateway_http_refusals", "Answers that are errors, by their reason", ["reason"])
#: Reasons of refusals that ask for less, or for something of the operator of the gateway.
_REFUSALS = ("Busy", "DatabaseUnavailable", "QueueFull", "RoundFull", "StorageFull", "TooManyRequests", "Unauthorized")


def _begin_at_zero() -> None:
    # A series that appears with its first event hides that event from rate().
    content: Content
    for content in ("artifact", "callback"):
        FORWARDED.labels(content)
        DEAD.labels(content)
        EXPIRED.labels(content)
    for kind in _FAILURES:
        FAILURES.labels(kind)
    for reason in _REFUSALS:
        HTTP_REFUSALS.labels(reason)
    for ended in _JOB_RESULTS:
        if ended not in ("honest", "fraud"):
            JOBS_ENDED.labels("generate", ended)
        if ended != "completed":
            JOBS_ENDED.labels("validate", ended)


_begin_at_zero()


#: In a request's state: its `RequestRecord`.
RECORD = "record"
#: The route of a request that no route has taken: none fits, or it was refused before.
NO_ROUTE = "none"


@dataclass(slots=True)
class RequestRecord:
    """What is measured of a request over HTTP while it is under way.

    ``route`` is the template of its path. ``received`` and ``sent`` count the bytes of the bodies.
    """

    route: str = NO_ROUTE
    status: int = 0
    received: int = 0
    sent: int = 0


def record_of(state: dict[str, object]) -> RequestRecord:
    """Return the record in a request's state; one that nobody reads if there is none."""
    record = state.get(RECORD)
    return record if isinstance(record, RequestRecord) else RequestRecord()
