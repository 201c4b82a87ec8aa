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

#: Methods of the worker: vLLM's own pass, each operation by itself, or with vLLM's own kernels.
_BY_ITSELF, _KERNELS = "poc_test_unfused", "poc_test_own"


def equality(model: LLM, seq_len: int, batch: int, nonces: int) -> dict[str, Any]:
    """Return mean and largest L2 distance of artifacts, and the same of differences of distances; {} for no nonces.

    ``vllm_itself`` is how far the artifacts of vLLM's own pass are from those of the same pass over half as many nonces
    at a time, ``halved`` the same of PoC's: nobody can be nearer to vLLM's pass than it is to itself. ``kernels`` and
    ``kernels_itself`` are the distances from vLLM's pass with its own kernels, and of that from itself.
    """
    if nonces == 0:
        return {}
    artifacts, others = (
        a_batch(range(nonces), seq_len=seq_len, protocol=protocol, batch=batch) for protocol in ("artifact", "distance")
    )
    found, unfused, own = _found(model, artifacts), _unfused(model, artifacts), _unfused(model, artifacts, way=_KERNELS)
    return {
        "artifacts": _spread(_apart(found, unfused)),
        "distances": _spread((_found(model, others) - _unfused(model, others)).abs()),
        "vllm_itself": _spread(_apart(_unfused(model, artifacts, share=2), unfused)),
        "kernels": _spread(_apart(found, own)),
        "kernels_itself": _spread(_apart(_unfused(model, artifacts, share=2, way=_KERNELS), own)),
        "halved": _spread(_apart(_found(model, {**artifacts, "batch": max(1, batch // 2)}), found)),
    }


def _apart(some: Tensor, others: Tensor) -> Tensor:
    return torch.linalg.vector_norm(some - others, dim=1)


def _found(model: LLM, asked: BatchRequest) -> Tensor:
    *_, (_, found) = in_calls(model, asked)
    return _values(found, asked["k_dim"])


def _unfused(model: LLM, asked: BatchRequest, *, share: int = 1, way: str = _BY_ITSELF) -> Tensor:
    batch = min(asked["batch"], MAX_TOKENS // asked["seq_len"])
    result = call(model, way, {**asked, "batch": max(1, batch // share)})
    return _values(result, asked["k_dim"])


def _values(result: BatchResult, k_dim: int) -> Tensor:
    if result["not_finite"]:
        raise SystemExit(f"{len(result['not_finite'])} results are not finite")
    if "vectors" in result:
        return torch.tensor([decode_vector(vector, k_dim) for vector in result["vectors"]])
    return torch.tensor(result["distances"])


def _spread(values: Tensor) -> dict[str, float]:
    return {"mean": round(float(values.mean()), 6), "largest": round(float(values.max()), 6)}
