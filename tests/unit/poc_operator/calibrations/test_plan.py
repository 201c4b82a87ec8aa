# SPDX-License-Identifier: Apache-2.0
"""Calibrations: what pods are asked, what is kept of their answers, and what a new process does without them."""

import dataclasses
import json

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.calibrations.plan import SAMPLES, CalibrationSnapshot, CalibrationStep, Measured, plan
from poc_operator.observed import Answer, PodReport
from poc_operator.planning.snapshot import AskPod
from tests.unit.poc_operator.build import NOW, a_calibration, a_pod, says
from vllm_poc.wire.generate import GeneratedResponse


def seen(
    calibration: PoCCalibration, *pods: tuple[str, PodReport], measured: Measured | None = None
) -> CalibrationSnapshot:
    return CalibrationSnapshot(
        work=calibration,
        pods=[a_pod(name) for name, _ in pods],
        reports=dict(pods),
        now=NOW,
        find_other_rounds=tuple,
        measured=measured or {},
    )


def asks(step: CalibrationStep) -> list[AskPod]:
    return [action for action in step.actions if isinstance(action, AskPod)]


def answer(ask: AskPod, *, finite: bool = True) -> PodReport:
    nonces = ask.request.nonces
    distances = [1.3 + nonce % 100 / 500 for nonce in nonces] if finite else []
    result = GeneratedResponse(
        request_id="x", nonces=nonces if finite else [], distances=distances, not_computed=[] if finite else nonces
    )
    return dataclasses.replace(says(), answer=Answer(key=ask.key, result=result))


def measured_by(pods: int, *, finite: bool = True) -> CalibrationStep:
    """Plan with so many pods, which all answer, until the calibration is over or stands still."""
    step = plan(seen(a_calibration(), *((f"p{i}", says()) for i in range(pods))))
    for _ in range(SAMPLES):
        if step.status.state.finished:
            break
        reports = [(ask.pod.name, answer(ask, finite=finite)) for ask in asks(step)]
        step = plan(seen(a_calibration(step.status), *reports, measured=step.measured))
    return step


def test_each_sample_has_a_block_hash_of_its_own() -> None:
    step = plan(seen(a_calibration(nonces=20_000), *((f"p{i}", says()) for i in range(3))))
    orders = asks(step)
    assert len(orders) == len({ask.request.block_hash for ask in orders}) == 3
    assert [(ask.request.nonces[0], len(ask.request.nonces), ask.request.r_target) for ask in orders] == [
        (0, 1000, 2.0),
        (1000, 1000, 2.0),
        (2000, 1000, 2.0),
    ]
    assert len(step.status.samples) == SAMPLES


def test_a_target_is_found_when_all_samples_are_measured() -> None:
    status = measured_by(7).status
    assert status.state is State.COMPLETE
    assert status.target is not None
    assert (status.target.nonces, status.target.valid_rate) == (2000, "0.1")
    assert (status.desired, status.done, status.nonces, status.checked) == (SAMPLES, SAMPLES, 2000, 2000)
    assert status.degraded == "TheoryDisagrees"


def test_without_a_finite_distance_there_is_no_target() -> None:
    status = measured_by(SAMPLES, finite=False).status
    assert status.outcome is not None
    assert (status.state, status.outcome.reason) == (State.FAILED, Reason.NOTHING_COMPUTED)
    assert status.degraded == "ResultsRejected"


def test_no_distance_is_stored() -> None:
    stored = measured_by(7).status.stored()
    known = {"state", "attempts", "first", "count", "measured", "pod", "uid"}
    assert all(sample.keys() <= known for sample in stored["samples"])
    assert len(json.dumps(stored)) < 16 * 1024


def test_a_new_process_measures_again_what_it_has_not_seen() -> None:
    step = plan(seen(a_calibration(), ("a", says()), ("b", says())))
    first, second = asks(step)
    step = plan(seen(a_calibration(step.status), ("a", answer(first)), ("b", answer(second))))
    assert [sample.state for sample in step.status.samples].count(SlotState.DONE) == 2
    assert sorted(step.measured) == [0, 100]
    replaced = plan(seen(a_calibration(step.status), ("a", says()), ("b", says())))
    assert [sample.state for sample in replaced.status.samples].count(SlotState.DONE) == 0
    assert replaced.status.checked == 0
    assert replaced.status.retries == 0, "no pod has lost anything"


def test_what_was_found_is_not_measured_again() -> None:
    step = measured_by(7)
    assert plan(seen(a_calibration(step.status), ("a", says()))).status == step.status
