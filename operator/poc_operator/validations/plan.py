# SPDX-License-Identifier: Apache-2.0
"""The chain of policies of a PoCValidation: ``POLICIES``, read from top to bottom, is what the operator does.

Its proofs stand in the object, in a ConfigMap, or in the gateway's answer.
"""

import hashlib
import json
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import TypeAdapter, ValidationError

from poc_operator.apis.v1alpha1.fields import Decode
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.schema import number_of
from poc_operator.apis.v1alpha1.status import Outcome, SlotState
from poc_operator.apis.v1alpha1.validation import (
    MAX_NAMED_MISMATCHES,
    PoCValidation,
    Proof,
    Sample,
    ValidationSpec,
    ValidationStatus,
    Verdict,
)
from poc_operator.planning.conditions import given_up, set_conditions
from poc_operator.planning.eligibility import Finding
from poc_operator.planning.lifecycle import LIMITS, close, complete, end_by, expire, failed, suspend
from poc_operator.planning.samples import (
    PodResult,
    ask_pods,
    bind_samples,
    count_samples,
    may_split,
    note_times,
    observe_samples,
    pace,
    samples_failed,
)
from poc_operator.planning.snapshot import Snapshot, Step, named_nonces
from vllm_poc.wire.artifacts import Artifact, chain_artifact
from vllm_poc.wire.generate import GenerateRequest, ValidatedResponse, Validation
from vllm_poc.wire.messages import Protocol
from vllm_poc.wire.stat_test import StatTest, is_distance_mismatch, p_value

_PROOFS = TypeAdapter(list[Proof])


def parse_proofs(where: str, text: str | bytes | None, protocol: Protocol) -> Sequence[Proof] | str:
    """Return the proofs in ``text``, or what is wrong with it; ``where`` says where it stands."""
    if text is None:
        return f"{where} does not exist: put a JSON list of proofs there"
    try:
        proofs = _PROOFS.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{where} is not a JSON list of proofs: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return _flaw(where, proofs, protocol) or proofs


def _flaw(where: str, proofs: Sequence[Proof], protocol: Protocol) -> str | None:
    if not proofs:
        return f"{where} has no proof"
    field = {Protocol.ARTIFACT: "vector", Protocol.DECODE: "chain", Protocol.DISTANCE: "distance"}[protocol]
    lacking = next((proof for proof in proofs if getattr(proof, field) is None), None)
    if lacking is not None:
        return f"{where}: nonce {lacking.nonce} has no {field}, which the validation's protocol needs"
    if len({proof.nonce for proof in proofs}) < len(proofs):
        return f"{where} names a nonce twice"
    return None


def in_order(proofs: Sequence[Proof]) -> Sequence[Proof]:
    """Return the proofs by nonce: to the API server, proofs in another order are the same."""
    return sorted(proofs, key=lambda proof: proof.nonce)


def digest(proofs: Sequence[Proof]) -> str:
    """Return the SHA-256 of the proofs, by which a later change is noticed."""
    return hashlib.sha256(json.dumps([proof.model_dump() for proof in proofs]).encode()).hexdigest()


_NO_INDEX = b"\xff"
#: Most proofs that a pod is asked to recompute in one request.
SAMPLE_NONCES = 200


@dataclass(frozen=True, kw_only=True)
class ValidationSnapshot(Snapshot[PoCValidation]):
    """What a validation sees. ``proofs`` are those that it checks, or why they cannot be had."""

    proofs: Sequence[Proof] | str


ValidationStep = Step[ValidationStatus]
Policy = Callable[[ValidationSnapshot, ValidationStep], ValidationStep]


def observe(snapshot: ValidationSnapshot, step: ValidationStep) -> ValidationStep:
    """Take what the pods answered."""
    status, proofs = step.status, snapshot.proofs
    if isinstance(proofs, str):
        samples, events = observe_samples(snapshot, status.samples, None)
        return step.extended(samples=samples, events=events)
    mismatches = list(status.mismatch_nonces)

    def take(sample: Sample, result: PodResult) -> Sample:
        found = _mismatches(snapshot.work.spec, _part(proofs, sample), result)
        mismatches.extend(found)
        return sample.model_copy(update={"mismatches": len(found), "not_computed": len(_left_out(result))})

    samples, events = observe_samples(snapshot, status.samples, take)
    return step.extended(samples=samples, events=events, mismatch_nonces=mismatches[:MAX_NAMED_MISMATCHES])


def _left_out(result: PodResult) -> Sequence[int]:
    """Return the nonces without a result. Reference pods name those whose chains they could not compare."""
    excluded = result.excluded_nonces if isinstance(result, ValidatedResponse) else None
    return result.not_computed or excluded or ()


def _mismatches(spec: ValidationSpec, proofs: Sequence[Proof], result: PodResult) -> list[int]:
    """Return the nonces that mismatch. ValueError if the answer is about others, or of another codebook."""
    if result.rebuilt_codebook:
        raise ValueError("its answer is of a codebook that is not the network's: set VLLM_POC_DECODE_CODEBOOK for it")
    if isinstance(result, ValidatedResponse):
        mismatches, computed = result.mismatch_nonces, result.n_total
    else:
        found = dict(zip(result.nonces or [], result.distances or [], strict=True))
        r_target, computed = float(spec.r_target or 0), len(found)
        mismatches = [
            proof.nonce
            for proof in proofs
            if proof.nonce in found
            and is_distance_mismatch(float(proof.distance or "inf"), found[proof.nonce], r_target)
        ]
    if computed + len(_left_out(result)) != len(proofs):
        raise ValueError(f"its answer is about {computed} nonces instead of {len(proofs)}")
    return mismatches


def conclude(snapshot: ValidationSnapshot, step: ValidationStep) -> ValidationStep:
    """Put all proofs to the test once all are checked."""
    samples = step.status.samples
    if not samples or any(sample.state is not SlotState.DONE for sample in samples):
        return step
    return step.extended(verdict=verdict(snapshot.work.spec, samples))


def verdict(spec: ValidationSpec, samples: Sequence[Sample]) -> Verdict:
    """Put all samples to the statistical test; `vllm_poc.wire.stat_test` has it."""
    mismatches = sum(sample.mismatches for sample in samples)
    missing = sum(sample.not_computed for sample in samples)
    total = sum(sample.count for sample in samples) - missing
    probability = p_value(mismatches, total, spec.thresholds.p_mismatch)
    return Verdict(
        total=total,
        mismatches=mismatches,
        not_computed=missing,
        p_value=f"{probability:.6g}",
        fraud=total > 0 and probability < spec.thresholds.p_value_threshold,
    )


def proofs_changed(snapshot: ValidationSnapshot, status: ValidationStatus) -> Outcome | None:
    """The proofs are not those that the samples were made of."""
    if status.proofs_digest is None or isinstance(snapshot.proofs, str):
        return None
    if digest(snapshot.proofs) == status.proofs_digest:
        return None
    message = "spec.proofs changed while they were checked: create another validation for them"
    return failed(Reason.PROOFS_CHANGED, message)


def proofs_checked(_: ValidationSnapshot, status: ValidationStatus) -> Outcome | None:
    """All proofs are recomputed."""
    found = status.verdict
    if found is None:
        return None
    if not found.total:
        return failed(Reason.NOTHING_COMPUTED, "no nonce had a finite result: look at the pods' logs and GPUs")
    message = f"{found.mismatches} of {found.total} nonces mismatch, p-value {found.p_value}"
    if found.fraud:
        return complete(f"{message}: fraud", Reason.FRAUD_DETECTED)
    return complete(f"{message}: no fraud", Reason.NO_FRAUD_DETECTED)


ENDS = (proofs_changed, proofs_checked, samples_failed, *LIMITS)


def end(snapshot: ValidationSnapshot, step: ValidationStep) -> ValidationStep:
    """End the validation when it is done, or will never be."""
    return end_by(ENDS, snapshot, step)


def choose_samples(snapshot: ValidationSnapshot, step: ValidationStep) -> ValidationStep:
    """Split the proofs evenly, once, when a pod can compute them; those that cannot be had are waited for.

    A pod gives no verdict if it cannot compare two chains and more than a tenth, which are few of a small rest.
    """
    proofs = snapshot.proofs
    if isinstance(proofs, str) or not may_split(snapshot, step):
        return step
    number = -(-len(proofs) // SAMPLE_NONCES)
    borders = [len(proofs) * place // number for place in range(number + 1)]
    samples = [Sample(first=first, count=end - first, state=SlotState.WAITING) for first, end in pairwise(borders)]
    return step.extended(samples=samples, proofs_digest=digest(proofs))


def ask(snapshot: ValidationSnapshot, step: ValidationStep) -> ValidationStep:
    """Give each waiting sample a pod, and ask the pods, as long as there are the proofs to compare with."""
    proofs = snapshot.proofs
    if step.status.stop_time:
        return step
    samples = bind_samples(snapshot, step.status.samples)
    if isinstance(proofs, str):
        return step.extended(samples=samples)
    asks = ask_pods(snapshot, samples, lambda sample: _request(snapshot.work.spec, _part(proofs, sample)))
    return step.extended(samples=samples, actions=asks)


def _request(spec: ValidationSpec, proofs: Sequence[Proof]) -> GenerateRequest:
    """Return what a pod is asked: a verdict on artifacts, or the distances themselves."""
    asked = named_nonces(spec, [proof.nonce for proof in proofs])
    if spec.protocol is Protocol.DISTANCE:
        return asked
    artifacts = [_artifact(proof, spec.decode) for proof in proofs]
    test = StatTest(dist_threshold=spec.thresholds.dist_threshold)
    return asked.model_copy(update={"validation": Validation(artifacts=artifacts), "stat_test": test})


def _artifact(proof: Proof, decode: Decode | None) -> Artifact:
    if decode is None:
        return Artifact(nonce=proof.nonce, vector_b64=proof.vector or "")
    try:
        leaf = b64decode(proof.chain or "", validate=True)
    except ValueError:
        leaf = b""
    # Pods compare the steps that a claim has. What is no whole chain is a claim of no index, which mismatches.
    return chain_artifact(proof.nonce, leaf if len(leaf) == decode.max_tokens + 1 else _NO_INDEX)


def _part(proofs: Sequence[Proof], sample: Sample) -> Sequence[Proof]:
    return proofs[sample.first : sample.first + sample.count]


def summarise(snapshot: ValidationSnapshot, step: ValidationStep) -> ValidationStep:
    """Fill in what ``kubectl get`` shows."""
    mismatches = sum(sample.mismatches for sample in step.status.samples if sample.state is SlotState.DONE)
    return count_samples(snapshot, step.extended(mismatches=mismatches))


def tell(snapshot: ValidationSnapshot, step: ValidationStep) -> ValidationStep:
    """Write the conditions."""
    blocked = (Reason.PROOFS_UNAVAILABLE, snapshot.proofs) if isinstance(snapshot.proofs, str) else None
    findings = list[Finding]()
    if step.status.not_computed:
        message = f"{number_of(step.status.not_computed, 'nonce')} left out: without a finite result"
        findings.append((Reason.RESULTS_REJECTED, message))
    if (lost := given_up(step.status, "sample")) is not None:
        findings.append(lost)
    return set_conditions(snapshot, step, pace=pace(snapshot, step), findings=findings, blocked=blocked)


POLICIES: tuple[Policy, ...] = (
    observe,  # what pods answered
    note_times,
    conclude,  # what follows from all answers
    end,  # must it end?
    suspend,  # may it run?
    choose_samples,  # which proofs are asked for together, once
    ask,  # which pod for which sample
    close,
    summarise,
    tell,
)


def plan(snapshot: ValidationSnapshot) -> ValidationStep:
    """Return the validation's next status, and the actions to take once it is recorded."""
    step: ValidationStep = Step(status=snapshot.work.status)
    if step.status.state.finished:
        return expire(snapshot, step)
    for policy in POLICIES:
        step = policy(snapshot, step)
    return step
