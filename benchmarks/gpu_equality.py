# SPDX-License-Identifier: Apache-2.0
"""How far a pod's results are from those of vLLM's own forward pass, each operation by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_pod import MAX_TOKENS, call, in_calls
from tests.support.builders.batches import a_batch
from vllm import LLM
from vllm_poc.rpc import BatchRequest, BatchResult
from vllm_poc.wire.artifacts import decode_vector


def equality(model: LLM, seq_len: int, batch: int, nonces: int) -> dict[str, Any]:
    """Return mean and largest L2 distance of artifacts, and the same of differences of distances; {} for no nonces."""
    if nonces == 0:
        return {}
    artifacts, others = (
        a_batch(range(nonces), seq_len=seq_len, protocol=protocol, batch=batch) for protocol in ("artifact", "distance")
    )
    return {
        "artifacts": _spread(torch.linalg.vector_norm(_difference(model, artifacts), dim=1)),
        "distances": _spread(_difference(model, others).abs()),
    }


def _difference(model: LLM, asked: BatchRequest) -> Tensor:
    *_, (_, found) = in_calls(model, asked)
    largest = MAX_TOKENS // asked["seq_len"]
    expected = call(model, "poc_test_unfused", {**asked, "batch": min(asked["batch"], largest)})
    return _values(found, asked["k_dim"]) - _values(expected, asked["k_dim"])


def _values(result: BatchResult, k_dim: int) -> Tensor:
    if result["not_finite"]:
        raise SystemExit(f"{len(result['not_finite'])} results are not finite")
    if "vectors" in result:
        return torch.tensor([decode_vector(vector, k_dim) for vector in result["vectors"]])
    return torch.tensor(result["distances"])


def _spread(values: Tensor) -> dict[str, float]:
    return {"mean": round(float(values.mean()), 6), "largest": round(float(values.max()), 6)}
