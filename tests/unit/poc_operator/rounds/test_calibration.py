# SPDX-License-Identifier: Apache-2.0
"""Mode Calibrate: the target for a wanted valid rate, and whether theory agrees."""

import random
from typing import Any

import pytest

from poc_operator.model.spec import RoundSpec
from poc_operator.model.status import Sample, SlotState
from poc_operator.rounds import calibration
from poc_operator.rounds import calibration as theory
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import AskPod
from tests.unit.poc_operator.build import a_pod, a_round, look, says
from vllm_poc.wire.generate import GeneratedResponse

SPEC: dict[str, Any] = {
    "mode": "Calibrate",
    "rTarget": None,
    "nodes": None,
    "stop": None,
    "calibrate": {"validRate": "0.1", "nonces": 20_000},
}


def spec() -> RoundSpec:
    return a_round(**SPEC).spec


def measured(seed: int, shift: float = 0.0) -> list[Sample]:
    """Distances as theory has them: the cosine of two random points of a sphere of many dimensions is normal."""
    source = random.Random(seed)  # noqa: S311
    samples = []
    for i in range(calibration.SAMPLES):
        sample = Sample(first=i * 1000, count=1000, state=SlotState.DONE)
        distances = [(2 - 2 * source.gauss(0, theory.OUTPUT_DIM**-0.5)) ** 0.5 + shift for _ in range(1000)]
        answer = GeneratedResponse(request_id="x", nonces=list(range(1000)), distances=distances)
        samples.append(sample.model_copy(update=calibration.take(look(a_round()), sample, answer)))
    return samples


@pytest.mark.parametrize(("r_target", "rate"), [(1.416, 0.5905), (1.405, 0.1199), (1.4013564660458173, 0.0507)])
def test_theory_gives_the_published_rates(r_target: float, rate: float) -> None:
    assert theory.valid_rate(r_target) == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize(
    ("dimensions", "r_target", "rate"), [(64, 1.34, 0.2089), (64, 1.30, 0.1088), (12, 0.75, 2.8e-3)]
)
def test_so_it_does_in_fewer_dimensions(dimensions: int, r_target: float, rate: float) -> None:
    assert theory.cap_share(dimensions, theory.cosine(r_target)) == pytest.approx(rate, rel=0.02)


def test_the_target_that_was_found_gives_the_wanted_rate() -> None:
    found = calibration.result(spec(), measured(1))
    assert found is not None
    assert theory.valid_rate(float(found.r_target)) == pytest.approx(0.1, abs=0.01)
    assert float(found.low) < float(found.r_target) < float(found.high)
    assert found.agrees
    assert found.nonces == 20_000


def test_the_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    held = 0
    for seed in range(40):
        found = calibration.result(spec(), measured(seed))
        assert found is not None
        held += theory.valid_rate(float(found.low)) <= 0.1 <= theory.valid_rate(float(found.high))
    assert held >= 34


def test_other_distances_than_theory_expects_are_told() -> None:
    found = calibration.result(spec(), measured(1, shift=0.002))
    assert found is not None
    assert not found.agrees


def test_each_sample_has_a_block_hash_of_its_own() -> None:
    pods = [(a_pod(f"pod-{i}"), says(session=f"s{i}")) for i in range(3)]
    step = plan(look(a_round(**SPEC), *pods))
    asks = [action for action in step.actions if isinstance(action, AskPod)]
    assert len(asks) == len({ask.request.block_hash for ask in asks}) == 3
    assert [(ask.request.nonces[0], len(ask.request.nonces), ask.request.r_target) for ask in asks] == [
        (0, 1000, 2.0),
        (1000, 1000, 2.0),
        (2000, 1000, 2.0),
    ]
    assert len(step.status.samples) == calibration.SAMPLES
