# SPDX-License-Identifier: Apache-2.0
"""Whether a pod's counters can be true. What cannot be is not counted, so that totals never go backwards."""

from poc_operator.model.conditions import Reason
from poc_operator.model.status import Assignment
from poc_operator.plan.snapshot import RoundEvent
from vllm_poc.wire.messages import StatusResponse


def contradiction(
    slot: Assignment, status: StatusResponse, capacity: int, settled_before: int | None = None
) -> str | None:
    """Return what is wrong with the counters of the slot's pod; None if they can be true.

    Below ``settled_before`` the record is the gateway's, which may know more than the pod does.
    """
    order = (status.start_index, status.delivered_index, status.next_index, capacity)
    if list(order) != sorted(order):
        return "start_index {}, delivered_index {}, next_index {} of {} nonces are out of order".format(*order)
    delivered = status.delivered_index - status.start_index
    if status.delivered_valid + status.delivered_rejected > delivered:
        counts = f"{status.delivered_valid} valid and {status.delivered_rejected} rejected"
        return f"{counts} nonces of {delivered} delivered ones are too many"
    return _fall(slot, status, settled_before)


def _fall(slot: Assignment, status: StatusResponse, settled_before: int | None) -> str | None:
    from_pods = settled_before is None
    index = settled_before or 0
    counters = (
        (from_pods or slot.next > index, "next_index", slot.next, status.next_index),
        (from_pods or slot.delivered > index, "delivered_index", slot.delivered, status.delivered_index),
        (from_pods, "delivered_valid", slot.valid - slot.valid_before, status.delivered_valid),
        (True, "delivered_rejected", slot.rejected - slot.rejected_before, status.delivered_rejected),
    )
    falls = (f"{name} falls from {before} to {now}" for told, name, before, now in counters if told and now < before)
    return next(falls, None)


def doubt(slot: Assignment, why: str) -> tuple[Assignment, RoundEvent | None]:
    """Return the slot with its counters as they were, and the Event that tells the user, once."""
    mark = f"pod {slot.pod} is not believed"
    error = f"{mark}: {why}"
    doubted = slot.model_copy(update={"error": error})
    if slot.error is not None and slot.error.startswith(mark):
        return doubted, None
    return doubted, RoundEvent.warn_of(slot, Reason.REPORT_CONTRADICTORY, error)
