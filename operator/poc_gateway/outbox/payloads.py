# SPDX-License-Identifier: Apache-2.0
"""The body of a post: as a pod would have sent it."""

from base64 import b64encode

from poc_gateway.outbox.ledger import Part
from poc_gateway.store.rounds import RoundTerms
from vllm_poc.wire.artifacts import Artifact, Encoding
from vllm_poc.wire.base import Protocol
from vllm_poc.wire.callbacks import GeneratedArtifacts, GeneratedDistances


def generated(terms: RoundTerms, part: Part) -> str:
    """Return the JSON of ``/generated`` for a part."""
    payload = _artifacts(terms, part) if terms.protocol is Protocol.ARTIFACT else _distances(terms, part)
    return payload.model_dump_json(exclude_none=True)


def _artifacts(terms: RoundTerms, part: Part) -> GeneratedArtifacts:
    assert terms.k_dim is not None  # noqa: S101 - the artifact protocol has it
    vectors = [(item.nonce, item.vector) for item in part.items if item.vector is not None]
    return GeneratedArtifacts(
        public_key=terms.public_key,
        block_hash=terms.block_hash,
        block_height=terms.block_height,
        node_id=part.node_id,
        artifacts=[Artifact(nonce=nonce, vector_b64=b64encode(vector).decode()) for nonce, vector in vectors],
        encoding=Encoding(k_dim=terms.k_dim),
    )


def _distances(terms: RoundTerms, part: Part) -> GeneratedDistances:
    assert terms.r_target is not None  # noqa: S101 - the distance protocol has it
    distances = [(item.nonce, item.distance) for item in part.items if item.distance is not None]
    return GeneratedDistances(
        public_key=terms.public_key,
        block_hash=terms.block_hash,
        block_height=terms.block_height,
        node_id=part.node_id,
        nonces=[nonce for nonce, _ in distances],
        dist=[distance for _, distance in distances],
        r_target=terms.r_target,
    )
