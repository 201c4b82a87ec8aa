# SPDX-License-Identifier: Apache-2.0
"""The conditions of a round: for programs its contract, for people what it does or waits for.

`internal_error` has those of a round on which the operator itself fails.
"""

from collections import Counter
from datetime import datetime

from poc_operator.model.conditions import Condition, ConditionType, Reason, merge_conditions
from poc_operator.model.status import RoundState, RoundStatus, SlotState
from poc_operator.rounds.eligibility import Finding, incompatibility
from poc_operator.rounds.partition import free_pods
from poc_operator.rounds.snapshot import RoundEvent, Snapshot, Step
from poc_operator.rounds.summary import Verdict, degraded
from poc_operator.rounds.waiting import waits_for
from vllm_poc.wire.messages import MAX_TEXT


def _accepted(snapshot: Snapshot, status: RoundStatus) -> Verdict:
    if isinstance(snapshot.proofs, str):
        return False, Reason.PROOFS_UNAVAILABLE, snapshot.proofs
    finding = _no_pod_can_run_it(snapshot)
    if finding is not None and status.start_time is None:
        return (False, *finding)
    return True, Reason.ACCEPTED, "the spec is valid"


def _no_pod_can_run_it(snapshot: Snapshot) -> Finding | None:
    """Return the commonest reason if every pod that answers is unable to run the round."""
    findings = [incompatibility(snapshot.round.spec, report) for _, report in snapshot.answering]
    if not findings or None in findings:
        return None
    return Counter(finding for finding in findings if finding).most_common(1)[0][0]


def _progressing(snapshot: Snapshot, status: RoundStatus) -> Verdict:
    if status.state.finished and status.outcome is not None:
        return False, status.outcome.reason, status.outcome.message
    if status.state is RoundState.SUSPENDED:
        return False, Reason.SUSPENDED, "spec.suspend is true; set it to false to go on"
    if status.stop_time is not None:
        left = sum(share.state.active for share in status.shares)
        return True, Reason.STOPPING, f"waiting for {left} pods to deliver their results and stop"
    return waits_for(snapshot, status) or (True, Reason.RUNNING, _pace(snapshot, status))


def _pace(snapshot: Snapshot, status: RoundStatus) -> str:
    if status.samples:
        working = len({sample.uid for sample in status.samples if sample.state.active})
        return f"{working} pods compute; {status.totals.checked} of {_nonces(status)} nonces are done"
    running = sum(slot.state is SlotState.RUNNING for slot in status.assignments)
    pace = f"{running} pods compute {status.totals.rate} nonces/s"
    spare = len(free_pods(snapshot, status.assignments))
    return f"{pace}; {spare} more have no slot (the {status.slots} slots are fixed at the start)" if spare else pace


def _nonces(status: RoundStatus) -> int:
    return sum(sample.count for sample in status.samples)


def _ended(status: RoundStatus, state: RoundState) -> Verdict:
    if status.state is state and status.outcome is not None:
        return True, status.outcome.reason, status.outcome.message
    if status.state.finished and status.outcome is not None:
        return False, status.outcome.reason, f"the round is {status.state}"
    return False, Reason.RUNNING, "the round is not over"


def _suspended(status: RoundStatus) -> Verdict:
    if status.state is RoundState.SUSPENDED:
        return True, Reason.SUSPENDED, "spec.suspend is true"
    return False, Reason.NOT_SUSPENDED, "the round is not suspended"


def set_conditions(snapshot: Snapshot, step: Step) -> Step:
    """Write all conditions, and the message that ``kubectl get -o wide`` shows."""
    status = step.status
    verdicts = {
        ConditionType.ACCEPTED: _accepted(snapshot, status),
        ConditionType.PROGRESSING: _progressing(snapshot, status),
        ConditionType.DEGRADED: degraded(snapshot, status),
        ConditionType.COMPLETE: _ended(status, RoundState.COMPLETE),
        ConditionType.FAILED: _ended(status, RoundState.FAILED),
        ConditionType.SUSPENDED: _suspended(status),
    }
    new = [_condition(snapshot, kind, verdict) for kind, verdict in verdicts.items()]
    message = verdicts[ConditionType.PROGRESSING][2]
    return step.extended(conditions=merge_conditions(status.conditions, new), message=message)


def _condition(snapshot: Snapshot, kind: ConditionType, verdict: Verdict) -> Condition:
    true, reason, message = verdict
    return Condition(
        type=kind,
        status=str(true),
        reason=reason,
        message=message,
        observed_generation=snapshot.round.metadata.generation,
        last_transition_time=snapshot.now,
    )


_REMEDY = (
    "the round stands still and is tried again, less and less often: look at the operator's log, or delete the round"
)


def internal_error(error: Exception, now: datetime, generation: int) -> tuple[list[Condition], RoundEvent]:
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
