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

from collections.abc import Sequence

from vllm_poc.server.engine import EngineError
from vllm_poc.server.slices import Item
from vllm_poc.wire.artifacts import decode_vector
from vllm_poc.wire.callbacks import ValidatedDistances
from vllm_poc.wire.fraud import is_distance_mismatch, is_mismatch, p_value
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.proofs import ProofBatch, ProofVerdict
from vllm_poc.wire.requests import SlotRequest
from vllm_poc.wire.results import ValidatedResponse, Verdict


class ArtifactComparison:
    """Compares artifacts as they are computed, a slice at a time, so that none has to be kept."""

    def __init__(self, request: GenerateRequest) -> None:
        assert request.validation is not None  # noqa: S101 - the caller looked
        assert request.params is not None  # noqa: S101 - by the request's own rules
        self._nonces = request.nonces
        self._test = request.fraud_test
        self._k_dim = request.params.k_dim
        self._missing = {artifact.nonce: artifact.vector_b64 for artifact in request.validation.artifacts}
        self._mismatches: list[int] = []

    def add(self, items: Sequence[Item]) -> None:
        """Compare computed artifacts with the received ones."""
        for nonce, vector_b64 in items:
            computed = decode_vector(str(vector_b64), self._k_dim)
            if is_mismatch(computed, self._missing.pop(nonce), self._test.dist_threshold):
                self._mismatches.append(nonce)

    def response(self, request_id: str) -> ValidatedResponse:
        """Return the verdict over what was computed. EngineError if nothing was."""
        verdict = _verdict(
            self._mismatches,
            len(self._nonces) - len(self._missing),
            p_mismatch=self._test.p_mismatch,
            fraud_threshold=self._test.fraud_threshold,
        )
        missing = [nonce for nonce in self._nonces if nonce in self._missing]
        return ValidatedResponse(request_id=request_id, not_computed=missing, **verdict.model_dump())


def proof_verdict(
    round_: SlotRequest, batch: ProofBatch, items: Sequence[Item]
) -> tuple[ProofVerdict, ValidatedDistances]:
    """Return the answer and the callback about a batch. EngineError if nothing was computed."""
    assert round_.r_target is not None  # noqa: S101 - by the round's protocol
    received, r_target = dict(zip(batch.nonces, batch.dist, strict=True)), round_.r_target
    computed = {nonce: float(value) for nonce, value in items}
    verdict = _verdict(
        [nonce for nonce, distance in computed.items() if is_distance_mismatch(received[nonce], distance, r_target)],
        len(computed),
        p_mismatch=round_.p_mismatch,
        fraud_threshold=round_.fraud_threshold,
    ).model_dump()
    missing = [nonce for nonce in batch.nonces if nonce not in computed]
    distances = [computed.get(nonce) for nonce in batch.nonces]
    callback = ValidatedDistances(
        public_key=batch.public_key,
        block_hash=round_.block_hash,
        block_height=round_.block_height,
        nonces=list(computed),
        computed_distances=list(computed.values()),
        received_distances=[received[nonce] for nonce in computed],
        valid=[distance < r_target for distance in computed.values()],
        not_computed=missing,
        **verdict,
    )
    return ProofVerdict(computed_distances=distances, not_computed=missing, **verdict), callback


def _verdict(mismatches: list[int], n_total: int, *, p_mismatch: float, fraud_threshold: float) -> Verdict:
    if not n_total:
        raise EngineError("no verdict: every nonce came out NaN or infinite on this server; check its GPU")
    probability = p_value(len(mismatches), n_total, p_mismatch)
    return Verdict(
        n_total=n_total,
        n_mismatch=len(mismatches),
        mismatch_nonces=mismatches,
        p_value=probability,
        fraud_detected=probability < fraud_threshold,
    )
