# SPDX-License-Identifier: Apache-2.0
"""From the last hidden states of a batch to its result."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from vllm_poc.maths.artifact import Selection, artifact_vectors
from vllm_poc.maths.distance import NONCE_REFLECTIONS, Transform, distances
from vllm_poc.wire.artifacts import encode_vector
from vllm_poc.wire.messages import Protocol
from vllm_poc.worker.batches import BatchRequest, BatchResult
from vllm_poc.worker.recipe import Recipe
from vllm_poc.worker.round_tensors import RoundTensors

#: Bytes of a number in float32.
_NUMBER = 4
#: What the seeds alone decide of a batch's results.
Drawn: TypeAlias = Selection | Transform


def draw(seeds: Tensor, recipe: Recipe, *, hidden: int) -> Drawn:
    """Return what seeds int64 ``[nonces, columns]`` decide, for a model of ``hidden`` size."""
    columns = seeds[:, recipe.input_columns :]
    return (Selection if recipe.protocol is Protocol.ARTIFACT else Transform).of(columns, hidden=hidden)


def drawn_bytes(recipe: Recipe, nonces: int, *, hidden: int) -> int:
    """Return how much memory `draw` takes for so many nonces, which may be more than all else of their batch."""
    numbers = recipe.k_dim**2 if recipe.protocol is Protocol.ARTIFACT else (NONCE_REFLECTIONS + 1) * hidden
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
