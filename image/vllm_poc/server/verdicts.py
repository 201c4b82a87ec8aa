# SPDX-License-Identifier: Apache-2.0
"""The verdict on what others claim of nonces, from what this server computes of them.

A verdict comes from the nonces that mismatch. Vectors do if the two lie further apart than ``dist_threshold`` (L2), or
if the received one does not decode to k_dim finite numbers; distances, if the claim or the recomputed distance is not
below ``r_target``; chains, if some step's index is not the claimed one, and the largest margin of such steps exceeds
tau. One such nonce is no proof: near the target an honest prover on another GPU lands on the other side now and then,
and in a batch that is large enough this is certain. So the number of mismatches is put to the binomial test of
`vllm_poc.wire.stat_test`. In small batches (20 nonces, by default) a single mismatch still is fraud. A nonce that this
server cannot compute leaves the sample: it is neither a mismatch nor a pass. If none can be computed, or too few chains
can, there is no verdict, since clients read an empty sample as guilt.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial

from vllm_poc.server.bodies import PIECE, off_loop
from vllm_poc.server.engine import EngineError
from vllm_poc.server.scheduler import ComputedChain, Item, distance_of
from vllm_poc.wire.artifacts import Artifact, decode_vector
from vllm_poc.wire.callbacks import ValidatedDistances
from vllm_poc.wire.chain_verdict import NonceVerdict, NoVerdictError, chain_verdict
from vllm_poc.wire.generate import GenerateRequest, ProofBatch, ProofVerdict, ValidatedResponse
from vllm_poc.wire.messages import Protocol, SlotRequest
from vllm_poc.wire.stat_test import StatTest, Verdict, effective_test, is_distance_mismatch, is_mismatch

#: What was computed, slice by slice.
Slices = AsyncIterator[Sequence[Item]]


async def artifact_verdict(request: GenerateRequest, request_id: str, slices: Slices) -> ValidatedResponse:
    """Return the verdict on the request's vectors or chains. EngineError if there is none.

    They are compared a slice at a time, so that chat need not wait for all of them.
    """
    if request.protocol is Protocol.DECODE:
        return await _chains_verdict(request, request_id, slices)
    return await _vectors_verdict(request, request_id, slices)


async def _vectors_verdict(request: GenerateRequest, request_id: str, slices: Slices) -> ValidatedResponse:
    assert request.validation is not None  # noqa: S101 - the caller looked
    assert request.params is not None  # noqa: S101 - by the request's own rules
    test = request.stat_test or StatTest()
    artifacts = request.validation.artifacts
    missing = await off_loop(len(artifacts), partial(_taken, artifacts))
    mismatches: list[int] = []
    async for items in slices:
        for nonce, vector_b64 in items:
            computed = decode_vector(str(vector_b64), request.params.k_dim)
            if is_mismatch(computed, missing.pop(nonce), test.dist_threshold):
                mismatches.append(nonce)
    not_computed = [nonce for nonce in request.nonces if nonce in missing]
    judge = partial(_verdict, test, mismatches, nonces=request.nonces, not_computed=not_computed)
    verdict = await off_loop(len(request.nonces), judge)
    return ValidatedResponse(request_id=request_id, **verdict.model_dump())


async def _chains_verdict(request: GenerateRequest, request_id: str, slices: Slices) -> ValidatedResponse:
    test = effective_test(request.stat_test)
    compared: list[NonceVerdict] = []
    async for items in slices:
        for nonce, chain in items:
            if isinstance(chain, ComputedChain) and chain.compared is not None:
                compared.append(NonceVerdict.of(nonce, chain.compared, test.dist_threshold))
    try:
        verdict = await off_loop(len(request.nonces), partial(chain_verdict, request.nonces, compared, test))
    except NoVerdictError as error:
        raise EngineError(str(error)) from error
    return ValidatedResponse(request_id=request_id, per_nonce=compared, **verdict.model_dump())


def _taken(artifacts: list[Artifact]) -> dict[int, str]:
    """Return the vectors by nonce, and empty the list bit by bit: to drop it at once would take long."""
    taken: dict[int, str] = {}
    while artifacts:
        taken.update((artifact["nonce"], artifact["vector_b64"]) for artifact in artifacts[-PIECE:])
        del artifacts[-PIECE:]
    return taken


def proof_verdict(
    round_: SlotRequest, batch: ProofBatch, items: Sequence[Item]
) -> tuple[ProofVerdict, ValidatedDistances]:
    """Return the answer and the callback about a batch. EngineError if nothing was computed."""
    assert round_.r_target is not None  # noqa: S101 - by the round's protocol
    received, r_target = dict(zip(batch.nonces, batch.dist, strict=True)), round_.r_target
    computed = {nonce: distance_of(value) for nonce, value in items}
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
    return Verdict.of(test, mismatches, n_total, not_computed)
