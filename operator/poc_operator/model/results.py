# SPDX-License-Identifier: Apache-2.0
"""What comes out of named nonces: a verdict on proofs, a calibrated target, a comparison of pods."""

from datetime import datetime

from pydantic import Field

from poc_operator.model.base import ApiModel


class ProofsVerdict(ApiModel):
    """The fraud test over all proofs. ``mismatch_nonces`` has the first of them."""

    total: int
    mismatches: int
    mismatch_nonces: list[int]
    not_computed: int
    p_value: str
    fraud: bool


class Calibration(ApiModel):
    """The target that was found, with the ends of its 95 % confidence interval; ``theory_rate`` is what theory
    gives for it."""

    r_target: str
    low: str
    high: str
    valid_rate: str
    theory_rate: str
    nonces: int
    agrees: bool


class Deviation(ApiModel):
    """A pod whose results differ from those of most others, or that the others do not outvote."""

    pod: str
    mismatches: int


class CrossCheck(ApiModel):
    """The last comparison of the round's pods: when it began, of which nonces, how many pods, which of them differ.

    While one is under way, ``deviating`` is from the one before.
    """

    time: datetime
    pending: bool
    number: int
    nonces: list[int] = Field(default_factory=list)
    compared: int = 0
    deviating: list[Deviation] = Field(default_factory=list)
