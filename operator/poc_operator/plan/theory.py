# SPDX-License-Identifier: Apache-2.0
"""What share of distances lies below a target, by theory.

Outputs and target are taken for independent and uniform on the unit sphere of 8192 dimensions. The outputs of one
block hash lie on a slice of it, of the model's hidden size, so that each hash has a rate of its own; the theory
is about their mean.
"""

import math
from itertools import pairwise

#: Rows of the random head that makes the distance protocol's outputs.
OUTPUT_DIM = 8192

_STEPS = 4000


def cap_share(dimensions: int, cosine: float) -> float:
    """Return the share of the unit sphere on which x·t exceeds ``cosine``, for any unit vector t.

    The density of x·t is proportional to (1 - c²)^((dimensions - 3) / 2).
    """
    edges = [cosine * step / _STEPS for step in range(_STEPS + 1)]
    power, scale = (dimensions - 3) / 2, math.lgamma(dimensions / 2) - math.lgamma((dimensions - 1) / 2)
    middles = ((low + high) / 2 for low, high in pairwise(edges))
    inner = math.fsum(math.exp(scale + power * math.log1p(-middle * middle)) for middle in middles)
    return 0.5 - inner * cosine / _STEPS / math.sqrt(math.pi)


def cosine(distance: float) -> float:
    """Return x·t of unit vectors that lie ``distance`` apart."""
    return 1 - distance * distance / 2


def valid_rate(r_target: float) -> float:
    """Return the expected share of distances below ``r_target`` over many block hashes."""
    return cap_share(OUTPUT_DIM, cosine(r_target))
