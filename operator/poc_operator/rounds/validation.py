# SPDX-License-Identifier: Apache-2.0
"""Mode Validate: pods recompute what a prover claims, and the fraud test judges all of it together."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from poc_operator.model.checks import Proof
from poc_operator.model.conditions import Reason
from poc_operator.model.results import ProofsVerdict
from poc_operator.model.spec import RoundSpec
from poc_operator.model.status import Outcome, RoundStatus, Sample, SlotState
from poc_operator.rounds.end import complete, failed
from poc_operator.rounds.requests import named_nonces
from poc_operator.rounds.snapshot import Snapshot, Step
from vllm_poc.wire.artifacts import Artifact
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse, Validation
from vllm_poc.wire.stat_test import StatTest, is_distance_mismatch, p_value

#: Proofs that a pod is asked to recompute in one request.
SAMPLE_NONCES = 200

#: So many mismatching nonces are kept in the status.
NAMED_MISMATCHES = 100


def digest(proofs: Sequence[Proof]) -> str:
    """Return the SHA-256 of the proofs, by which a later change is noticed."""
    return hashlib.sha256(json.dumps([proof.model_dump() for proof in proofs]).encode()).hexdigest()


def choose(snapshot: Snapshot, step: Step) -> Step:
    """Split the proofs; those that cannot be had are waited for."""
    proofs = snapshot.proofs
    if isinstance(proofs, str) or not proofs:
        return step
    samples = [
        Sample(first=first, count=min(SAMPLE_NONCES, len(proofs) - first), state=SlotState.WAITING)
        for first in range(0, len(proofs), SAMPLE_NONCES)
    ]
    return step.extended(samples=samples, proofs_digest=digest(proofs))


def request(snapshot: Snapshot, sample: Sample) -> GenerateRequest:
    """Return what a pod is asked: a verdict on artifacts, or the distances themselves."""
    spec, proofs = snapshot.round.spec, _proofs(snapshot, sample)
    asked = named_nonces(spec, [proof.nonce for proof in proofs])
    if spec.artifact is None:
        return asked
    artifacts = [Artifact(nonce=proof.nonce, vector_b64=proof.vector or "") for proof in proofs]
    test = StatTest(dist_threshold=float(spec.fraud.dist_threshold))
    return asked.model_copy(update={"validation": Validation(artifacts=artifacts), "stat_test": test})


def take(snapshot: Snapshot, sample: Sample, result: GeneratedResponse | ValidatedResponse) -> dict[str, Any]:
    """Return what the answer says about the sample. ValueError if it is about something else."""
    proofs, spec = _proofs(snapshot, sample), snapshot.round.spec
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
    if computed + len(result.not_computed) != sample.count:
        raise ValueError(f"its answer is about {computed} nonces instead of {sample.count}")
    return {"mismatches": mismatches, "not_computed": result.not_computed}


def verdict(spec: RoundSpec, samples: Sequence[Sample]) -> ProofsVerdict:
    """Put all samples to the fraud test."""
    mismatches = [nonce for sample in samples for nonce in sample.mismatches]
    missing = sum(len(sample.not_computed) for sample in samples)
    total = sum(sample.count for sample in samples) - missing
    probability = p_value(len(mismatches), total, float(spec.fraud.p_mismatch))
    return ProofsVerdict(
        total=total,
        mismatches=len(mismatches),
        mismatch_nonces=mismatches[:NAMED_MISMATCHES],
        not_computed=missing,
        p_value=f"{probability:.6g}",
        fraud=total > 0 and probability < float(spec.fraud.fraud_threshold),
    )


def proofs_changed(snapshot: Snapshot, status: RoundStatus) -> Outcome | None:
    """The proofs are not those that the samples were made of."""
    if status.proofs_digest is None or isinstance(snapshot.proofs, str):
        return None
    if digest(snapshot.proofs) == status.proofs_digest:
        return None
    return failed(Reason.PROOFS_CHANGED, "spec.proofs changed while they were checked: create another round for them")


def proofs_checked(_: Snapshot, status: RoundStatus) -> Outcome | None:
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


def _proofs(snapshot: Snapshot, sample: Sample) -> Sequence[Proof]:
    # Nothing is asked and no answer taken while the proofs cannot be had; a changed list has ended the round.
    assert not isinstance(snapshot.proofs, str)  # noqa: S101
    return snapshot.proofs[sample.first : sample.first + sample.count]
