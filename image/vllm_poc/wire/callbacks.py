# SPDX-License-Identifier: Apache-2.0
"""What a pod posts to ``{callback}/generated`` while a round runs. Success is HTTP 200."""

from vllm_poc.wire.artifacts import Artifact, Encoding
from vllm_poc.wire.base import Nonce, WireMessage


class GeneratedArtifacts(WireMessage):
    """Artifact protocol: every computed nonce with its vector."""

    public_key: str
    block_hash: str
    block_height: int
    node_id: int
    artifacts: list[Artifact]
    encoding: Encoding


class GeneratedDistances(WireMessage):
    """Distance protocol: the valid nonces (distance below ``r_target``) with their distances."""

    public_key: str
    block_hash: str
    block_height: int
    node_id: int
    nonces: list[Nonce]
    dist: list[float]
    r_target: float
