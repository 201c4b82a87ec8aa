# SPDX-License-Identifier: Apache-2.0
"""What becomes of a ``POST generate``: its result, or the state of its job."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from vllm_poc.wire.artifacts import Artifact, Encoding
from vllm_poc.wire.base import WireMessage

#: Where the callback of queued work stands.
CallbackState = Literal["pending", "delivered", "rejected", "given up"]


class JobState(StrEnum):
    """State of queued work."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Completed(WireMessage):
    """What all results have. ``not_computed`` names nonces whose result was NaN or infinite on this server."""

    status: Literal[JobState.COMPLETED] = JobState.COMPLETED
    request_id: str
    # Ours.
    not_computed: list[int] = Field(default_factory=list)
    # Of queued work with a callback address: where its callback stands, and the last thing that went wrong.
    callback: CallbackState | None = None
    callback_error: str | None = None


class GeneratedResponse(Completed):
    """Artifacts or distances, in the order of the nonces."""

    # Artifact protocol.
    artifacts: list[Artifact] | None = None
    encoding: Encoding | None = None
    # Distance protocol.
    nonces: list[int] | None = None
    distances: list[float] | None = None
    total_checked: int | None = None
    total_valid: int | None = None
    valid_nonces: list[int] | None = None
    valid_distances: list[float] | None = None


class Verdict(WireMessage):
    """The fraud test's outcome over ``n_total`` nonces, which leaves out those that were not computed.

    ``not_computed`` names these: their result was NaN or infinite on this server.
    """

    n_total: int
    n_mismatch: int
    mismatch_nonces: list[int]
    p_value: float
    fraud_detected: bool
    # Ours.
    not_computed: list[int]


class ValidatedResponse(Completed, Verdict):
    """The verdict on received artifacts."""


class JobResponse(WireMessage):
    """State of work without a result. ``error`` says why it failed or was cancelled."""

    status: Literal[JobState.QUEUED, JobState.RUNNING, JobState.FAILED, JobState.CANCELLED]
    request_id: str
    #: In the answer to ``POST generate``: all nonces that now wait or are computed, the request's included.
    queued_count: int | None = None
    error: str | None = None
