# SPDX-License-Identifier: Apache-2.0
"""What a round's user is told when the operator itself fails on it: a defect, or an object that it cannot read."""

from datetime import datetime

from poc_operator.model.conditions import Condition, ConditionType, Reason
from poc_operator.plan.snapshot import RoundEvent
from vllm_poc.wire.messages import MAX_TEXT

_REMEDY = (
    "the round stands still and is tried again, less and less often: look at the operator's log, or delete the round"
)


def trouble(error: Exception, now: datetime, generation: int) -> tuple[list[Condition], RoundEvent]:
    """Return the conditions and the Event for an exception while the round was read, planned or acted on."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = f"{what[:MAX_TEXT]}; {_REMEDY}"
    verdicts = {ConditionType.PROGRESSING: "False", ConditionType.DEGRADED: "True"}
    conditions = [
        Condition(
            type=kind,
            status=status,
            reason=Reason.INTERNAL_ERROR,
            message=message,
            observed_generation=generation,
            last_transition_time=now,
        )
        for kind, status in verdicts.items()
    ]
    return conditions, RoundEvent(reason=Reason.INTERNAL_ERROR, message=message, warning=True)
