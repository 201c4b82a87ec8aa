# SPDX-License-Identifier: Apache-2.0
"""Artifact protocol: ``k_dim`` picked and rotated coordinates of the last hidden state."""

import torch
from torch import Tensor

from vllm_poc.maths.reflections import normalise, reflect_chain
from vllm_poc.maths.sampling import hashes, unit_normal


def artifact_purposes(k_dim: int) -> list[str]:
    """Return the purposes of the seeds that `artifact_vectors` takes: the pick, then k_dim - 1 rotations."""
    return [f"pick_{k_dim}", *(f"haar_hh_{k_dim}_{step}" for step in range(k_dim - 1))]


def artifact_vectors(last_hidden: Tensor, seeds: Tensor) -> Tensor:
    """Return normalise -> pick -> rotate -> normalise of ``last_hidden``: the artifacts float32 ``[batch, k_dim]``.

    ``last_hidden`` ``[batch, hidden]`` is the output of the final norm at the last position, ``seeds`` int64
    ``[batch, k_dim]`` are those of `artifact_purposes`. A row that is not finite stays not finite. ValueError unless
    1 <= k_dim <= hidden.
    """
    k_dim = seeds.shape[1]
    indices = pick_indices(seeds[:, 0], hidden=last_hidden.shape[1], k_dim=k_dim)
    picked = normalise(last_hidden).gather(1, indices)
    return normalise(reflect_chain(picked, unit_normal(seeds[:, 1:], k_dim)))


def pick_indices(seeds: Tensor, *, hidden: int, k_dim: int) -> Tensor:
    """Return int64 ``[batch, k_dim]``: the coordinates with the smallest hashes.

    In the order in which CUDA's selection returns them, since the order changes the artifact: the
    k - 1 smallest by ascending index, then the k-th smallest. ValueError unless 1 <= k_dim <= hidden.
    """
    if not 1 <= k_dim <= hidden:
        raise ValueError(f"k_dim {k_dim} must lie in 1..{hidden}, the model's hidden size")
    by_score = hashes(seeds, hidden).topk(k_dim, dim=1, largest=False, sorted=True).indices
    smaller = by_score[:, :-1].sort(dim=1).values
    return torch.cat((smaller, by_score[:, -1:]), dim=1)
