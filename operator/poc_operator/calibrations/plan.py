# SPDX-License-Identifier: Apache-2.0
"""The chain of policies of a PoCCalibration: ``POLICIES``, read from top to bottom, is what the operator does.

Each sample has a block hash of its own, derived from the calibration's, since each hash has a valid rate of its own.
How the samples' rates differ gives the confidence interval.

By theory, outputs and target are independent and uniform on the unit sphere of 8192 dimensions. The outputs of one
block hash lie on a slice of it, of the model's hidden size. The theory is about the mean of all hashes.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import sqrt
from statistics import stdev

from poc_operator.apis.v1alpha1.calibration import (
    CalibrationSample,
    CalibrationSpec,
    CalibrationStatus,
    FoundTarget,
    PoCCalibration,
)
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.schema import number_of
from poc_operator.apis.v1alpha1.status import Outcome, SlotState
from poc_operator.planning.conditions import given_up, set_conditions
from poc_operator.planning.eligibility import Finding
from poc_operator.planning.lifecycle import LIMITS, close, complete, end_by, expire, failed, suspend
from poc_operator.planning.samples import (
    PodResult,
    ask_pods,
    bind_samples,
    count_samples,
    may_split,
    note_times,
    observe_samples,
    pace,
    samples_failed,
)
from poc_operator.planning.snapshot import Snapshot, Step, named_nonces
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest

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


#: Samples of a calibration, each with a block hash of its own.
SAMPLES = 20

#: What was measured: the distances of each sample, by its first nonce.
Measured = Mapping[int, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class CalibrationSnapshot(Snapshot[PoCCalibration]):
    """What a calibration sees. ``measured`` is from the last step of this process; another process measures again."""

    measured: Measured = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CalibrationStep(Step[CalibrationStatus]):
    """What a policy yields. ``measured`` is kept for the next snapshot, and stored nowhere: it may be long."""

    measured: Measured = field(default_factory=dict)


Policy = Callable[[CalibrationSnapshot, CalibrationStep], CalibrationStep]


def observe(snapshot: CalibrationSnapshot, step: CalibrationStep) -> CalibrationStep:
    """Take what the pods answered; what another process measured is measured again."""
    measured = dict(step.measured)

    def take(sample: CalibrationSample, result: PodResult) -> CalibrationSample:
        measured[sample.first] = found = _distances(sample, result)
        return sample.model_copy(update={"measured": len(found), "not_computed": len(result.not_computed)})

    known = [_unless_forgotten(sample, step) for sample in step.status.samples]
    samples, events = observe_samples(snapshot, known, take)
    return replace(step.extended(samples=samples, events=events), measured=measured)


def _distances(sample: CalibrationSample, result: PodResult) -> Sequence[float]:
    """Return the distances that were measured. ValueError if the answer is about something else."""
    found = (result.distances if isinstance(result, GeneratedResponse) else None) or []
    if len(found) + len(result.not_computed) != sample.count:
        raise ValueError(f"its answer has {len(found)} distances instead of {sample.count}")
    return tuple(found)


def _unless_forgotten(sample: CalibrationSample, step: CalibrationStep) -> CalibrationSample:
    needed = step.status.target is None and step.status.outcome is None
    if not needed or sample.state is not SlotState.DONE or sample.first in step.measured:
        return sample
    # It was not lost by a pod: no retry is spent.
    again = {"state": SlotState.WAITING, "pod": None, "uid": None, "attempts": max(0, sample.attempts - 1)}
    return sample.model_copy(update=again)


def conclude(snapshot: CalibrationSnapshot, step: CalibrationStep) -> CalibrationStep:
    """Find the target once all samples are measured, each with a distance at least."""
    status = step.status
    if status.target is not None or not _all_done(status) or not all(sample.measured for sample in status.samples):
        return step
    distances = [step.measured[sample.first] for sample in status.samples]
    return step.extended(target=found_target(snapshot.work.spec, distances))


def _all_done(status: CalibrationStatus) -> bool:
    return bool(status.samples) and all(sample.state is SlotState.DONE for sample in status.samples)


def calibrated(_: CalibrationSnapshot, status: CalibrationStatus) -> Outcome | None:
    """All samples are measured."""
    found = status.target
    if found is None:
        if not _all_done(status):
            return None
        return failed(Reason.NOTHING_COMPUTED, "a sample has no finite distance: look at the pods' logs and GPUs")
    message = (
        f"rTarget {found.r_target} ({found.low} to {found.high} with 95 % confidence) for {found.valid_rate} valid"
    )
    return complete(f"{message}; by theory it gives {found.theory_rate}")


ENDS = (calibrated, samples_failed, *LIMITS)


def end(snapshot: CalibrationSnapshot, step: CalibrationStep) -> CalibrationStep:
    """End the calibration when it is done, or will never be."""
    return end_by(ENDS, snapshot, step)


def choose_samples(snapshot: CalibrationSnapshot, step: CalibrationStep) -> CalibrationStep:
    """Split the nonces evenly, once, when a pod can compute them."""
    if not may_split(snapshot, step):
        return step
    count = -(-snapshot.work.spec.nonces // SAMPLES)
    samples = [CalibrationSample(first=i * count, count=count, state=SlotState.WAITING) for i in range(SAMPLES)]
    return step.extended(samples=samples)


def ask(snapshot: CalibrationSnapshot, step: CalibrationStep) -> CalibrationStep:
    """Give each waiting sample a pod, and ask the pods."""
    if step.status.stop_time:
        return step
    samples = bind_samples(snapshot, step.status.samples)
    asks = ask_pods(snapshot, samples, lambda sample: request(snapshot.work.spec, sample))
    return step.extended(samples=samples, actions=asks)


def request(spec: CalibrationSpec, sample: CalibrationSample) -> GenerateRequest:
    """Return what a pod is asked: the distances of the sample's nonces under the sample's hash."""
    derived = hashlib.sha256(f"{spec.block_hash}/{sample.first}".encode()).hexdigest()
    return named_nonces(spec, range(sample.first, sample.first + sample.count), block_hash=derived)


def tell(snapshot: CalibrationSnapshot, step: CalibrationStep) -> CalibrationStep:
    """Write the conditions."""
    status = step.status
    findings = list[Finding]()
    if status.not_computed:
        findings.append((Reason.RESULTS_REJECTED, f"{number_of(status.not_computed, 'nonce')} had no finite result"))
    if (lost := given_up(status, "sample")) is not None:
        findings.append(lost)
    if status.target is not None and not status.target.agrees:
        theory = f"by theory rTarget {status.target.r_target} makes {status.target.theory_rate} valid"
        findings.append((Reason.THEORY_DISAGREES, f"{theory}, measured is {status.target.valid_rate}"))
    return set_conditions(snapshot, step, pace=pace(snapshot, step), findings=findings)


POLICIES: tuple[Policy, ...] = (
    observe,  # what pods answered
    note_times,
    conclude,  # what follows from all answers
    end,  # must it end?
    suspend,  # may it run?
    choose_samples,  # which nonces are asked for together, once
    ask,  # which pod for which sample
    close,
    count_samples,
    tell,
)


def plan(snapshot: CalibrationSnapshot) -> CalibrationStep:
    """Return the calibration's next status, and the actions to take once it is recorded."""
    step = CalibrationStep(status=snapshot.work.status, measured=snapshot.measured)
    if step.status.state.finished:
        return expire(snapshot, step)
    for policy in POLICIES:
        step = policy(snapshot, step)
    return step
