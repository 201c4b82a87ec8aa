# SPDX-License-Identifier: Apache-2.0
"""The conditions of an object of any kind: for programs its contract, for people what it does or waits for.

``Ready`` and ``Stalled`` repeat ``Complete`` and ``Failed`` for tools that follow kstatus. An object on which the
operator itself fails has conditions of its own, in `poc_operator.controller.failing_objects`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType, merge_conditions
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.schema import MESSAGE_BYTES, number_of, shorten
from poc_operator.apis.v1alpha1.status import Result, Share, SlotState, State, WorkStatus
from poc_operator.planning.eligibility import Finding, incompatibility, unfit_revisions
from poc_operator.planning.snapshot import Snapshot, Step, Work, WorkEvent
from poc_operator.planning.waiting import waits_for

#: Whether a condition is true, its reason, its message.
Verdict = tuple[bool, str, str]
#: So many slots or pods are named in a message.
_NAMED = 3
StepT = TypeVar("StepT", bound=Step[Any])


def set_conditions(
    snapshot: Snapshot[Work],
    step: StepT,
    *,
    pace: str,
    findings: Sequence[Finding] = (),
    blocked: Finding | None = None,
) -> StepT:
    """Write all conditions, the message that ``kubectl get -o wide`` shows, and which pods cannot do the work.

    ``pace`` says how running work gets on, ``findings`` are all that is lost, missing or in doubt, and ``blocked`` is
    what the object itself lacks before any pod can be asked.
    """
    status = step.status
    progressing = _progressing(snapshot, status, pace, blocked)
    complete, failed = _ended(status, Result.COMPLETE), _ended(status, Result.FAILED)
    verdicts = {
        ConditionType.ACCEPTED: _accepted(snapshot, status, blocked),
        ConditionType.PROGRESSING: progressing,
        ConditionType.DEGRADED: _degraded(findings),
        ConditionType.SUSPENDED: _suspended(status),
        ConditionType.COMPLETE: complete,
        ConditionType.FAILED: failed,
        ConditionType.READY: complete,
        ConditionType.STALLED: failed,
    }
    new = conditions_of(verdicts, snapshot.now, snapshot.work.metadata.generation)
    return step.extended(
        conditions=merge_conditions(status.conditions, new),
        message=shorten(progressing[2]),
        unfit_revisions=unfit_revisions(snapshot) if status.outcome is None else [],
        degraded=",".join(dict.fromkeys(str(reason) for reason, _ in findings)),
        events=_news(status, findings),
    )


#: What Events of their own tell, when it happens to a slot or a pod; and what may come and go with every try.
_TOLD = frozenset(
    {
        Reason.DELIVERIES_FAILING,
        Reason.PODS_DISAGREE,
        Reason.RECEIVER_FAILING,
        Reason.REPORT_CONTRADICTORY,
        Reason.RESULTS_FORGED,
        Reason.SLOTS_FAILED,
        Reason.SLOTS_STALLED,
        Reason.SLOTS_WAITING,
    }
)


def _news(before: WorkStatus, findings: Sequence[Finding]) -> list[WorkEvent]:
    """Return an Event for each finding that there was none of its kind before."""
    known = {*before.degraded.split(","), *_TOLD}
    return [
        WorkEvent(reason=reason, message=message, warning=True) for reason, message in findings if reason not in known
    ]


def _accepted(snapshot: Snapshot[Work], status: WorkStatus, blocked: Finding | None) -> Verdict:
    if blocked is not None:
        return (False, *blocked)
    finding = _no_pod_can_do_it(snapshot)
    if finding is not None and status.start_time is None:
        return (False, *finding)
    return True, Reason.ACCEPTED, "the spec is valid"


def _no_pod_can_do_it(snapshot: Snapshot[Work]) -> Finding | None:
    """Return the commonest reason if every pod that answers is unable to do the work."""
    findings = [incompatibility(snapshot.work.spec, report) for _, report in snapshot.answering]
    if not findings or None in findings:
        return None
    return Counter(finding for finding in findings if finding).most_common(1)[0][0]


def _progressing(snapshot: Snapshot[Work], status: WorkStatus, pace: str, blocked: Finding | None) -> Verdict:
    if status.state.finished and status.outcome is not None:
        return False, status.outcome.reason, status.outcome.message
    if status.state is State.SUSPENDED:
        return False, Reason.SUSPENDED, "spec.suspend is true; set it to false to go on"
    if status.stop_time is not None:
        left = sum(share.state.active for share in status.shares)
        return True, Reason.STOPPING, f"waiting for {number_of(left, 'pod')} to deliver all results and stop"
    if any(share.state is SlotState.RUNNING for share in status.shares):
        return True, Reason.RUNNING, pace
    return (False, *blocked) if blocked is not None else waits_for(snapshot)


def given_up(status: WorkStatus, what: str) -> Finding | None:
    """Return the finding that some slots or samples, as ``what`` names one, were given up; None if none was."""
    failed = [share for share in status.shares if share.state is SlotState.FAILED]
    if not failed:
        return None
    count = number_of(len(failed), f"{what} was", f"{what}s were")
    return Reason.SLOTS_FAILED, f"{count} given up, the first: {failed[0].error}"


def _degraded(findings: Sequence[Finding]) -> Verdict:
    if not findings:
        return False, Reason.ALL_SLOTS_WORK, "nothing is lost"
    # Where they do not fit, each is cut rather than the last ones left out.
    text = "; ".join(message for _, message in findings)
    room = len(text.encode()) if len(text.encode()) <= MESSAGE_BYTES else MESSAGE_BYTES // len(findings) - len("; ")
    return True, findings[0][0], "; ".join(shorten(message, room) for _, message in findings)


def _ended(status: WorkStatus, result: Result) -> Verdict:
    if status.outcome is None or not status.state.finished:
        return False, Reason.RUNNING, "the work is not over"
    if status.outcome.type is result:
        return True, status.outcome.reason, status.outcome.message
    return False, status.outcome.reason, f"the work is {status.state}"


def _suspended(status: WorkStatus) -> Verdict:
    if status.state is State.SUSPENDED:
        return True, Reason.SUSPENDED, "spec.suspend is true"
    return False, Reason.NOT_SUSPENDED, "the work is not suspended"


def first_few(texts: Sequence[str]) -> str:
    """Return the first of the texts, and how many more there are."""
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return f"{', '.join(texts[:_NAMED])}{more}"


#: What the message of ``Progressing`` says of pods that give no usable answer.
SILENT = "nothing is known of"


def tell_pods(snapshot: Snapshot[Work], shares: Iterable[Share], what: str = "") -> str:
    """Say how many pods of the ``shares`` compute ``what``, and of which nothing is known."""
    pods = {share.uid: share for share in shares}.values()
    # They may compute on, or have restarted.
    silent = [share for share in pods if snapshot.report_of(share).status is None]
    told = " ".join(filter(None, [number_of(len(pods) - len(silent), "pod computes", "pods compute"), what]))
    if not silent:
        return told
    causes = [f"{share.pod} ({snapshot.report_of(share).error or 'it has no address'})" for share in silent]
    return f"{told}; {SILENT} {first_few(causes)}"


def conditions_of(verdicts: Mapping[ConditionType, Verdict], now: datetime, generation: int) -> Iterable[Condition]:
    """Return the conditions that these verdicts (whether it is true, reason, message) make."""
    return [
        Condition(
            type=kind,
            status=str(true),
            reason=reason,
            message=shorten(message),
            observed_generation=generation,
            last_transition_time=now,
        )
        for kind, (true, reason, message) in verdicts.items()
    ]
