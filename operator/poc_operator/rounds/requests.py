# SPDX-License-Identifier: Apache-2.0
"""The orders to pods: to compute a slot, or named nonces."""

from collections.abc import Sequence

from pydantic import AnyHttpUrl

from poc_operator.model.spec import RoundSpec
from poc_operator.model.status import Assignment
from poc_operator.rounds.snapshot import Snapshot
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import ArtifactParams, InitGenerateRequest

#: Every distance lies below it.
LARGEST_DISTANCE = 2.0


def artifact_params(spec: RoundSpec) -> ArtifactParams | None:
    """Return the parameters of the artifact protocol, if the round is of it."""
    if spec.artifact is None:
        return None
    return ArtifactParams(model=spec.model.name, seq_len=spec.model.seq_len, k_dim=spec.artifact.k_dim)


def named_nonces(
    spec: RoundSpec, nonces: Sequence[int], *, block_hash: str | None = None, beside_round: bool = False
) -> GenerateRequest:
    """Ask for the artifacts or distances of these nonces, and wait for them."""
    artifact = artifact_params(spec)
    r_target = float(spec.r_target) if spec.r_target is not None else LARGEST_DISTANCE
    return GenerateRequest(
        block_hash=block_hash or spec.block_hash,
        block_height=spec.block_height,
        public_key=spec.public_key,
        batch_size=spec.batch_size,
        nonces=list(nonces),
        wait=True,
        beside_round=beside_round,
        poc_stronger_rng=spec.model.strong_rng,
        params=artifact,
        r_target=None if artifact else r_target,
        seq_len=None if artifact else spec.model.seq_len,
    )


def start_request(snapshot: Snapshot, groups: int, slot: Assignment) -> InitGenerateRequest:
    """Return the pod's order for a slot. The round id makes a repetition harmless."""
    spec = snapshot.round.spec
    callback = snapshot.gateway.callback if snapshot.gateway is not None else spec.callback_url
    return InitGenerateRequest(
        block_hash=spec.block_hash,
        block_height=spec.block_height,
        public_key=spec.public_key,
        batch_size=spec.batch_size,
        node_id=slot.node,
        node_count=spec.nodes.count,
        group_id=slot.group,
        n_groups=groups,
        start_index=slot.start,
        end_index=slot.end,
        round_id=snapshot.round.id,
        url=AnyHttpUrl(callback) if callback else None,
        poc_stronger_rng=spec.model.strong_rng,
        r_target=float(spec.r_target) if spec.r_target is not None else None,
        seq_len=spec.model.seq_len if spec.artifact is None else None,
        params=artifact_params(spec),
    )
