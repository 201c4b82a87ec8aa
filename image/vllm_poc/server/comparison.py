# SPDX-License-Identifier: Apache-2.0
"""Verdicts on what others claim to have computed, and which rule each protocol follows.

Artifacts: a nonce mismatches if its vectors lie further apart than ``dist_threshold`` (L2), or if the
received one does not decode to k_dim finite numbers.

Distances: a nonce mismatches if the claim or the recomputed distance is not below ``r_target``. One such
nonce is no proof: near the target an honest prover on another GPU lands on the other side now and then, and
in a batch that is large enough this is certain. So the number of mismatches is put to the binomial test with
the round's ``p_mismatch`` and ``fraud_threshold``, as for artifacts. In small batches (20 nonces, by default)
a single mismatch still is fraud.

A nonce that this server cannot compute leaves the sample: it is neither a mismatch nor a pass. If none can
be computed there is no verdict, since clients read an empty sample as guilt.
"""

from collections.abc import AsyncIterator, Sequence

from vllm_poc.server.engine import EngineError
from vllm_poc.server.scheduler import Item
from vllm_poc.wire.artifacts import decode_vector
from vllm_poc.wire.callbacks import ValidatedDistances
from vllm_poc.wire.generate import GenerateRequest, ProofBatch, ProofVerdict, ValidatedResponse
from vllm_poc.wire.messages import SlotRequest
from vllm_poc.wire.stat_test import StatTest, Verdict, is_distance_mismatch, is_mismatch, p_value


async def artifact_verdict(
    request: GenerateRequest, request_id: str, slices: AsyncIterator[Sequence[Item]]
) -> ValidatedResponse:
    """Return the verdict on the request's artifacts. EngineError if nothing was computed.

    They are compared a slice at a time, so that chat need not wait for all of them.
    """
    assert request.validation is not None  # noqa: S101 - the caller looked
    assert request.params is not None  # noqa: S101 - by the request's own rules
    test = request.stat_test or StatTest()
    missing = {artifact.nonce: artifact.vector_b64 for artifact in request.validation.artifacts}
    mismatches: list[int] = []
    async for items in slices:
        for nonce, vector_b64 in items:
            computed = decode_vector(str(vector_b64), request.params.k_dim)
            if is_mismatch(computed, missing.pop(nonce), test.dist_threshold):
                mismatches.append(nonce)
    not_computed = [nonce for nonce in request.nonces if nonce in missing]
    verdict = _verdict(test, mismatches, nonces=request.nonces, not_computed=not_computed)
    return ValidatedResponse(request_id=request_id, **verdict.model_dump())


def proof_verdict(
    round_: SlotRequest, batch: ProofBatch, items: Sequence[Item]
) -> tuple[ProofVerdict, ValidatedDistances]:
    """Return the answer and the callback about a batch. EngineError if nothing was computed."""
    assert round_.r_target is not None  # noqa: S101 - by the round's protocol
    received, r_target = dict(zip(batch.nonces, batch.dist, strict=True)), round_.r_target
    computed = {nonce: float(value) for nonce, value in items}
    mismatches = [
        nonce for nonce, distance in computed.items() if is_distance_mismatch(received[nonce], distance, r_target)
    ]
    not_computed = [nonce for nonce in batch.nonces if nonce not in computed]
    verdict = _verdict(round_, mismatches, nonces=batch.nonces, not_computed=not_computed).model_dump()
    callback = ValidatedDistances(
        public_key=batch.public_key,
        block_hash=round_.block_hash,
        block_height=round_.block_height,
        nonces=list(computed),
        computed_distances=list(computed.values()),
        received_distances=[received[nonce] for nonce in computed],
        valid=[distance < r_target for distance in computed.values()],
        **verdict,
    )
    distances = [computed.get(nonce) for nonce in batch.nonces]
    return ProofVerdict(computed_distances=distances, **verdict), callback


def _verdict(
    test: StatTest | SlotRequest, mismatches: list[int], *, nonces: Sequence[int], not_computed: list[int]
) -> Verdict:
    n_total = len(nonces) - len(not_computed)
    if not n_total:
        raise EngineError("no verdict: every nonce came out NaN or infinite on this server; check its GPU")
    probability = p_value(len(mismatches), n_total, test.p_mismatch)
    return Verdict(
        n_total=n_total,
        n_mismatch=len(mismatches),
        mismatch_nonces=mismatches,
        p_value=probability,
        fraud_detected=probability < test.fraud_threshold,
        not_computed=not_computed,
    )
