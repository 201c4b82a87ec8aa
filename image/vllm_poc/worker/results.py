# SPDX-License-Identifier: Apache-2.0
"""From the last hidden states of a batch to its result: one transfer from the device, then plain values."""

import base64

import torch
from torch import Tensor

from vllm_poc.maths.artifact import artifact_vectors
from vllm_poc.maths.distance import distances
from vllm_poc.wire.base import Protocol
from vllm_poc.worker.batches import BatchRequest, BatchResult


def batch_result(last_hidden: Tensor, request: BatchRequest) -> BatchResult:
    """Return what ``request`` asks for from ``last_hidden`` ``[nonces, hidden]``.

    A nonce whose hidden state or result holds NaN or infinity is only named as such.
    """
    if Protocol(request["protocol"]) is Protocol.ARTIFACT:
        # Rounded first: a number too large for fp16 is not finite on the wire.
        values = _artifacts(last_hidden, request).to(torch.float16)
    else:
        values = _distances(last_hidden, request)[:, None]
    finite = (last_hidden.isfinite().all(dim=1) & values.isfinite().all(dim=1)).cpu()
    return _split(request, values.cpu(), finite)


def _artifacts(last_hidden: Tensor, request: BatchRequest) -> Tensor:
    return artifact_vectors(
        last_hidden,
        block_hash=request["block_hash"],
        public_key=request["public_key"],
        nonces=request["nonces"],
        k_dim=request["k_dim"],
    )


def _distances(last_hidden: Tensor, request: BatchRequest) -> Tensor:
    return distances(
        last_hidden,
        block_hash=request["block_hash"],
        public_key=request["public_key"],
        nonces=request["nonces"],
        sign_flips=request["sign_flips"],
    )


def _split(request: BatchRequest, values: Tensor, finite: Tensor) -> BatchResult:
    nonces = torch.tensor(request["nonces"])
    result = BatchResult(nonces=nonces[finite].tolist(), not_finite=nonces[~finite].tolist())
    if values.dtype is torch.float16:
        result["vectors"] = [_encode(row) for row in values[finite]]
    else:
        result["distances"] = values[finite, 0].tolist()
    return result


def _encode(row: Tensor) -> str:
    return base64.b64encode(row.numpy().astype("<f2").tobytes()).decode()
