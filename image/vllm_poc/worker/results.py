# SPDX-License-Identifier: Apache-2.0
"""From the last hidden states of a batch to its result: one transfer from the device, then plain values."""

import torch
from torch import Tensor

from vllm_poc.maths.artifact import artifact_vectors
from vllm_poc.maths.distance import distances
from vllm_poc.wire.artifacts import encode_vector
from vllm_poc.wire.base import Protocol
from vllm_poc.worker.batches import BatchRequest, BatchResult


def batch_result(last_hidden: Tensor, request: BatchRequest) -> BatchResult:
    """Return what ``request`` asks for from ``last_hidden`` ``[nonces, hidden]``.

    A nonce whose hidden state or result holds NaN or infinity is only named as such.
    """
    values = _values(last_hidden, request)
    finite = (last_hidden.isfinite().all(dim=1) & values.isfinite().all(dim=1)).cpu()
    values, nonces = values.cpu(), torch.tensor(request["nonces"])
    result = BatchResult(nonces=nonces[finite].tolist(), not_finite=nonces[~finite].tolist())
    if values.dtype is torch.float16:
        result["vectors"] = [encode_vector(row) for row in values[finite].tolist()]
    else:
        result["distances"] = values[finite, 0].tolist()
    return result


def _values(last_hidden: Tensor, request: BatchRequest) -> Tensor:
    seeded_by = (request["block_hash"], request["public_key"], request["nonces"])
    if Protocol(request["protocol"]) is Protocol.ARTIFACT:
        # Rounded first: a number too large for fp16 is not finite on the wire.
        return artifact_vectors(last_hidden, *seeded_by, k_dim=request["k_dim"]).to(torch.float16)
    return distances(last_hidden, *seeded_by, sign_flips=request["sign_flips"])[:, None]
