# SPDX-License-Identifier: Apache-2.0
"""What the routes are asked with, and what they answer.

A parameter that does not exist is refused: a filter misspelt must not be ignored. Moments of answers are RFC 3339 in
UTC; a vector is base64 of its fp16 numbers, as on the wire, and a chain base64 of its steps, one byte each.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from poc_operator.observed import Truth
from vllm_poc.wire.messages import Nonce, Protocol, Scheme

#: Most entries of one page.
PAGE_LIMIT = 1_000
#: Most characters of a cursor; that of the largest round has a quarter.
MAX_CURSOR = 32_768
#: Most proofs of one sample.
SAMPLE_LIMIT = 10_000


class Format(StrEnum):
    """How artifacts are written."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


def _milliseconds(value: object) -> object:
    if not isinstance(value, str) or value.isdecimal():
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError("must be milliseconds since 1970, or RFC 3339 with a time zone as in 2026-01-31T08:00:00Z")
    return int(moment.timestamp() * 1000)


#: A moment in milliseconds since 1970, as the database has it.
Moment = Annotated[int, BeforeValidator(_milliseconds), Field(ge=0, lt=2**63)]


class _Parameters(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Page(_Parameters):
    #: ``next`` of the page before.
    after: int | None = Field(default=None, ge=0, lt=2**63)
    limit: int = Field(default=100, ge=1, le=PAGE_LIMIT)


class RoundsQuery(_Page):
    """Which rounds; with ``undelivered`` those alone that have results to be sent to their receiver."""

    namespace: str | None = None
    name: str | None = None
    block_hash: str | None = None
    undelivered: bool = False


class RoundQuery(_Parameters):
    """Which round of a name; the newest without ``uid``."""

    uid: str | None = None


class ConflictsQuery(_Page, RoundQuery):
    """Which conflicts of a round."""


class SampleQuery(RoundQuery):
    """How many proofs, and the text that decides which."""

    nonces: int = Field(default=200, ge=1, le=SAMPLE_LIMIT)
    seed: str = Field(default="", max_length=256)


class ArtifactsQuery(RoundQuery):
    """Which artifacts, and how they are written.

    ``from`` and ``nonce_from`` are included, so is ``nonce_to``; ``to`` is not. ``below`` keeps the distances below it:
    what would be valid if it were the target. ``since`` is a cursor: X-Next-Since of an export before.
    """

    format: Format | None = None
    slot: int | None = None
    since: str | None = Field(default=None, max_length=MAX_CURSOR)
    received_from: Moment | None = Field(default=None, alias="from")
    received_to: Moment | None = Field(default=None, alias="to")
    nonce_from: Nonce = 0
    nonce_to: Nonce = 2**31 - 1
    below: float | None = Field(default=None, gt=0)
    limit: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_ranges(self) -> Self:
        if self.nonce_from > self.nonce_to:
            raise ValueError(f"nonce_from {self.nonce_from} is above nonce_to {self.nonce_to}: swap them")
        if self.received_from is not None and self.received_to is not None and self.received_from >= self.received_to:
            raise ValueError("from is not before to: swap them")
        if self.since is not None and self.limit is not None:
            raise ValueError("limit would cut off what the next cursor counts as read: leave out limit or since")
        return self


class RoundEntry(BaseModel):
    """A round and its sums. ``dead`` counts artifacts that the receiver refused; ``slots`` those of this cluster.

    ``limit_reached`` says for which limit its last new results were refused; null if they were stored. ``archived_at``
    is when its last archive was complete, ``archiving_since`` since when another is written, ``archive_error`` why the
    last try failed. ``scheme`` is that of artifacts, ``max_tokens`` their decode steps; null without any.
    """

    uid: str
    namespace: str
    name: str
    block_hash: str
    block_height: int
    public_key: str
    protocol: Protocol
    k_dim: int | None
    r_target: float | None
    scheme: Scheme | None
    max_tokens: int | None
    model: str
    seq_len: int
    node_count: int
    n_groups: int
    created_at: datetime
    slots: int
    stored: int
    duplicates: int
    conflicts: int
    forwarded: int
    dead: int
    limit_reached: str | None
    archived_at: datetime | None
    archiving_since: datetime | None
    archive_error: str | None


class RoundPage(BaseModel):
    """Rounds, newest first. ``next`` is ``after`` of the next page; null on the last."""

    rounds: list[RoundEntry]
    next: int | None


class SlotEntry(BaseModel):
    """A slot and its counts; ``slot`` is its first nonce. ``last_nonce`` and ``forwarded_nonce`` are -1 without any."""

    slot: int
    node_id: int
    group_id: int
    stored: int
    last_nonce: int
    duplicates: int
    conflicts: int
    forwarded: int
    forwarded_nonce: int
    dead: int


class RoundDetail(BaseModel):
    """One round with its slots."""

    round: RoundEntry
    slots: list[SlotEntry]


class SlotArrivals(BaseModel):
    """How many artifacts of a slot are stored, and when the one of its first and of its last nonce arrived."""

    slot: int
    node_id: int
    stored: int
    first_arrival: datetime | None
    last_arrival: datetime | None


class Histogram(BaseModel):
    """How many values lie in each of equally wide bins.

    A bin includes its lower edge; ``above`` counts values from the last edge on, and ``below`` those before the first.
    Bins of distances begin just below the smallest, without those that are far from all others. ``counted`` of the
    round's ``stored`` artifacts were looked at: all distances, of vectors, chains and of more than a million distances
    an even sample.
    """

    quantity: str
    edges: list[float]
    counts: list[int]
    below: int = 0
    above: int
    counted: int
    sampled: bool


class Summary(BaseModel):
    """A round at a glance. ``rate`` is artifacts per second between the first and the last arrival."""

    round: RoundEntry
    first_arrival: datetime | None
    last_arrival: datetime | None
    rate: float | None
    histogram: Histogram
    slots: list[SlotArrivals]


class Rates(BaseModel):
    """How fast results arrived, from the first to the last of them, in spans of ``seconds`` each.

    ``rates`` are results per second, of no span if all results arrived at one moment. If ``sampled`` they are estimated
    from ``counted`` results, evenly over the nonces of each slot.
    """

    first_arrival: datetime | None
    last_arrival: datetime | None
    seconds: float
    rates: list[float]
    counted: int
    sampled: bool


class Conflict(BaseModel):
    """A result that arrived for a nonce whose stored result is another one, and the pods that delivered the two.

    ``truth`` says which of the two is honest: stored, other, neither or both, as the pod ``decided_by`` has computed.
    """

    id: int
    nonce: int
    slot: int
    node_id: int
    received_at: datetime
    vector_b64: str | None = None
    chain_b64: str | None = None
    distance: float | None = None
    pod: str | None = None
    stored_vector_b64: str | None = None
    stored_chain_b64: str | None = None
    stored_distance: float | None = None
    stored_pod: str | None = None
    truth: Truth | None = None
    decided_by: str | None = None


class ConflictPage(BaseModel):
    """Conflicts in the order of their arrival. ``next`` is ``after`` of the next page; absent on the last."""

    conflicts: list[Conflict]
    next: int | None = None
