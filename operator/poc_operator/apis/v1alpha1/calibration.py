# SPDX-License-Identifier: Apache-2.0
"""PoCCalibration: find the ``rTarget`` of the distance protocol that makes a wanted share of nonces valid."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from poc_operator.apis.v1alpha1.fields import Probability
from poc_operator.apis.v1alpha1.meta import Column, Kind, Resource
from poc_operator.apis.v1alpha1.schema import ApiModel, Int32
from poc_operator.apis.v1alpha1.status import Share, WorkStatus
from poc_operator.apis.v1alpha1.work import ConcurrencyPolicy, SampleRetry, WorkSpec
from vllm_poc.wire.messages import Protocol


class CalibrationSpec(WorkSpec):
    """What to find. Fixed once the calibration exists, except the fields that are marked as mutable."""

    valid_rate: Probability
    """Wanted share of valid nonces, above 0 and below 1. Decimal text."""
    nonces: Annotated[Int32, Field(ge=200, le=20_000)] = 2000
    """Nonces to measure. The confidence interval narrows with their square root."""
    retry: SampleRetry = SampleRetry()
    """What happens when a pod does not answer for its sample."""
    concurrency_policy: Literal[ConcurrencyPolicy.WAIT, ConcurrencyPolicy.FAIL] = ConcurrencyPolicy.WAIT
    """What happens when pods compute other work: Wait for its end, or Fail, if this calibration has not started yet."""

    @property
    def protocol(self) -> Protocol:
        """Which protocol the work is of."""
        return Protocol.DISTANCE


class CalibrationSample(Share):
    """Nonces that one pod measures together, under a block hash of their own."""

    first: Int32
    """The first of them."""
    count: Int32
    """How many they are."""
    not_computed: Int32 = 0
    """Those that had no finite result."""
    measured: Int32 = 0
    """Those that had one."""


class FoundTarget(ApiModel):
    """The target that was found."""

    r_target: str
    """The target, as decimal text."""
    low: str
    """Lower end of its 95 % confidence interval."""
    high: str
    """Upper end of its 95 % confidence interval."""
    valid_rate: str
    """The share of valid nonces that was asked for."""
    theory_rate: str
    """The share that theory gives for this target."""
    nonces: Int32
    """Nonces that were measured."""
    agrees: bool
    """Whether measurement and theory agree."""


class CalibrationStatus(WorkStatus):
    """What came out so far, and everything that the next operator process needs to go on."""

    SHARES: ClassVar[str] = "samples"

    nonces: Int32 = 0
    """Nonces to measure."""
    checked: Int32 = 0
    """Nonces measured so far."""
    not_computed: Int32 = 0
    """Those of them that had no finite result."""
    retries: Int32 = 0
    """Samples that were given out again, counting repetitions."""
    target: FoundTarget | None = None
    """The target, once all nonces are measured."""
    samples: list[CalibrationSample] = Field(default_factory=list)
    """One entry for the nonces that a pod measures together."""


class PoCCalibration(Resource):
    """PoCCalibration measures the served model: it finds the rTarget of the distance protocol that makes a wanted share
    of nonces valid."""

    KIND: ClassVar[Kind] = Kind(kind="PoCCalibration", plural="poccalibrations", short="pocc")
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("State", "string", ".status.state", "Where the calibration stands"),
        Column("Nonces", "integer", ".status.nonces", "Nonces to measure"),
        Column("Checked", "integer", ".status.checked", "Nonces measured so far"),
        Column("Rate", "string", ".spec.validRate", "Wanted share of valid nonces"),
        Column("RTarget", "string", ".status.target.rTarget", "The target that was found"),
        Column("Low", "string", ".status.target.low", "Lower end of the 95 % confidence interval"),
        Column("High", "string", ".status.target.high", "Upper end of the 95 % confidence interval"),
        Column("Degraded", "string", ".status.degraded", "What is lost or missing"),
        Column("Age", "date", ".metadata.creationTimestamp", "Time since the creation"),
        Column("Height", "integer", ".spec.blockHeight", "Height of the block", wide=True),
        Column("Hash", "string", ".spec.blockHash", "Hash of the block", wide=True),
        Column("Message", "string", ".status.message", "What the calibration does or waits for", wide=True),
    )

    spec: CalibrationSpec
    """What to find."""
    status: CalibrationStatus = Field(default_factory=CalibrationStatus)
    """What came out so far; written by the operator."""
