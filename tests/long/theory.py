# SPDX-License-Identifier: Apache-2.0
"""What share of nonces is valid, by theory.

The network's own estimate takes the outputs for uniform on the sphere of 8192 dimensions. They are not: the
random head maps the hidden state's sphere, of ``hidden`` dimensions, onto a slice of it. How the target lies
to that slice is the same for all nonces of a block, so that each block hash has a rate of its own.
"""

import math
from itertools import pairwise

import torch

from vllm_poc.maths.distance import OUTPUT_DIM, random_head, target

_STEPS = 4000


def cap_share(dimensions: int, cosine: float) -> float:
    """Return the share of the unit sphere on which x·t exceeds ``cosine``, for any unit vector t."""
    edges = [cosine * step / _STEPS for step in range(_STEPS + 1)]
    power, scale = (dimensions - 3) / 2, math.lgamma(dimensions / 2) - math.lgamma((dimensions - 1) / 2)
    middles = ((low + high) / 2 for low, high in pairwise(edges))
    inner = math.fsum(math.exp(scale + power * math.log1p(-middle * middle)) for middle in middles)
    return 0.5 - inner * cosine / _STEPS / math.sqrt(math.pi)


def sphere_rate(r_target: float) -> float:
    """Return the expected share of distances below ``r_target`` over many block hashes."""
    return cap_share(OUTPUT_DIM, _cosine(r_target))


def block_rate(r_target: float, block_hash: str, hidden: int) -> float:
    """Return the same for one block hash: for hidden states uniform on their sphere, through its head."""
    cpu = torch.device("cpu")
    head = random_head(block_hash, hidden, cpu)
    # |head . u| is nearly the same for all unit vectors u, and (head . u) . target is u . (head^T . target).
    stretch = float(head.norm() / (hidden**0.5 * (target(block_hash, cpu) @ head).norm()))
    return cap_share(hidden, _cosine(r_target) * stretch)


def _cosine(r_target: float) -> float:
    return 1 - r_target * r_target / 2
