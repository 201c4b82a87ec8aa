# SPDX-License-Identifier: Apache-2.0
"""What the gateway has of a slot. It knows more than pods do, which may die before they could tell."""

from datetime import datetime, timedelta

from poc_operator.model.spec import ReissuePolicy
from poc_operator.model.status import Assignment, SlotState
from poc_operator.plan.snapshot import Snapshot, Step

#: So long the gateway is waited for where its answer matters; then the round goes on with what is known.
PATIENCE = timedelta(seconds=5)


def counted(snapshot: Snapshot, slot: Assignment) -> Assignment:
    """Return the slot with what the gateway has of it.

    A pod that cannot resume does not know what it has delivered: there the gateway's count stands alone, also if it
    has nothing yet. The answer may be a moment older than another pod's report, so of those two the larger count is
    true.
    """
    stored = snapshot.collected_of(slot)
    resumes = snapshot.report_of(slot).resumes
    if stored is None:
        nothing = not resumes and snapshot.gateway_answered
        return slot.model_copy(update={"delivered": 0, "valid": 0}) if nothing else slot
    told = (slot.delivered, slot.valid) if resumes else (0, 0)
    delivered = max(told[0], stored.delivered_index)
    return slot.model_copy(
        update={
            "delivered": delivered,
            "next": max(slot.next, delivered),
            "valid": max(told[1], stored.stored),
        }
    )


def settled_before(snapshot: Snapshot, slot: Assignment, capacity: int) -> int | None:
    """Return the index below which a pod may report less than is recorded, since the gateway told it.

    None without a gateway. What was recorded before the gateway's first answer may all be from it.
    """
    if snapshot.gateway is None:
        return None
    stored = snapshot.collected_of(slot)
    return stored.delivered_index if stored is not None else capacity


def catch_up(snapshot: Snapshot, step: Step) -> Step:
    """Let lost slots begin where the gateway's results end, once it was asked after the loss or has had its time."""
    return step.extended(assignments=[_caught_up(snapshot, slot) for slot in step.status.assignments])


def _caught_up(snapshot: Snapshot, slot: Assignment) -> Assignment:
    if slot.lost is None or slot.state is not SlotState.STARTING or not _knows(snapshot, slot.lost):
        return slot
    found: dict[str, object] = {"lost": None}
    if snapshot.round.spec.reissue.policy is ReissuePolicy.RESUME:
        found |= {
            "start": slot.delivered,
            "next": slot.delivered,
            "valid_before": slot.valid,
            "rejected_before": slot.rejected,
        }
        if snapshot.is_whole(slot):
            found["state"] = SlotState.DONE
    return slot.model_copy(update=found)


def _knows(snapshot: Snapshot, lost: datetime) -> bool:
    gateway = snapshot.gateway
    if gateway is None or snapshot.now - lost >= PATIENCE:
        return True
    return gateway.asked is not None and gateway.asked > lost
