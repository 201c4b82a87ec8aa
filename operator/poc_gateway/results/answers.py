# SPDX-License-Identifier: Apache-2.0
"""What the routes answer. Moments are RFC 3339 in UTC; a vector is base64 of its fp16 numbers, as on the wire."""

from datetime import datetime

from pydantic import BaseModel

from vllm_poc.wire.messages import Protocol


class RoundEntry(BaseModel):
    """A round and its sums. ``dead`` counts artifacts that the receiver refused; ``slots`` those of this cluster."""

    uid: str
    namespace: str
    name: str
    block_hash: str
    block_height: int
    public_key: str
    protocol: Protocol
    k_dim: int | None
    r_target: float | None
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

    A bin includes its lower edge; ``above`` counts values from the last edge on. ``counted`` of the round's ``stored``
    artifacts were looked at: all distances, but of vectors an even sample.
    """

    quantity: str
    edges: list[float]
    counts: list[int]
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


class Conflict(BaseModel):
    """A result that arrived for a nonce whose stored result is another one."""

    id: int
    nonce: int
    slot: int
    node_id: int
    received_at: datetime
    vector_b64: str | None = None
    distance: float | None = None
    stored_vector_b64: str | None = None
    stored_distance: float | None = None


class ConflictPage(BaseModel):
    """Conflicts in the order of their arrival. ``next`` is ``after`` of the next page; absent on the last."""

    conflicts: list[Conflict]
    next: int | None = None
