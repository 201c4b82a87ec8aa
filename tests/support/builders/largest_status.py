# SPDX-License-Identifier: Apache-2.0
"""The status of the largest round that the API allows, with every field as large as an operator makes it."""

from datetime import UTC, datetime

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, MAX_WAITS, Assignment, RoundStatus, SlotWait
from poc_operator.apis.v1alpha1.status import Outcome, Result, SlotState
from vllm_poc.wire.partition import MAX_NONCE

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LONGEST = "x" * 5_000
#: As long as the name of a pod of a Deployment or a StatefulSet can be.
_POD = 63
#: Ids of containers, which name the sessions of reference pods, are longer than the sessions of our own.
_SESSION = f"containerd://{'0' * 64}#99"
_INDEX = MAX_NONCE // MAX_SLOTS + 1


def largest_status() -> RoundStatus:
    """Return a status of `MAX_SLOTS` slots, each bound to a pod, with an error of its own and no counter at 0."""
    return RoundStatus(
        assignments=[_slot(number) for number in range(MAX_SLOTS)],
        slots=MAX_SLOTS,
        groups=1,
        conditions=[
            Condition(
                type=kind,
                status="False",
                reason=Reason.START_DEADLINE_EXCEEDED,
                message=LONGEST,
                observed_generation=99,
                last_transition_time=NOW,
            )
            for kind in ConditionType
        ],
        message=LONGEST,
        slot_waits=[SlotWait(node=_INDEX, group=_INDEX, seconds=_INDEX, since=NOW) for _ in range(MAX_WAITS)],
        degraded=",".join(Reason),
        outcome=Outcome(type=Result.FAILED, reason=Reason.START_DEADLINE_EXCEEDED, message=LONGEST),
    )


def _slot(number: int) -> Assignment:
    return Assignment(
        state=SlotState.STARTING,
        pod=f"{number:0{_POD}d}",
        uid="12345678-1234-1234-1234-123456789012",
        attempts=99,
        error=f"{number} {LONGEST}",
        node=number,
        group=MAX_SLOTS - 1,
        session=_SESSION,
        start=_INDEX,
        next=_INDEX,
        end=_INDEX,
        delivered=_INDEX,
        valid=_INDEX,
        valid_before=_INDEX,
        rejected=_INDEX,
        rejected_before=_INDEX,
        disruptions=99,
        stalls=9,
        lost=NOW,
        leased=False,
    )
