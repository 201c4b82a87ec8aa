# SPDX-License-Identifier: Apache-2.0
"""What share of nonces is valid for one block hash, by theory.

The network's own estimate takes the outputs for uniform on the sphere of 8192 dimensions. They are not: the
random head maps the hidden state's sphere, of ``hidden`` dimensions, onto a slice of it. How the target lies
to that slice is the same for all nonces of a block, so that each block hash has a rate of its own.
"""

import torch

from poc_operator.calibrations.plan import cap_share, cosine
from vllm_poc.maths.distance import random_head, round_target


def block_rate(r_target: float, block_hash: str, hidden: int) -> float:
    """Return the expected share below ``r_target``: for hidden states uniform on their sphere, through its head."""
    cpu = torch.device("cpu")
    head = random_head(block_hash, hidden, cpu)
    # |head . u| is nearly the same for all unit vectors u, and (head . u) . target is u . (head^T . target).
    stretch = float(head.norm() / (hidden**0.5 * (round_target(block_hash, cpu) @ head).norm()))
    return cap_share(hidden, cosine(r_target) * stretch)
