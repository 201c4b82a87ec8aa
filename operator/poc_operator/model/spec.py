# SPDX-License-Identifier: Apache-2.0
"""``spec`` of a PoCRound.

The CRD's schema and CEL rules have refused every malformed spec before one arrives here, and have
filled in the defaults; the models repeat only the types.
"""

import re
from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from poc_operator.model.base import ApiModel, Decimal
from poc_operator.model.checks import CalibrationSpec, CrossCheckSpec, FraudSpec, ProofsSpec
from vllm_poc.wire.messages import Protocol

#: Slots that one round may have here. A plan of so many takes a tenth of a second, a status of them fits into etcd.
MAX_SLOTS = 10_000

_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class Mode(StrEnum):
    """What the pods do: compute new nonces, recompute those of others, or find the target for a valid rate."""

    GENERATE = "Generate"
    VALIDATE = "Validate"
    CALIBRATE = "Calibrate"


class NodeRange(ApiModel):
    """Node ids ``first`` to ``last`` of ``count`` are served by this cluster, each by ``groups`` pods.

    Without ``groups`` every pod that matches at the start gets a slot of its own.
    """

    first: int
    last: int
    count: int
    groups: int | None = None

    @property
    def ids(self) -> range:
        """The node ids served here."""
        return range(self.first, self.last + 1)


class ArtifactSpec(ApiModel):
    """Parameters of the artifact protocol."""

    k_dim: int = 12


class ModelSpec(ApiModel):
    """The model that the pods must serve and how its inputs are made."""

    name: str
    seq_len: int
    strong_rng: bool = False


class Selector(ApiModel):
    """Which pods of the round's namespace belong to it."""

    match_labels: dict[str, str]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with these labels belongs to the round."""
        return self.match_labels.items() <= labels.items()

    @property
    def query(self) -> str | None:
        """The selector as the API server's ``labelSelector``; None if no pod can have such labels.

        A comma in a value, for example, would make it another selector.
        """
        possible = all(_LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(v) for key, v in self.match_labels.items())
        return ",".join(f"{key}={value}" for key, value in self.match_labels.items()) if possible else None


class StopSpec(ApiModel):
    """When a round is complete; exactly one field is set."""

    after_seconds: int | None = None
    after_nonces: int | None = None
    after_valid: int | None = None


class ReissuePolicy(StrEnum):
    """Where a pod that lost its part of the round starts again."""

    RESUME = "Resume"
    RESTART = "Restart"
    NEVER = "Never"


class ReissueSpec(ApiModel):
    """How often lost work is given out again."""

    policy: ReissuePolicy = ReissuePolicy.RESUME
    limit_per_pod: int = 10
    limit: int = 1000


class StallAction(StrEnum):
    """What is done about a pod that stalls again after its work was given to it anew."""

    REISSUE = "Reissue"
    DELETE_POD = "DeletePod"


class StallSpec(ApiModel):
    """When a pod counts as stalled, and what is done about it."""

    after_seconds: int = 120
    unreachable_seconds: int = 300
    action: StallAction = StallAction.REISSUE


class BusyPolicy(StrEnum):
    """What is done about a pod that computes other work than this round's."""

    WAIT = "Wait"
    REPLACE = "Replace"
    FAIL = "Fail"


class RoundSpec(ApiModel):
    """What the user asked for."""

    block_hash: str
    block_height: int
    public_key: str
    nodes: NodeRange = NodeRange(first=0, last=0, count=1)
    r_target: Decimal | None = None
    artifact: ArtifactSpec | None = None
    model: ModelSpec
    selector: Selector
    port: int = 8000
    mode: Mode = Mode.GENERATE
    proofs: ProofsSpec | None = None
    fraud: FraudSpec = Field(default_factory=FraudSpec)
    calibrate: CalibrationSpec | None = None
    cross_check: CrossCheckSpec | None = None
    batch_size: int = 32
    callback_url: str | None = None
    stop: StopSpec | None = None
    active_deadline_seconds: int | None = None
    start_deadline_seconds: int = 900
    poll_failure_seconds: int = 300
    reissue: ReissueSpec = Field(default_factory=ReissueSpec)
    stall: StallSpec = Field(default_factory=StallSpec)
    on_busy: BusyPolicy = BusyPolicy.WAIT
    suspend: bool = False
    finish: bool = False
    ttl_seconds_after_finished: int | None = None

    @property
    def protocol(self) -> Protocol:
        """Which protocol the round runs."""
        return Protocol.ARTIFACT if self.artifact is not None else Protocol.DISTANCE
