# SPDX-License-Identifier: Apache-2.0
"""What the statuses of all kinds have in common: where the work stands, who has it, how it ends.

A status is read as leniently as possible: a word that this version does not know, as after a downgrade, must not keep
the operator from what it has promised. It is written with bounds, so that any number of errors fits into an object.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from poc_operator.apis.v1alpha1.conditions import Condition, OtherCondition, StoredCondition
from poc_operator.apis.v1alpha1.schema import (
    ERROR_BYTES,
    ApiModel,
    Int32,
    Int64,
    ListMap,
    Message,
    Open,
    shorten,
)

#: So many different errors are stored; the others are counted together.
MAX_ERRORS = 20
#: So many revisions of pods are told that cannot do the work.
MAX_UNFIT = 100
_OTHER_ERRORS = "other errors; see the object's Events"


class State(StrEnum):
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
        """Whether the work is over for good."""
        return self in (State.COMPLETE, State.FAILED)

    @classmethod
    def _missing_(cls, value: object) -> "State | None":
        return cls.PENDING if isinstance(value, str) else None  # decided anew from the rest of the status


def is_finished(status: Mapping[str, Any]) -> bool:
    """Whether the work is over for good, by its status as the API server has it."""
    return status.get("state") in (State.COMPLETE, State.FAILED)


def is_over(status: Mapping[str, Any]) -> bool:
    """Whether no pod works for the object, by its status as the API server has it: finished, or suspended."""
    return is_finished(status) or status.get("state") == State.SUSPENDED


class SlotState(StrEnum):
    """Where one slot or sample stands."""

    WAITING = "Waiting"  # no pod has been told to work on it, or its pod lost it
    STARTING = "Starting"  # recorded for a pod that has not confirmed yet
    RUNNING = "Running"  # its pod confirmed and computes
    STALLED = "Stalled"  # its pod makes no progress, or does not answer, and must be stopped first
    LEAVING = "Leaving"  # its pod leaves the round, and has not confirmed its stop, nor has its lease run out
    DONE = "Done"  # stopped, results flushed
    FAILED = "Failed"  # given up

    @property
    def active(self) -> bool:
        """Whether a pod may be computing the slot's nonces."""
        return self in (SlotState.STARTING, SlotState.RUNNING, SlotState.STALLED, SlotState.LEAVING)

    @classmethod
    def _missing_(cls, value: object) -> "SlotState | None":
        # A pod may compute it: what the pod says decides what becomes of it.
        return cls.STARTING if isinstance(value, str) else None


class Result(StrEnum):
    """How the work ended."""

    COMPLETE = "Complete"
    FAILED = "Failed"

    @classmethod
    def _missing_(cls, value: object) -> "Result | None":
        return cls.FAILED if isinstance(value, str) else None


class Outcome(ApiModel):
    """How the work ends; recorded before its pods are told to stop."""

    type: Annotated[Result, Open()]
    """Complete or Failed."""
    reason: str
    """Why, in one word."""
    message: Message
    """Why, in a sentence."""


class Share(ApiModel):
    """A part of the work, and which pod does it."""

    state: Annotated[SlotState, Open()]
    """Waiting for a pod; Starting: recorded for a pod that has not confirmed yet; Running; Stalled; Leaving; Done;
    Failed: given up. Stalled and Leaving pods must stop before another one gets the slot."""
    pod: str | None = None
    """Name of the pod."""
    uid: str | None = None
    """UID of the pod."""
    attempts: Int32 = 0
    """How often it was given out: 1 plus its retries."""
    # What went wrong last, if it has not been overcome. Stored in the status' `errors`.
    error: SkipJsonSchema[str | None] = Field(default=None, exclude=True)


class SharedError(ApiModel):
    """An error, and which slots or samples it is the last one of."""

    message: str
    """What went wrong."""
    count: Int32
    """Number of slots or samples."""
    indexes: str
    """Their positions in the list of slots or samples, from 0, as ranges: `0-3,7`."""


class WorkStatus(ApiModel):
    """What every kind tells about its work."""

    #: Name of the field that lists the shares.
    SHARES: ClassVar[str]

    observed_generation: Int64 = 0
    """Generation of the spec that this status is about."""
    state: Annotated[State, Open()] = State.PENDING
    """Pending, Running, Suspending, Suspended, Stopping, Complete or Failed; for people. Programs should use
    conditions."""
    message: Message = ""
    """What the work does or waits for, in one sentence: the message of the condition Progressing."""
    degraded: str = ""
    """Reasons of the condition Degraded, all of them, separated by commas. Empty while it is False."""
    start_time: datetime | None = None
    """When the first pod confirmed its start; anew after a suspension."""
    completion_time: datetime | None = None
    """When the work was complete or failed, and its pods had stopped."""
    poll_failure_time: datetime | None = None
    """Since when no pod has answered."""
    idle_time: datetime | None = None
    """Since when no pod works on it. Not set while other rounds have the pods."""
    stop_time: datetime | None = None
    """Since when the pods are being stopped."""
    outcome: Outcome | None = None
    """How the work ends; recorded before its pods are stopped."""
    desired: Int32 = 0
    """Slots or samples of the work."""
    running: Int32 = 0
    """Those of them that a pod computes now."""
    done: Int32 = 0
    """Those of them that are done."""
    failed: Int32 = 0
    """Those of them that were given up."""
    unfit_revisions: Annotated[list[str], Field(max_length=MAX_UNFIT)] = Field(default_factory=list)
    """Revisions of StatefulSets of which no pod that answers can do the work, as with another model. Updates of fleets
    do not spare these pods for it."""
    errors: list[SharedError] = Field(default_factory=list)
    """What went wrong last, by error; at most 20 different ones."""
    conditions: Annotated[list[StoredCondition], ListMap(("type",))] = Field(default_factory=list)
    """Conditions, for programs."""

    @property
    def own_conditions(self) -> Sequence[Condition]:
        """The conditions of the operator."""
        return [found for found in self.conditions if isinstance(found, Condition)]

    def with_own_conditions(self, **fields: Any) -> list[Condition | OtherCondition]:  # noqa: ANN401 - of a condition
        """Return all conditions, those of the operator with these fields changed."""
        return [found.model_copy(update=fields) if isinstance(found, Condition) else found for found in self.conditions]

    @property
    def shares(self) -> Sequence[Share]:
        """The slots or samples."""
        shares: Sequence[Share] = getattr(self, self.SHARES)
        return shares

    @model_validator(mode="before")
    @classmethod
    def _spread_errors(cls, stored: Any) -> Any:  # noqa: ANN401 - whatever is validated
        """Give each share its error back."""
        if not isinstance(stored, Mapping) or not stored.get("errors") or cls.SHARES not in stored:
            return stored
        shares = [dict(share) for share in stored[cls.SHARES]]
        for error in stored["errors"]:
            for index in _positions(error["indexes"]):
                if index < len(shares):
                    shares[index]["error"] = error["message"]
        return {**stored, cls.SHARES: shares, "errors": []}

    def stored(self) -> dict[str, Any]:
        """Return the status as JSON for the API server, bounded in size. Fields that are unset or default are left
        out."""
        body = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        # A thousand slots must fit: what has its default value is left out.
        shares = [share.model_dump(mode="json", by_alias=True, exclude_defaults=True) for share in self.shares]
        errors = [error.model_dump(mode="json", by_alias=True) for error in share_errors(self.shares)]
        return {**body, self.SHARES: shares, "errors": errors}


def share_errors(shares: Iterable[Share]) -> list[SharedError]:
    """Return the errors of the shares, each once and cut; the commonest, where there are more than `MAX_ERRORS`."""
    found: dict[str, list[int]] = {}
    for index, share in enumerate(shares):
        if share.error:
            found.setdefault(shorten(share.error, ERROR_BYTES), []).append(index)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    kept = ranked if len(ranked) <= MAX_ERRORS else ranked[: MAX_ERRORS - 1]
    rest = sorted(index for _, indexes in ranked[len(kept) :] for index in indexes)
    groups = [*kept, (_OTHER_ERRORS, rest)] if rest else kept
    return [SharedError(message=text, count=len(where), indexes=_ranges(where)) for text, where in groups]


def _ranges(indexes: Sequence[int]) -> str:
    """Return ascending numbers as ranges: ``0-3,7``, like a Job's ``completedIndexes``."""
    runs: list[tuple[int, int]] = []
    for index in indexes:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _positions(ranges: str) -> Iterator[int]:
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
