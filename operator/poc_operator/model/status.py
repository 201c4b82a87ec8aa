# SPDX-License-Identifier: Apache-2.0
"""``status`` of a PoCRound: what the operator knows and what it has promised."""

from datetime import datetime
from enum import StrEnum
from typing import Self

from pydantic import Field

from poc_operator.model.base import ApiModel
from poc_operator.model.conditions import Condition, Reason
from poc_operator.model.results import Calibration, CrossCheck, ProofsVerdict


class RoundState(StrEnum):
    """The one word that ``kubectl get`` shows; conditions are the contract for programs."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    STOPPING = "Stopping"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """Whether the round is over for good."""
        return self in (RoundState.COMPLETE, RoundState.FAILED)


class SlotState(StrEnum):
    """Where one slot or sample stands."""

    WAITING = "Waiting"  # no pod has been told to work on it, or its pod lost it
    STARTING = "Starting"  # recorded for a pod that has not confirmed yet
    RUNNING = "Running"  # its pod confirmed and computes
    STALLED = "Stalled"  # its pod makes no progress, or does not answer, and must be stopped first
    DONE = "Done"  # stopped, results flushed
    FAILED = "Failed"  # given up

    @property
    def active(self) -> bool:
        """Whether a pod may be computing the slot's nonces."""
        return self in (SlotState.STARTING, SlotState.RUNNING, SlotState.STALLED)


class Share(ApiModel):
    """A part of the round, and which pod works on it."""

    state: SlotState
    pod: str | None = None
    uid: str | None = None
    attempts: int = 0
    error: str | None = None


class Assignment(Share):
    """One slot and who works on it.

    ``start``, ``next`` and ``delivered`` are indices of the slot's nonces: where the current pod
    began, the first not computed, the first not delivered; ``end`` is the first that it must not compute
    yet. ``valid_before`` and ``rejected_before`` count what earlier pods contributed below ``start``.
    ``disruptions`` are the attempts that the cluster's infrastructure caused, ``stalls`` how often the
    current pod stalled. ``lost`` is since when its work is lost, until it is known what the gateway has of it.
    """

    node: int
    group: int
    session: str | None = None
    start: int = 0
    next: int = 0
    end: int | None = None
    delivered: int = 0
    valid: int = 0
    valid_before: int = 0
    rejected: int = 0
    rejected_before: int = 0
    disruptions: int = 0
    stalls: int = 0
    lost: datetime | None = None


class Sample(Share):
    """The nonces ``first`` to ``first + count - 1`` of a round that checks or calibrates, counted in its order.

    ``mismatches`` and ``not_computed`` are nonces. ``distances`` is what the pod computed: base64 of
    little-endian float32.
    """

    first: int
    count: int
    mismatches: list[int] = Field(default_factory=list)
    not_computed: list[int] = Field(default_factory=list)
    distances: str = ""


_NOT_COUNTED = dict.fromkeys(("next", "delivered", "valid", "rejected"), 0)


class Totals(ApiModel):
    """Sums over all slots. ``rate`` is nonces per second as decimal text."""

    checked: int = 0
    valid: int = 0
    delivered: int = 0
    rejected: int = 0
    reissues: int = 0
    rate: str = "0"


class Outcome(ApiModel):
    """How the round ends; recorded before its pods are told to stop."""

    type: RoundState
    reason: Reason
    message: str


class RoundStatus(ApiModel):
    """Everything the next operator process needs to go on where this one stopped."""

    observed_generation: int = 0
    state: RoundState = RoundState.PENDING
    message: str = ""
    start_time: datetime | None = None
    completion_time: datetime | None = None
    poll_failure_time: datetime | None = None
    stop_time: datetime | None = None
    pods: str = "0/0"
    totals: Totals = Field(default_factory=Totals)
    outcome: Outcome | None = None
    slots: int = 0
    groups: int = 0
    assignments: list[Assignment] = Field(default_factory=list)
    proofs_digest: str | None = None
    samples: list[Sample] = Field(default_factory=list)
    verdict: ProofsVerdict | None = None
    calibration: Calibration | None = None
    cross_check: CrossCheck | None = None
    conditions: list[Condition] = Field(default_factory=list)

    @property
    def shares(self) -> list[Assignment] | list[Sample]:
        """The slots of a round that generates, the samples of another."""
        return self.samples or self.assignments

    def without_counters(self) -> Self:
        """Return the status without what moves while pods just compute: counters, and messages, which repeat them."""
        slots = [slot.model_copy(update=_NOT_COUNTED) for slot in self.assignments]
        conditions = [condition.model_copy(update={"message": ""}) for condition in self.conditions]
        cleared = {"message": "", "totals": Totals(), "assignments": slots, "conditions": conditions}
        return self.model_copy(update=cleared)
