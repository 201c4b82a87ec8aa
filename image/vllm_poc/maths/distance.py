# SPDX-License-Identifier: Apache-2.0
"""Distance protocol: how far a nonce's output lies from the round's target on the unit sphere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.maths.sampling import normal, normalise, reflect_chain, seed_tensor, uniform, unit_normal

#: Rows of the random head, the dimension of the sphere.
OUTPUT_DIM = 8192
#: Reflections of each nonce's hidden state.
NONCE_REFLECTIONS = 8
_HEAD_SCALE = 0.02


class Transform(NamedTuple):
    """What seeds decide of distances: unit vectors ``[batch, 8, hidden]``, and signs ``[batch, hidden]`` or None."""

    reflections: Tensor
    signs: Tensor | None

    @classmethod
    def of(cls, seeds: Tensor, *, hidden: int) -> Transform:
        """Return it for the seeds int64 ``[batch, 8]`` or ``[batch, 9]`` of `distance_purposes`."""
        flips = seeds[:, NONCE_REFLECTIONS:]
        reflections = unit_normal(seeds[:, :NONCE_REFLECTIONS], hidden)
        return cls(reflections, signs(flips[:, 0], hidden) if flips.shape[1] else None)


def distance_purposes(*, sign_flips: bool) -> list[str]:
    """Return the purposes of the seeds that a `Transform` takes: 8 reflections, then the signs if there are any."""
    reflections = [f"hidden_r{r}" for r in range(NONCE_REFLECTIONS)]
    return [*reflections, "signs"] if sign_flips else reflections


def distances(last_hidden: Tensor, transform: Transform, head: Tensor, target: Tensor) -> Tensor:
    """Return float32 ``[batch]`` in 0..2; a nonce is valid if its distance is strictly below ``r_target``.

    It is ``|y/|y| - target|`` with ``y = head . transformed hidden state``. ``last_hidden`` ``[batch, hidden]`` is the
    output of the final norm at the last position; `random_head` and `round_target` give the rest. A row that is not
    finite, or is zero, gives NaN.
    """
    y = transform_hidden(last_hidden, transform) @ head.T
    return (y / y.norm(dim=-1, keepdim=True) - target).norm(dim=-1)


def transform_hidden(last_hidden: Tensor, transform: Transform) -> Tensor:
    """Return flip -> normalise -> 8 reflections of ``last_hidden``: float32 ``[batch, hidden]``."""
    x = last_hidden.to(torch.float32)
    if transform.signs is not None:
        x = x * transform.signs
    return reflect_chain(normalise(x), transform.reflections)


def signs(seeds: Tensor, n: int) -> Tensor:
    """Return float32 ``[batch, n]``: +1 where the uniform number exceeds 0.5, else -1."""
    return (uniform(seeds, n) > 0.5).to(torch.float32).mul_(2.0).sub_(1.0)  # noqa: PLR2004


def round_target(block_hash: str, device: torch.device) -> Tensor:
    """Return the round's target float32 ``[8192]``, the unit vector of ``{block_hash}_target``."""
    return unit_normal(seed_tensor([f"{block_hash}_target"], device), OUTPUT_DIM)[0]


def random_head(block_hash: str, hidden: int, device: torch.device) -> Tensor:
    """Return the output matrix float32 ``[8192, hidden]``: 0.02 * normals of ``{block_hash}_lm_head``."""
    seeds = seed_tensor([f"{block_hash}_lm_head"], device)
    return normal(seeds, OUTPUT_DIM * hidden).mul_(_HEAD_SCALE).view(OUTPUT_DIM, hidden)
