# SPDX-License-Identifier: Apache-2.0
"""The parts of orders to pods that several kinds have: the protocol's parameters, and requests for named nonces."""

from collections.abc import Sequence

from poc_operator.apis.v1alpha1.fields import SeededModel
from poc_operator.apis.v1alpha1.work import ProtocolSpec, WorkSpec
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import ArtifactParams

#: Every distance lies below it.
LARGEST_DISTANCE = 2.0


def artifact_params(spec: WorkSpec) -> ArtifactParams | None:
    """Return the parameters of the artifact protocol, if the work is of it."""
    if not isinstance(spec, ProtocolSpec) or spec.artifact is None:
        return None
    return ArtifactParams(model=spec.model.name, seq_len=spec.model.seq_len, k_dim=spec.artifact.k_dim)


def named_nonces(
    spec: WorkSpec, nonces: Sequence[int], *, block_hash: str | None = None, beside_round: bool = False
) -> GenerateRequest:
    """Ask for the artifacts or distances of these nonces, and wait for them."""
    artifact = artifact_params(spec)
    told = spec.r_target if isinstance(spec, ProtocolSpec) else None
    r_target = float(told) if told is not None else LARGEST_DISTANCE
    return GenerateRequest(
        block_hash=block_hash or spec.block_hash,
        block_height=spec.block_height,
        public_key=spec.public_key,
        batch_size=spec.batch_size,
        nonces=list(nonces),
        wait=True,
        beside_round=beside_round,
        poc_stronger_rng=isinstance(spec.model, SeededModel) and spec.model.strong_rng,
        params=artifact,
        r_target=None if artifact else r_target,
        seq_len=None if artifact else spec.model.seq_len,
    )
