# SPDX-License-Identifier: Apache-2.0
"""From seeds and the last hidden states of a batch to its results, and what all nonces of a block hash share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_poc.maths.artifact import Selection, artifact_purposes, artifact_vectors
from vllm_poc.maths.distance import (
    NONCE_REFLECTIONS,
    OUTPUT_DIM,
    Transform,
    distance_purposes,
    distances,
    random_head,
    round_target,
)
from vllm_poc.maths.sampling import STRONG_SEEDS, input_seeds, layer_vectors, nonce_seeds, token_seed
from vllm_poc.rpc import BatchRequest, BatchResult, PassSpec
from vllm_poc.wire.artifacts import encode_vector
from vllm_poc.wire.messages import Protocol

#: Bytes of a number in float32.
_NUMBER = 4
#: What the seeds alone decide of a batch's results.
Drawn: TypeAlias = Selection | Transform


class RoundTensors:
    """Reflection vectors, random head and target of the block hash that was loaded last.

    Their addresses never change, since CUDA graphs read them. ``layers`` are those of all stages.
    """

    def __init__(self, *, layers: int, hidden: int, device: torch.device) -> None:
        self.vectors = torch.zeros(layers, hidden, device=device)
        self._hidden = hidden
        self._device = device
        self._vectors_of: str | None = None
        self._head_of: str | None = None
        self._head: tuple[Tensor, Tensor] | None = None

    @property
    def head_and_target(self) -> tuple[Tensor, Tensor]:
        """The random head ``[8192, hidden]``, of which only distances need one, and the target ``[8192]``."""
        if self._head is None:
            head = torch.zeros(OUTPUT_DIM, self._hidden, device=self._device)
            self._head = head, torch.zeros(OUTPUT_DIM, device=self._device)
        return self._head

    def load(self, block_hash: str, spec: PassSpec, *, results: bool) -> None:
        """Make what the pass needs that of ``block_hash``; head and target only if this stage makes ``results``."""
        if spec.layer_hooks and self._vectors_of != block_hash:
            layers = len(self.vectors)
            same = {"hidden": self._hidden, "device": self._device}
            self.vectors.copy_(layer_vectors(block_hash=block_hash, num_layers=layers, **same))
            self._vectors_of = block_hash
        if results and spec.protocol is Protocol.DISTANCE and self._head_of != block_hash:
            head, target = self.head_and_target
            head.copy_(random_head(block_hash, self._hidden, self._device))
            target.copy_(round_target(block_hash, self._device))
            self._head_of = block_hash


def seeds_of(spec: PassSpec, request: BatchRequest, nonces: Sequence[int]) -> Tensor:
    """Return all seeds of nonces of the request's round, on the CPU: int64 ``[nonces, columns]``.

    First come those of the inputs, then that of the token ids, then those of the results.
    """
    purposes, of_round = _purposes(spec), (request["block_hash"], request["public_key"])
    rows = [
        [
            *input_seeds(*of_round, nonce, strong_rng=spec.strong_rng),
            token_seed(*of_round, nonce),
            *nonce_seeds(*of_round, nonce, purposes),
        ]
        for nonce in nonces
    ]
    return torch.tensor(rows, dtype=torch.int64)


def input_columns(spec: PassSpec) -> int:
    """Return how many of a nonce's seeds are those of its embeddings; the next is that of its token ids."""
    return STRONG_SEEDS if spec.strong_rng else 1


def draw(seeds: Tensor, spec: PassSpec, *, hidden: int) -> Drawn:
    """Return what seeds int64 ``[nonces, columns]`` decide, for a model of ``hidden`` size."""
    columns = seeds[:, input_columns(spec) + 1 :]
    return (Selection if spec.protocol is Protocol.ARTIFACT else Transform).of(columns, hidden=hidden)


def drawn_bytes(spec: PassSpec, nonces: int, *, hidden: int) -> int:
    """Return how much memory `draw` takes for so many nonces, which may be more than all else of their batch."""
    numbers = spec.k_dim**2 if spec.protocol is Protocol.ARTIFACT else (NONCE_REFLECTIONS + 1) * hidden
    return nonces * numbers * _NUMBER


def result_values(last_hidden: Tensor, drawn: Drawn, tensors: RoundTensors) -> Tensor:
    """Return the values of nonces from ``last_hidden`` ``[nonces, hidden]``.

    They are float16 ``[nonces, k_dim]`` or float32 ``[nonces, 1]``, and NaN for a nonce whose hidden state is not
    finite. Makes the device wait for nothing.
    """
    if isinstance(drawn, Selection):
        # Rounded already: a number too large for fp16 is not finite on the wire.
        values = artifact_vectors(last_hidden, drawn).to(torch.float16)
    else:
        values = distances(last_hidden, drawn, *tensors.head_and_target)[:, None]
    return values.masked_fill(~last_hidden.isfinite().all(dim=1, keepdim=True), torch.nan)


def batch_result(values: Tensor, request: BatchRequest) -> BatchResult:
    """Return what ``request`` asks for from all values, on the CPU.

    A nonce whose values hold NaN or infinity is only named as such.
    """
    finite, nonces = values.isfinite().all(dim=1), torch.tensor(request["nonces"])
    result = BatchResult(complete=True, nonces=nonces[finite].tolist(), not_finite=nonces[~finite].tolist())
    if values.dtype is torch.float16:
        result["vectors"] = [encode_vector(row) for row in values[finite].tolist()]
    else:
        result["distances"] = values[finite, 0].tolist()
    return result


def _purposes(spec: PassSpec) -> list[str]:
    """Return the purposes of a nonce's seeds, without those of its inputs."""
    if spec.protocol is Protocol.ARTIFACT:
        return artifact_purposes(spec.k_dim)
    return distance_purposes(sign_flips=spec.sign_flips)
