# SPDX-License-Identifier: Apache-2.0
"""Artifact protocol: ``k_dim`` picked and rotated coordinates of the last hidden state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.maths.sampling import hashes, normalise, reflect_chain, unit_normal


def artifact_purposes(k_dim: int) -> list[str]:
    """Return the purposes of the seeds that a `Selection` takes: the pick, then k_dim - 1 rotations."""
    return [f"pick_{k_dim}", *(f"haar_hh_{k_dim}_{step}" for step in range(k_dim - 1))]


class Selection(NamedTuple):
    """What seeds decide of artifacts: ``indices`` int64 ``[batch, k]``, ``rotations`` float32 ``[batch, k - 1, k]``."""

    indices: Tensor
    rotations: Tensor

    @classmethod
    def of(cls, seeds: Tensor, *, hidden: int) -> Selection:
        """Return it for the seeds int64 ``[batch, k]`` of `artifact_purposes`. ValueError unless 1 <= k <= hidden."""
        k_dim = seeds.shape[1]
        return cls(pick_indices(seeds[:, 0], hidden=hidden, k_dim=k_dim), unit_normal(seeds[:, 1:], k_dim))


def artifact_vectors(last_hidden: Tensor, selection: Selection) -> Tensor:
    """Return normalise -> pick -> rotate -> normalise of ``last_hidden``: the artifacts float32 ``[batch, k_dim]``.

    ``last_hidden`` ``[batch, hidden]`` is the output of the final norm at the last position. A row that is not finite
    stays not finite.
    """
    picked = normalise(last_hidden).gather(1, selection.indices)
    return normalise(reflect_chain(picked, selection.rotations))


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
