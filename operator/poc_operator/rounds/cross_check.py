# SPDX-License-Identifier: Apache-2.0
"""``spec.crossCheck``: the pods of a round recompute some nonces of one of them, and those that differ are named.

What a sick GPU computes looks like any other result; only another GPU can tell. The nonces are compared here and
delivered to nobody.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, CrossCheck, CrossCheckStatus, Deviation, RoundSpec
from poc_operator.apis.v1alpha1.schema import number_of
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import Answer, PodReport
from poc_operator.planning.snapshot import AskPod, WorkEvent, by_number, named_nonces
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.artifacts import decode_vector
from vllm_poc.wire.generate import GeneratedResponse
from vllm_poc.wire.messages import Protocol

#: So long the pods are waited for; those that have not answered by then are not compared.
PATIENCE = timedelta(seconds=60)

#: Largest difference where the round names none: the network's narrowest threshold for vectors; for distances more
#: than rounding makes, and less than lies between two nonces.
DIFFERENCES = {Protocol.ARTIFACT: 0.2, Protocol.DISTANCE: 0.002}

#: So many deviating pods are named in the status.
MAX_NAMED = 20

Values = Mapping[int, Sequence[float] | None]  # by nonce; None if it came out NaN or infinite


def cross_check(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Begin a comparison when one is due, and end the one that is under way."""
    spec, check = snapshot.round.spec.cross_check, step.status.cross_check
    if spec is None or step.status.stop_time is not None:
        return step
    slots = step.status.assignments
    running = [slot for slot in slots if slot.state is SlotState.RUNNING and may_be_asked(snapshot.report_of(slot))]
    if check is not None and check.pending:
        return _compare(snapshot, step, check, running) or _ask(snapshot, step, check, running)
    begun = _begin(snapshot, spec, check, running)
    return step if begun is None else _ask(snapshot, step.extended(cross_check=begun), begun, running)


def may_be_asked(report: PodReport) -> bool:
    """Whether the pod can compute named nonces now: one that cannot resume answers after its round."""
    status = report.status
    return status is not None and (report.resumes or status.state is not PowState.GENERATING)


def _begin(
    snapshot: RoundSnapshot, spec: CrossCheck, check: CrossCheckStatus | None, running: Sequence[Assignment]
) -> CrossCheckStatus | None:
    """Choose the last computed nonces of one pod, another one each time."""
    rivals = snapshot.round.status.rivals
    if rivals is not None and rivals.pending:  # a pod answers one question at a time
        return None
    if check is not None and (snapshot.now - check.time).total_seconds() < spec.interval_seconds:
        return None
    number = check.number + 1 if check else 1
    ready = [slot for slot in running if slot.next >= spec.nonces]
    if len(running) < 2 or not ready:  # noqa: PLR2004 - one pod has nobody to differ from
        return None
    subject = ready[number % len(ready)]
    nonces = snapshot.partition_of(subject).nonces(subject.next - spec.nonces, spec.nonces)
    before = {"deviating": check.deviating, "deviating_pods": check.deviating_pods} if check else {}
    begun = CrossCheckStatus(time=snapshot.now, pending=True, number=number, nonces=nonces)
    return begun.model_copy(update=before)


def _ask(snapshot: RoundSnapshot, step: RoundStep, check: CrossCheckStatus, running: Sequence[Assignment]) -> RoundStep:
    request = named_nonces(snapshot.round.spec, check.nonces, beside_round=True)
    pods = [pod for slot in running if (pod := snapshot.pod_of(slot)) is not None]
    return step.extended(actions=[AskPod(pod=pod, key=_key(check), request=request) for pod in pods])


def _key(check: CrossCheckStatus) -> str:
    return f"check {check.number}"


def _compare(
    snapshot: RoundSnapshot, step: RoundStep, check: CrossCheckStatus, running: Sequence[Assignment]
) -> RoundStep | None:
    """Return the step with the comparison's result; None if pods have yet to answer."""
    answers = {slot.pod or "": snapshot.report_of(slot).answer for slot in running}
    known = {pod: answer for pod, answer in answers.items() if answer is not None and answer.key == _key(check)}
    if len(known) < len(running) and snapshot.now < check.time + PATIENCE:
        return None
    spec = snapshot.round.spec
    values = {pod: found for pod, answer in known.items() if (found := values_of(spec, answer)) is not None}
    differing = deviations(values, check.nonces, max_difference(spec))
    named = differing[:MAX_NAMED]
    result = {"compared": len(values), "deviating": named, "deviating_pods": len(differing)}
    done = check.model_copy(update={"pending": False, "nonces": [], **result})
    news = differing and [one.pod for one in named] != [one.pod for one in check.deviating]
    events = [WorkEvent(reason=Reason.PODS_DISAGREE, message=describe(done), warning=True)] if news else []
    return step.extended(cross_check=done, events=events)


def max_difference(spec: RoundSpec) -> float:
    """Return how far two honest results of a nonce may lie apart."""
    told = spec.cross_check.max_difference if spec.cross_check else None
    return float(told) if told is not None else DIFFERENCES[spec.protocol]


def values_of(spec: RoundSpec, answer: Answer) -> Values | None:
    """Return what a pod computed; None if it computed nothing, as when chat left no room for it."""
    result = answer.result
    if not isinstance(result, GeneratedResponse):
        return None
    missing: dict[int, Sequence[float] | None] = dict.fromkeys(result.not_computed)
    if spec.artifact is None:
        distances = zip(result.nonces or [], result.distances or [], strict=False)
        return missing | {nonce: (distance,) for nonce, distance in distances}
    return missing | {
        item["nonce"]: vector_of(item["vector_b64"], spec.artifact.k_dim) for item in result.artifacts or []
    }


def vector_of(text: str, k_dim: int) -> Sequence[float] | None:
    """Return the numbers of a vector in base64; None if it cannot be read."""
    try:
        return decode_vector(text, k_dim)
    except ValueError:
        return None


def deviations(values: Mapping[str, Values], nonces: Sequence[int], limit: float) -> list[Deviation]:
    """Return the pods that for some nonce do not belong to a majority whose values lie within ``limit``."""
    mismatches: Counter[str] = Counter()
    for nonce in nonces:
        for group in _groups({pod: found.get(nonce) for pod, found in values.items()}, limit):
            if 2 * len(group) <= len(values):
                mismatches.update(group)
    return [Deviation(pod=pod, mismatches=mismatches[pod]) for pod in sorted(mismatches, key=by_number)]


def _groups(values: Mapping[str, Sequence[float] | None], limit: float) -> list[list[str]]:
    """Put pods together whose values lie within ``limit`` of the group's first; one without a value stays alone."""
    groups: list[tuple[Sequence[float] | None, list[str]]] = []
    for pod, value in values.items():
        group = next((pods for first, pods in groups if alike(first, value, limit)), None)
        if group is None:
            groups.append((value, [pod]))
        else:
            group.append(pod)
    return [pods for _, pods in groups]


def alike(one: Sequence[float] | None, other: Sequence[float] | None, limit: float) -> bool:
    """Whether two results are those of the same nonce."""
    return one is not None and other is not None and math.dist(one, other) <= limit


def describe(check: CrossCheckStatus) -> str:
    """Say which pods differ."""
    pods = ", ".join(f"{found.pod} ({number_of(found.mismatches, 'nonce')})" for found in check.deviating[:3])
    more = check.deviating_pods - 3
    return f"{pods}{f' and {more} more' if more > 0 else ''} of {check.compared} pods computed something else than most"
