# SPDX-License-Identifier: Apache-2.0
"""Rivals: pods delivered different results for a nonce. A third pod computes it, and the gateway is told who is right.

The gateway forwards none of them before that. What a third pod computes decides, whoever came first. A pod that has
delivered one of the results is never asked. Without another pod it stays undecided, and the round says so.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import RivalCheckStatus, RivalDecision, RoundSpec, RoundStatus
from poc_operator.apis.v1alpha1.schema import number_of
from poc_operator.observed import Decision, PodView, RivalNonce, RivalResult, Truth
from poc_operator.planning.snapshot import AskPod, DecideRivals, WorkEvent, named_nonces
from poc_operator.rounds.cross_check import PATIENCE, alike, max_difference, may_be_asked, values_of, vector_of
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from vllm_poc.wire.messages import Protocol

#: Nonces of one question.
MOST_NONCES = 16
#: Pause after a pod that had no answer.
RETRY = timedelta(seconds=30)

Values = Mapping[int, Sequence[float] | None]


def decide_rivals(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Let a pod compute what others disagree about, and tell the gateway what follows."""
    if snapshot.gateway is None or snapshot.round.spec.protocol is Protocol.DECODE:
        # Chains of honest pods fork: the first one counts, as for the network.
        return step
    check = step.status.rivals
    if check is not None and check.decisions:
        return _tell(snapshot, step, check)
    if check is not None and check.pending:
        return _judge(snapshot, step, check)
    begun = _begin(snapshot, step, check)
    return step if begun is None else _ask(snapshot, step.extended(rivals=begun), begun)


def under_way(status: RoundStatus) -> bool:
    """Whether a pod computes what others disagree about, or the gateway has yet to learn of it."""
    return status.rivals is not None and (status.rivals.pending or bool(status.rivals.decisions))


def _begin(snapshot: RoundSnapshot, step: RoundStep, check: RivalCheckStatus | None) -> RivalCheckStatus | None:
    """Choose a pod, another one each time, and nonces of which it has delivered no result."""
    cross_check = step.status.cross_check
    if cross_check is not None and cross_check.pending:  # a pod answers one question at a time
        return None
    if check is not None and not check.answered and snapshot.now < check.time + RETRY:
        return None
    number = check.number + 1 if check is not None else 1
    asked = [pod for pod, report in snapshot.answering if may_be_asked(report) and not pod.barred]
    able = {pod.uid: nonces for pod in asked if (nonces := _unknown_to(snapshot, step.status, pod))}
    pods = [pod for pod in asked if pod.uid in able]
    if not pods:
        return None
    pod = pods[number % len(pods)]
    nonces = able[pod.uid][:MOST_NONCES]
    return RivalCheckStatus(
        time=snapshot.now, number=number, pending=True, answered=False, pod=pod.name, uid=pod.uid, nonces=nonces
    )


def _unknown_to(snapshot: RoundSnapshot, status: RoundStatus, pod: PodView) -> list[int]:
    """Return the nonces with rivals of which this pod has delivered no result, nor computes the slot."""
    assert snapshot.gateway is not None  # noqa: S101 - checked above
    count = snapshot.round.spec.nodes.count
    own = {slot.node + slot.group * count for slot in status.assignments if slot.uid == pod.uid}
    found = snapshot.gateway.rivals
    return [one.nonce for one in found if pod.name not in _authors(one) and one.nonce % max(1, status.slots) not in own]


def _authors(rival: RivalNonce) -> set[str | None]:
    return {one.pod for one in (rival.stored, *rival.others)}


def _ask(snapshot: RoundSnapshot, step: RoundStep, check: RivalCheckStatus) -> RoundStep:
    pod = next((pod for pod, _ in snapshot.answering if pod.uid == check.uid), None)
    if pod is None or snapshot.now >= check.time + PATIENCE:
        return step.extended(rivals=check.model_copy(update={"pending": False, "nonces": []}))
    request = named_nonces(snapshot.round.spec, check.nonces, beside_round=True)
    return step.extended(actions=[AskPod(pod=pod, key=_key(check), request=request)])


def _key(check: RivalCheckStatus) -> str:
    return f"rivals {check.number}"


def _judge(snapshot: RoundSnapshot, step: RoundStep, check: RivalCheckStatus) -> RoundStep:
    assert snapshot.gateway is not None  # noqa: S101 - checked above
    report = snapshot.reports.get(check.uid)
    answer = report.answer if report is not None else None
    if answer is None or answer.key != _key(check):
        return _ask(snapshot, step, check)
    spec = snapshot.round.spec
    computed = values_of(spec, answer) or {}
    rivals = [one for one in snapshot.gateway.rivals if one.nonce in check.nonces]
    decisions = [found for one in rivals if (found := _decision(spec, one, computed.get(one.nonce))) is not None]
    ended = {"pending": False, "nonces": [], "answered": bool(decisions), "decisions": decisions}
    judged = check.model_copy(update=ended)
    liars = _liars(rivals, decisions)
    named = ", ".join(f"pod {pod} ({number_of(count, 'nonce')})" for pod, count in liars.most_common(3))
    message = f"{named} delivered what pod {check.pod} computes otherwise"
    events = [WorkEvent(reason=Reason.RESULTS_FORGED, message=message, warning=True)] if liars else []
    return _tell(snapshot, step.extended(rivals=judged, events=events), judged)


def _decision(spec: RoundSpec, rival: RivalNonce, computed: Sequence[float] | None) -> RivalDecision | None:
    """Return which results are honest; None if the pod could not compute the nonce."""
    if computed is None:
        return None
    limit, up_to = max_difference(spec), max(one.conflict or 0 for one in rival.others)
    honest = [one.conflict for one in rival.others if alike(_value(spec, one), computed, limit)]
    others = [conflict for conflict in honest if conflict is not None]
    if alike(_value(spec, rival.stored), computed, limit):
        return RivalDecision(nonce=rival.nonce, alike=others, up_to=up_to)
    if not others:
        return RivalDecision(nonce=rival.nonce, forged=True, up_to=up_to)
    return RivalDecision(nonce=rival.nonce, conflict=others[0], alike=others[1:], up_to=up_to)


def _value(spec: RoundSpec, result: RivalResult) -> Sequence[float] | None:
    if spec.artifact is None:
        return (result.distance,) if result.distance is not None else None
    return vector_of(result.vector_b64, spec.artifact.k_dim) if result.vector_b64 is not None else None


def _liars(rivals: Sequence[RivalNonce], decisions: Sequence[RivalDecision]) -> Counter[str]:
    of_nonce = {one.nonce: one for one in rivals}
    liars = Counter[str]()
    for found in decisions:
        rival, honest = of_nonce[found.nonce], {found.conflict, *found.alike}
        refuted = [one.pod for one in rival.others if one.conflict not in honest]
        refuted += [rival.stored.pod] if _truth(found) is not Truth.STORED else []
        liars.update(pod or "(unknown)" for pod in refuted)
    return liars


def _tell(snapshot: RoundSnapshot, step: RoundStep, check: RivalCheckStatus) -> RoundStep:
    """Let the gateway know, until it does not ask any more."""
    assert snapshot.gateway is not None  # noqa: S101 - checked above
    asked = {one.nonce for one in snapshot.gateway.rivals}
    left = [found for found in check.decisions if found.nonce in asked]
    if len(left) < len(check.decisions):
        step = step.extended(rivals=check.model_copy(update={"decisions": left}))
    told = [
        Decision(pod=check.pod, truth=_truth(found), **found.model_dump(exclude={"forged"}, by_alias=False))
        for found in left
    ]
    return step.extended(actions=[DecideRivals(decisions=told)] if told else [])


def _truth(found: RivalDecision) -> Truth:
    if found.forged:
        return Truth.NEITHER
    return Truth.STORED if found.conflict is None else Truth.OTHER
