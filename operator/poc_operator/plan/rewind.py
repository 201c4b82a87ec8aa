# SPDX-License-Identifier: Apache-2.0
"""Pods that cannot resume: a slot that one of them gets begins anew, whatever ``spec.reissue.policy`` says."""

from poc_operator.model.status import Assignment, SlotState
from poc_operator.plan.collection import counted
from poc_operator.plan.snapshot import Snapshot, Step

_COUNTERS = ("start", "next", "delivered", "valid", "valid_before", "rejected", "rejected_before")
_BEGINNING = {**dict.fromkeys(_COUNTERS, 0), "end": None}


def rewind(snapshot: Snapshot, step: Step) -> Step:
    """Let the slots that wait for such a pod's start begin at index 0."""
    return step.extended(assignments=[_rewound(snapshot, slot) for slot in step.status.assignments])


def _rewound(snapshot: Snapshot, slot: Assignment) -> Assignment:
    if slot.state is not SlotState.STARTING or snapshot.report_of(slot).resumes:
        return slot
    return counted(snapshot, slot.model_copy(update=_BEGINNING))
