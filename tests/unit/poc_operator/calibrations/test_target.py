# SPDX-License-Identifier: Apache-2.0
"""The target for a wanted valid rate, and whether theory agrees."""

import random

import pytest

from poc_operator.calibrations import plan as target
from poc_operator.calibrations.plan import SAMPLES
from tests.unit.poc_operator.build import a_calibration

SPEC = a_calibration(nonces=20_000).spec


def measured(seed: int, shift: float = 0.0) -> list[list[float]]:
    """Distances as theory has them: the cosine of two random points of a sphere of many dimensions is normal."""
    source = random.Random(seed)  # noqa: S311

    def distance() -> float:
        return float((2 - 2 * source.gauss(0, target.OUTPUT_DIM**-0.5)) ** 0.5 + shift)

    return [[distance() for _ in range(1000)] for _ in range(SAMPLES)]


@pytest.mark.parametrize(("r_target", "rate"), [(1.416, 0.5905), (1.405, 0.1199), (1.4013564660458173, 0.0507)])
def test_theory_gives_the_published_rates(r_target: float, rate: float) -> None:
    assert target.valid_rate(r_target) == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize(
    ("dimensions", "r_target", "rate"), [(64, 1.34, 0.2089), (64, 1.30, 0.1088), (12, 0.75, 2.8e-3)]
)
def test_so_it_does_in_fewer_dimensions(dimensions: int, r_target: float, rate: float) -> None:
    assert target.cap_share(dimensions, target.cosine(r_target)) == pytest.approx(rate, rel=0.02)


def test_the_target_that_was_found_gives_the_wanted_rate() -> None:
    found = target.found_target(SPEC, measured(1))
    assert target.valid_rate(float(found.r_target)) == pytest.approx(0.1, abs=0.01)
    assert float(found.low) < float(found.r_target) < float(found.high)
    assert found.agrees
    assert found.nonces == 20_000


def test_the_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    held = 0
    for seed in range(40):
        found = target.found_target(SPEC, measured(seed))
        held += target.valid_rate(float(found.low)) <= 0.1 <= target.valid_rate(float(found.high))
    assert held >= 34


def test_other_distances_than_theory_expects_are_told() -> None:
    found = target.found_target(SPEC, measured(1, shift=0.002))
    assert not found.agrees
