# SPDX-License-Identifier: Apache-2.0
"""Conditions, as ``kubectl wait`` reads them, and the reasons they carry."""

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum

from poc_operator.model.base import ApiModel


class ConditionType(StrEnum):
    """Condition types of a round; docs/reference/pocround.md explains each for users."""

    ACCEPTED = "Accepted"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    COMPLETE = "Complete"
    FAILED = "Failed"
    SUSPENDED = "Suspended"


class Reason(StrEnum):
    """Reasons of conditions and Events; documented for users in docs/reference/pocround.md."""

    ACCEPTED = "Accepted"
    ALL_SLOTS_WORK = "AllSlotsWork"
    COMPLETED = "Completed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DELIVERY_INCOMPLETE = "DeliveryIncomplete"
    FRAUD_DETECTED = "FraudDetected"
    GATEWAY_UNREACHABLE = "GatewayUnreachable"
    INTERNAL_ERROR = "InternalError"
    K_DIM_TOO_LARGE = "KDimTooLarge"
    MODEL_MISMATCH = "ModelMismatch"
    MODEL_UNSUPPORTED = "ModelUnsupported"
    NO_MATCHING_PODS = "NoMatchingPods"
    NO_FRAUD_DETECTED = "NoFraudDetected"
    NO_POD_READY = "NoPodReady"
    NOTHING_COMPUTED = "NothingComputed"
    NOT_SUSPENDED = "NotSuspended"
    PODS_BUSY = "PodsBusy"
    PODS_DISAGREE = "PodsDisagree"
    PODS_UNREACHABLE = "PodsUnreachable"
    PROOFS_CHANGED = "ProofsChanged"
    PROOFS_UNAVAILABLE = "ProofsUnavailable"
    REISSUE_LIMIT_EXCEEDED = "ReissueLimitExceeded"
    REPLACED = "Replaced"
    REPORT_CONTRADICTORY = "ReportContradictory"
    REQUEST_REFUSED = "RequestRefused"
    RESULTS_CONFLICT = "ResultsConflict"
    RESULTS_REJECTED = "ResultsRejected"
    RUNNING = "Running"
    SEQUENCE_TOO_LONG = "SequenceTooLong"
    SLOTS_FAILED = "SlotsFailed"
    SLOTS_STALLED = "SlotsStalled"
    SLOTS_WAITING = "SlotsWaiting"
    STALLED = "Stalled"
    STARTED = "Started"
    STARTING = "Starting"
    START_DEADLINE_EXCEEDED = "StartDeadlineExceeded"
    STOPPING = "Stopping"
    SUSPENDED = "Suspended"
    THEORY_DISAGREES = "TheoryDisagrees"
    TOO_MANY_SLOTS = "TooManySlots"
    WORK_LOST = "WorkLost"


class Condition(ApiModel):
    """One condition; ``last_transition_time`` moves only when ``status`` does."""

    type: str
    status: str
    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: datetime


def merge_conditions(old: Iterable[Condition], new: Iterable[Condition]) -> list[Condition]:
    """Return ``old`` updated by ``new``. Conditions of other writers and transition times are kept."""
    merged = {condition.type: condition for condition in old}
    for condition in new:
        before = merged.get(condition.type)
        if before is not None and before.status == condition.status:
            condition = condition.model_copy(update={"last_transition_time": before.last_transition_time})  # noqa: PLW2901
        merged[condition.type] = condition
    return list(merged.values())
