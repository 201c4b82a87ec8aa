# SPDX-License-Identifier: Apache-2.0
"""Artifact protocol: ``k_dim`` picked and rotated coordinates of the last hidden state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.maths.reflections import normalise, reflect_chain
from vllm_poc.maths.sampling import hashes, unit_normal
from vllm_poc.maths.seeds import nonce_text, seed_tensor


class ArtifactSeeds(NamedTuple):
    """Seeds of a batch: ``pick`` int64 ``[batch]``, ``rotation`` int64 ``[batch, k_dim - 1]``."""

    pick: Tensor
    rotation: Tensor


def artifact_vectors(
    last_hidden: Tensor, block_hash: str, public_key: str, nonces: Sequence[int], *, k_dim: int
) -> Tensor:
    """Return normalise -> pick -> rotate -> normalise of ``last_hidden``: the artifacts float32 ``[batch, k_dim]``.

    ``last_hidden`` ``[batch, hidden]`` is the output of the final norm at the last position. A row
    that is not finite stays not finite. ValueError unless 1 <= k_dim <= hidden.
    """
    seeds = artifact_seeds(block_hash, public_key, nonces, k_dim=k_dim, device=last_hidden.device)
    indices = pick_indices(seeds.pick, hidden=last_hidden.shape[1], k_dim=k_dim)
    picked = normalise(last_hidden).gather(1, indices)
    return normalise(reflect_chain(picked, unit_normal(seeds.rotation, k_dim)))


def artifact_seeds(
    block_hash: str, public_key: str, nonces: Sequence[int], *, k_dim: int, device: torch.device
) -> ArtifactSeeds:
    """Return the seeds of ``{hash}_{key}_nonce_{nonce}_pick_{k}`` and ``..._haar_hh_{k}_{j}``."""
    picks = [nonce_text(block_hash, public_key, nonce, f"pick_{k_dim}") for nonce in nonces]
    rotations = [
        nonce_text(block_hash, public_key, nonce, f"haar_hh_{k_dim}_{step}")
        for nonce in nonces
        for step in range(k_dim - 1)
    ]
    return ArtifactSeeds(
        pick=seed_tensor(picks, device),
        rotation=seed_tensor(rotations, device).view(len(picks), k_dim - 1),
    )


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
