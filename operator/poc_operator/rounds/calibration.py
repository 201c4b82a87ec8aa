# SPDX-License-Identifier: Apache-2.0
"""Mode Calibrate: which ``rTarget`` makes the wanted share of nonces valid, measured on these pods.

Each block hash has a valid rate of its own, so each sample has its own hash, derived from the round's. How the
samples' rates differ gives the confidence interval.

By theory, outputs and target are independent and uniform on the unit sphere of 8192 dimensions. The outputs of one
block hash lie on a slice of it, of the model's hidden size, so that each hash has a rate of its own; the theory
is about their mean.
"""

import hashlib
import math
import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import stdev
from typing import Any

from poc_operator.model.conditions import Reason
from poc_operator.model.results import Calibration
from poc_operator.model.round import Round
from poc_operator.model.spec import RoundSpec
from poc_operator.model.status import Outcome, RoundStatus, Sample, SlotState
from poc_operator.rounds.end import complete, failed
from poc_operator.rounds.requests import named_nonces
from poc_operator.rounds.snapshot import Snapshot, Step
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse

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


#: Samples of a round, each with a block hash of its own.
SAMPLES = 20

#: Half the width of the 95 % confidence interval in standard errors: Student's t with 19 degrees of freedom.
STUDENT_95 = 2.093

#: Standard errors by which measurement and theory may differ: once in 350 rounds they differ by more, Student's t.
STUDENT_DISAGREES = 3.4


def choose(snapshot: Snapshot, step: Step) -> Step:
    """Split the nonces evenly."""
    wanted = snapshot.round.spec.calibrate
    count = -(-wanted.nonces // SAMPLES) if wanted else 0
    samples = [Sample(first=i * count, count=count, state=SlotState.WAITING) for i in range(SAMPLES)]
    return step.extended(samples=samples)


def request(round_: Round, sample: Sample) -> GenerateRequest:
    """Return what a pod is asked: the distances of the sample's nonces under the sample's hash."""
    derived = hashlib.sha256(f"{round_.spec.block_hash}/{sample.first}".encode()).hexdigest()
    nonces = range(sample.first, sample.first + sample.count)
    return named_nonces(round_.spec, nonces, block_hash=derived)


def take(_: Snapshot, sample: Sample, result: GeneratedResponse | ValidatedResponse) -> dict[str, Any]:
    """Return what the answer says about the sample. ValueError if it is about something else."""
    distances = result.distances if isinstance(result, GeneratedResponse) else None
    found = distances or []
    if len(found) + len(result.not_computed) != sample.count:
        raise ValueError(f"its answer has {len(found)} distances instead of {sample.count}")
    packed = struct.pack(f"<{len(found)}f", *found)
    return {"not_computed": result.not_computed, "distances": b64encode(packed).decode("ascii")}


def result(spec: RoundSpec, samples: Sequence[Sample]) -> Calibration | None:
    """Return the target; None if a sample has no distance."""
    parts = [_distances(sample) for sample in samples]
    if spec.calibrate is None or not all(parts):
        return None
    rate = float(spec.calibrate.valid_rate)
    everything = sorted(distance for part in parts for distance in part)
    r_target = _quantile(everything, rate)
    shares = [sum(distance < r_target for distance in part) / len(part) for part in parts]
    error = stdev(shares) / sqrt(len(shares))
    expected = valid_rate(r_target)
    return Calibration(
        r_target=f"{r_target:.6f}",
        low=f"{_quantile(everything, rate - STUDENT_95 * error):.6f}",
        high=f"{_quantile(everything, rate + STUDENT_95 * error):.6f}",
        valid_rate=spec.calibrate.valid_rate,
        theory_rate=f"{expected:.4f}",
        nonces=len(everything),
        agrees=abs(expected - rate) <= STUDENT_DISAGREES * error,
    )


def calibrated(_: Snapshot, status: RoundStatus) -> Outcome | None:
    """All samples are measured."""
    found = status.calibration
    if found is None:
        done = bool(status.samples) and all(sample.state is SlotState.DONE for sample in status.samples)
        if not done or status.verdict is not None:
            return None
        return failed(Reason.NOTHING_COMPUTED, "a sample has no finite distance: look at the pods' logs and GPUs")
    message = (
        f"rTarget {found.r_target} ({found.low} to {found.high} with 95 % confidence) for {found.valid_rate} valid"
    )
    return complete(f"{message}; by theory it gives {found.theory_rate}")


def _distances(sample: Sample) -> tuple[float, ...]:
    packed = b64decode(sample.distances)
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a number that this share of the ordered numbers lies below: halfway between two of them."""
    index = min(max(round(share * len(ordered)), 1), len(ordered) - 1)
    return (ordered[index - 1] + ordered[index]) / 2
