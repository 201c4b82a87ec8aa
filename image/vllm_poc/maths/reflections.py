# SPDX-License-Identifier: Apache-2.0
"""Householder reflections ``x <- x - 2 (v . x) v`` along seeded unit vectors."""

import torch
from torch import Tensor

from vllm_poc.maths.sampling import seed_tensor, unit_normal


def layer_vectors(*, block_hash: str, num_layers: int, hidden: int, device: torch.device) -> Tensor:
    """Return float32 ``[num_layers, hidden]``: the unit vector that reflects each decoder layer's output.

    Layer i has the seed text ``{block_hash}_layer_{i}_householder``.
    """
    texts = (f"{block_hash}_layer_{layer}_householder" for layer in range(num_layers))
    return unit_normal(seed_tensor(texts, device), hidden)


def reflect(x: Tensor, v: Tensor) -> Tensor:
    """Return ``x - 2 (v . x) v`` over the last axis, computed in the dtype of ``x``.

    ``x`` is ``[..., hidden]``; ``v`` is a unit vector ``[hidden]``, or one for each row.
    """
    v = v.to(x.dtype)
    return x - 2 * (x * v).sum(dim=-1, keepdim=True) * v


def reflect_chain(x: Tensor, vectors: Tensor) -> Tensor:
    """Reflect row b of ``x`` ``[batch, n]`` along ``vectors[b, 0]``, then ``vectors[b, 1]``, and so on.

    ``vectors`` is ``[batch, count, n]``.
    """
    for v in vectors.unbind(dim=1):
        x = reflect(x, v)
    return x


def normalise(x: Tensor) -> Tensor:
    """Return ``x / (|x| + 1e-8)`` over the last axis as float32."""
    x = x.to(torch.float32)
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)
