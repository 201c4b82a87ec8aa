# SPDX-License-Identifier: Apache-2.0
"""Which ``rTarget`` makes the wanted share of nonces valid, by measurement and by theory.

Each block hash has a valid rate of its own, so each sample has its own hash. How the samples' rates differ gives the
confidence interval.

By theory, outputs and target are independent and uniform on the unit sphere of 8192 dimensions. The outputs of one
block hash lie on a slice of it, of the model's hidden size, so that each hash has a rate of its own; the theory
is about their mean.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import stdev

from poc_operator.apis.v1alpha1.calibration import CalibrationSpec, FoundTarget

#: Half the width of the 95 % confidence interval in standard errors: Student's t with 19 degrees of freedom.
STUDENT_95 = 2.093
#: Standard errors by which measurement and theory may differ: once in 350 calibrations they differ by more,
#: Student's t.
STUDENT_DISAGREES = 3.4
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


def found_target(spec: CalibrationSpec, samples: Sequence[Sequence[float]]) -> FoundTarget:
    """Return the target for the distances of some samples, none of which is empty."""
    rate = float(spec.valid_rate)
    everything = sorted(distance for sample in samples for distance in sample)
    r_target = _quantile(everything, rate)
    shares = [sum(distance < r_target for distance in sample) / len(sample) for sample in samples]
    error = stdev(shares) / sqrt(len(shares))
    expected = valid_rate(r_target)
    return FoundTarget(
        r_target=f"{r_target:.6f}",
        low=f"{_quantile(everything, rate - STUDENT_95 * error):.6f}",
        high=f"{_quantile(everything, rate + STUDENT_95 * error):.6f}",
        valid_rate=spec.valid_rate,
        theory_rate=f"{expected:.4f}",
        nonces=len(everything),
        agrees=abs(expected - rate) <= STUDENT_DISAGREES * error,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a number that this share of the ordered numbers lies below: halfway between two of them."""
    index = min(max(round(share * len(ordered)), 1), len(ordered) - 1)
    return (ordered[index - 1] + ordered[index]) / 2
