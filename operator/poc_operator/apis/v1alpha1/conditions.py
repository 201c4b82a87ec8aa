# SPDX-License-Identifier: Apache-2.0
"""Conditions, as ``kubectl wait`` and programs with the rules of kstatus read them."""

from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.schema import ApiModel, Int64, Message, Open


class ConditionType(StrEnum):
    """Types of conditions. All kinds have all of them."""

    ACCEPTED = "Accepted"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    READY = "Ready"
    STALLED = "Stalled"

    @property
    def meaning(self) -> str:
        """What status ``True`` means."""
        return _MEANINGS[self]


_MEANINGS = {
    ConditionType.ACCEPTED: "The spec is valid, and at least one pod can do the work or none has been asked yet.",
    ConditionType.PROGRESSING: "Work starts, runs, or stops. `False`: it waits, is suspended, or is over.",
    ConditionType.DEGRADED: "Something is lost or missing, although work goes on or is over. The message lists all "
    "findings, the reason is that of the first.",
    ConditionType.SUSPENDED: "All pods have stopped because `spec.suspend` is true.",
    ConditionType.COMPLETE: "The work is done and all pods have stopped.",
    ConditionType.FAILED: "The work ended before it was done.",
    ConditionType.READY: "The same as `Complete`, for tools that follow kstatus, such as Argo CD and Flux: "
    "`False` reads as in progress.",
    ConditionType.STALLED: "The same as `Failed`, for tools that follow kstatus: `True` reads as failed.",
}


class Condition(ApiModel):
    """One condition, as API conventions have it."""

    type: Annotated[ConditionType, Open()]
    """Type of the condition, such as Complete."""
    status: str
    """True, False or Unknown."""
    reason: str
    """Why the condition has this status, in one word for programs."""
    message: Message = ""
    """Why the condition has this status, in a sentence for people."""
    observed_generation: Int64 = 0
    """Generation of the spec that the condition is about."""
    last_transition_time: datetime
    """When the status last changed."""


class OtherCondition(ApiModel):
    """A condition of another writer, or one that is not complete: it is kept as it is."""

    model_config = ConfigDict(extra="allow")

    type: str
    """Type of the condition."""


#: A condition as it is read. What others write need not be complete.
StoredCondition = Annotated[Condition | SkipJsonSchema[OtherCondition], Field(union_mode="left_to_right")]

#: What the API server gives a new object. Without it, tools that follow kstatus take one that no operator has seen for
#: one that is done.
UNSEEN = Condition(
    type=ConditionType.READY,
    status="Unknown",
    reason=Reason.PENDING,
    message="waiting for the operator",
    last_transition_time=datetime(1970, 1, 1, tzinfo=UTC),
)


def merge_conditions(
    old: Iterable[Condition | OtherCondition], new: Iterable[Condition]
) -> list[Condition | OtherCondition]:
    """Return ``old`` updated by ``new``. Conditions of other writers and transition times are kept."""
    merged = {str(condition.type): condition for condition in old}
    for condition in new:
        before = merged.get(condition.type)
        unchanged = isinstance(before, Condition) and before.status == condition.status
        time = (
            {"last_transition_time": before.last_transition_time} if isinstance(before, Condition) and unchanged else {}
        )
        merged[condition.type] = condition.model_copy(update=time)
    return list(merged.values())
