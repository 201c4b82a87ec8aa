# SPDX-License-Identifier: Apache-2.0
"""Distance protocol: how far a nonce's output lies from the round's target on the unit sphere."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.maths.reflections import normalise, reflect_chain
from vllm_poc.maths.sampling import normal, uniform, unit_normal
from vllm_poc.maths.seeds import nonce_text, seed_tensor

#: Rows of the random head, the dimension of the sphere.
OUTPUT_DIM = 8192
#: Reflections of each nonce's hidden state.
NONCE_REFLECTIONS = 8
_HEAD_SCALE = 0.02
# A head takes 8192 * hidden * 4 bytes on the device: keep the running round's and one other.
_CACHED_HEADS = 2


class DistanceSeeds(NamedTuple):
    """Seeds of a batch: ``reflections`` int64 ``[batch, 8]``; ``signs`` int64 ``[batch]``, None for no flips."""

    reflections: Tensor
    signs: Tensor | None


def distances(
    last_hidden: Tensor, block_hash: str, public_key: str, nonces: Sequence[int], *, sign_flips: bool
) -> Tensor:
    """Return float32 ``[batch]`` in 0..2; a nonce is valid if its distance is strictly below ``r_target``.

    It is ``|y/|y| - target|`` with ``y = head . transformed hidden state``. ``last_hidden`` ``[batch, hidden]`` is the
    output of the final norm at the last position. A row that is not finite, or is zero, gives NaN.
    """
    device, hidden = last_hidden.device, last_hidden.shape[1]
    seeds = distance_seeds(block_hash, public_key, nonces, sign_flips=sign_flips, device=device)
    y = transform_hidden(last_hidden, seeds) @ random_head(block_hash, hidden, device).T
    return (y / y.norm(dim=-1, keepdim=True) - target(block_hash, device)).norm(dim=-1)


def distance_seeds(
    block_hash: str, public_key: str, nonces: Sequence[int], *, sign_flips: bool, device: torch.device
) -> DistanceSeeds:
    """Return the seeds of ``{block_hash}_{public_key}_nonce_{nonce}_hidden_r{r}`` and ``..._signs``."""
    reflections = [
        nonce_text(block_hash, public_key, nonce, f"hidden_r{r}") for nonce in nonces for r in range(NONCE_REFLECTIONS)
    ]
    signs = [nonce_text(block_hash, public_key, nonce, "signs") for nonce in nonces]
    return DistanceSeeds(
        reflections=seed_tensor(reflections, device).view(len(signs), NONCE_REFLECTIONS),
        signs=seed_tensor(signs, device) if sign_flips else None,
    )


def transform_hidden(last_hidden: Tensor, seeds: DistanceSeeds) -> Tensor:
    """Return flip -> normalise -> 8 reflections of ``last_hidden``: float32 ``[batch, hidden]``."""
    x, hidden = last_hidden.to(torch.float32), last_hidden.shape[1]
    if seeds.signs is not None:
        x = x * signs(seeds.signs, hidden)
    return reflect_chain(normalise(x), unit_normal(seeds.reflections, hidden))


def signs(seeds: Tensor, n: int) -> Tensor:
    """Return float32 ``[batch, n]``: +1 where the uniform number exceeds 0.5, else -1."""
    return (uniform(seeds, n) > 0.5).to(torch.float32).mul_(2.0).sub_(1.0)  # noqa: PLR2004


def target(block_hash: str, device: torch.device) -> Tensor:
    """Return the round's target float32 ``[8192]``, the unit vector of ``{block_hash}_target``."""
    return unit_normal(seed_tensor([f"{block_hash}_target"], device), OUTPUT_DIM)[0]


@lru_cache(maxsize=_CACHED_HEADS)
def random_head(block_hash: str, hidden: int, device: torch.device) -> Tensor:
    """Return the output matrix float32 ``[8192, hidden]``: 0.02 * normals of ``{block_hash}_lm_head``.

    Cached, since it takes longer than a batch; do not write into it.
    """
    seeds = seed_tensor([f"{block_hash}_lm_head"], device)
    return normal(seeds, OUTPUT_DIM * hidden).mul_(_HEAD_SCALE).view(OUTPUT_DIM, hidden)
