# SPDX-License-Identifier: Apache-2.0
"""Results in the words of the two protocols: callback payloads and answers."""

from collections.abc import Sequence
from uuid import uuid4

from vllm_poc.server.slices import Item
from vllm_poc.wire.artifacts import Artifact, Encoding
from vllm_poc.wire.base import WireMessage
from vllm_poc.wire.callbacks import GeneratedArtifacts, GeneratedDistances
from vllm_poc.wire.requests import GenerateRequest, InitGenerateRequest, RoundRequest
from vllm_poc.wire.responses import GeneratedResponse, RoundConfig

Items = Sequence[Item]


def valid_items(request: RoundRequest, items: Items) -> list[Item]:
    """Return the items that count: all artifacts; distances strictly below ``r_target``."""
    r_target = request.r_target
    if r_target is None:
        return list(items)
    return [(nonce, value) for nonce, value in items if float(value) < r_target]


def callback(request: InitGenerateRequest, items: Items) -> WireMessage:
    """Return the payload that delivers valid items."""
    if request.params is not None:
        return GeneratedArtifacts(
            public_key=request.public_key,
            block_hash=request.block_hash,
            block_height=request.block_height,
            node_id=request.node_id,
            artifacts=_artifacts(items),
            encoding=Encoding(k_dim=request.params.k_dim),
        )
    assert request.r_target is not None  # noqa: S101 - one of the two is set, by validation
    return GeneratedDistances(
        public_key=request.public_key,
        block_hash=request.block_hash,
        block_height=request.block_height,
        node_id=request.node_id,
        nonces=[nonce for nonce, _ in items],
        dist=[float(value) for _, value in items],
        r_target=request.r_target,
    )


def generated(request: GenerateRequest, items: Items) -> GeneratedResponse:
    """Return the answer to ``generate``. Nonces whose result is not finite are left out."""
    request_id = str(uuid4())
    if request.params is not None:
        encoding = Encoding(k_dim=request.params.k_dim)
        return GeneratedResponse(request_id=request_id, artifacts=_artifacts(items), encoding=encoding)
    valid = valid_items(request, items)
    return GeneratedResponse(
        request_id=request_id,
        nonces=[nonce for nonce, _ in items],
        distances=[float(value) for _, value in items],
        total_checked=len(items),
        total_valid=len(valid),
        valid_nonces=[nonce for nonce, _ in valid],
        valid_distances=[float(value) for _, value in valid],
    )


def round_config(request: InitGenerateRequest) -> RoundConfig:
    """Return the round as status tells it."""
    params = request.params
    return RoundConfig(
        block_hash=request.block_hash,
        block_height=request.block_height,
        public_key=request.public_key,
        node_id=request.node_id,
        node_count=request.node_count,
        group_id=request.group_id,
        n_groups=request.n_groups,
        seq_len=request.effective_seq_len,
        k_dim=params.k_dim if params is not None else None,
        protocol=request.protocol,
        model=params.model if params is not None else None,
        batch_size=request.batch_size,
        url=request.receiver,
        poc_stronger_rng=request.poc_stronger_rng,
        use_layer_hooks=request.layer_hooks,
        use_sign_flips=request.sign_flips,
    )


def _artifacts(items: Items) -> list[Artifact]:
    return [Artifact(nonce=nonce, vector_b64=str(value)) for nonce, value in items]
