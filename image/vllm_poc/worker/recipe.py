# SPDX-License-Identifier: Apache-2.0
"""What is computed for a nonce, whatever the nonce: the same for all batches of a round, and for most rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.maths.artifact import artifact_purposes
from vllm_poc.maths.distance import distance_purposes
from vllm_poc.maths.sampling import STRONG_SEEDS, input_seeds, nonce_seeds
from vllm_poc.wire.messages import Protocol
from vllm_poc.worker.batches import BatchRequest


class Recipe(NamedTuple):
    """The fields of a `BatchRequest` beside round and nonces."""

    protocol: Protocol
    seq_len: int
    k_dim: int
    strong_rng: bool
    layer_hooks: bool
    sign_flips: bool

    @classmethod
    def of(cls, request: BatchRequest) -> Recipe:
        """Return the recipe that a request asks for."""
        return cls(
            protocol=Protocol(request["protocol"]),
            seq_len=request["seq_len"],
            k_dim=request["k_dim"],
            strong_rng=request["strong_rng"],
            layer_hooks=request["layer_hooks"],
            sign_flips=request["sign_flips"],
        )

    @property
    def purposes(self) -> list[str]:
        """Purposes of a nonce's seeds, without those of its inputs."""
        if self.protocol is Protocol.ARTIFACT:
            return artifact_purposes(self.k_dim)
        return distance_purposes(sign_flips=self.sign_flips)

    @property
    def input_columns(self) -> int:
        """How many of a nonce's seeds are those of its inputs."""
        return STRONG_SEEDS if self.strong_rng else 1

    def seeds(self, request: BatchRequest, nonces: Sequence[int]) -> Tensor:
        """Return all seeds of nonces of the request's round, on the CPU: int64 ``[nonces, columns]``, inputs first."""
        purposes, of_round = self.purposes, (request["block_hash"], request["public_key"])
        rows = [
            [
                *input_seeds(*of_round, nonce, strong_rng=self.strong_rng),
                *nonce_seeds(*of_round, nonce, purposes),
            ]
            for nonce in nonces
        ]
        return torch.tensor(rows, dtype=torch.int64)
