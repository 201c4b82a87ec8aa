# SPDX-License-Identifier: Apache-2.0
"""PoCValidation: recompute nonces that somebody claims to have computed, and judge the claims by a statistical test."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from poc_operator.apis.v1alpha1.fields import Decimal, Distance, Nonce, ObjectName, Probability
from poc_operator.apis.v1alpha1.meta import Column, Kind, Resource
from poc_operator.apis.v1alpha1.schema import ApiModel, Grammar, Int32, ListMap, Rule
from poc_operator.apis.v1alpha1.status import Share, WorkStatus
from poc_operator.apis.v1alpha1.work import ConcurrencyPolicy, ProtocolSpec, SampleRetry
from vllm_poc.wire.messages import Protocol
from vllm_poc.wire.stat_test import DEFAULT_TAU

#: A tau that is not the unset default of vectors: a decimal below 0.4.
_TAU = "^0+([.][0-3][0-9]*)?$"
#: So many mismatching nonces are named in the status.
MAX_NAMED_MISMATCHES = 100


class Proof(ApiModel):
    """What a prover claims for one nonce: a vector, a distance or a chain, as the protocol has it."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="[has(self.vector), has(self.distance), has(self.chain)].filter(x, x).size() == 1",
            message="set exactly one of vector, distance and chain",
        ),
    )

    nonce: Nonce
    """The nonce."""
    vector: Annotated[str, Field(max_length=10_924)] | None = None
    """Its artifact as delivered: base64 of little-endian fp16."""
    distance: Distance | None = None
    """Its distance, as decimal text."""
    chain: Annotated[str, Field(max_length=5_464)] | None = None
    """Its chain in the decode scheme: base64 of one byte for each step, the first of the prefill."""


class ConfigMapKey(ApiModel):
    """An entry of a ConfigMap of the namespace: a JSON list of proofs. It needs `rbac.readConfigMaps` in the operator's
    chart, which is on."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: Annotated[
        str,
        Field(max_length=253),
        Grammar("[-A-Za-z0-9_.]+", "must be a key of a ConfigMap: letters, digits, '-', '_' or '.'"),
    ] = "proofs.json"
    """The entry."""


class RoundSample(ApiModel):
    """Results of a PoCRound of the namespace that the gateway has. The round should be over, so that the same ones are
    picked again after a restart of the operator."""

    name: ObjectName
    """Name of the PoCRound."""
    nonces: Annotated[Int32, Field(ge=1, le=10_000)] = 200
    """How many of its results are recomputed."""
    seed: Annotated[str, Field(max_length=256)] = ""
    """A text that decides which: another one picks others."""


class Proofs(ApiModel):
    """Where the proofs are: exactly one field is set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="[has(self.inline), has(self.configMap), has(self.round)].filter(x, x).size() == 1",
            message="set exactly one of inline, configMap and round",
        ),
    )

    inline: Annotated[list[Proof], Field(min_length=1, max_length=200), ListMap(("nonce",))] | None = None
    """The proofs themselves, up to 200."""
    config_map: ConfigMapKey | None = None
    """An entry of a ConfigMap."""
    round: RoundSample | None = None
    """Results of a round that the gateway has."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The numbers of the statistical test. ``dist_threshold`` is an L2 distance, the others are probabilities."""

    dist_threshold: float
    p_mismatch: float
    p_value_threshold: float


#: What the network uses. Artifacts: the chain's default for models without a value of their own. Chains and distances:
#: the protocol's reference implementation, which has no distance threshold for the latter.
NETWORK_THRESHOLDS = {
    Protocol.ARTIFACT: Thresholds(dist_threshold=0.4, p_mismatch=0.1, p_value_threshold=0.05),
    Protocol.DECODE: Thresholds(dist_threshold=DEFAULT_TAU, p_mismatch=0.001, p_value_threshold=0.01),
    Protocol.DISTANCE: Thresholds(dist_threshold=0.0, p_mismatch=5e-4, p_value_threshold=0.01),
}


class StatTest(ApiModel):
    """When proofs count as fraud: mismatches of an honest prover are binomial, and a p-value below the threshold is
    fraud. The defaults are the network's; where the chain has values for a model, set those."""

    dist_threshold: Decimal | None = None
    """L2 distance beyond which two vectors mismatch. Default: 0.4, the chain's for models without a value of their own
    (MiniMax-M2.7 has 0.75). In the decode scheme it is tau, the margin beyond which a chain mismatches: 0.025 unless
    told otherwise. Not in the distance protocol: a distance mismatches that is not below `rTarget`."""
    p_mismatch: Probability | None = None
    """Probability that an honest prover's nonce mismatches. Default: 0.1 in the artifact protocol as on the chain,
    0.001 in the decode scheme, 0.0005 in the distance protocol."""
    p_value_threshold: Probability | None = None
    """A p-value below it is fraud. Default: 0.05 in the artifact protocol as on the chain, 0.01 in the others.
    The network's nodes judge by 0.01, since they do not read the chain's value."""

    def or_else(self, other: "StatTest") -> "StatTest":
        """Return the test with the numbers of the other one where this has none."""
        return StatTest(**{**other.model_dump(exclude_none=True), **self.model_dump(exclude_none=True)})

    def thresholds(self, protocol: Protocol) -> Thresholds:
        """Return the numbers of the test: those of the spec, else the network's."""
        network = NETWORK_THRESHOLDS[protocol]
        return Thresholds(
            dist_threshold=float(self.dist_threshold or network.dist_threshold),
            p_mismatch=float(self.p_mismatch or network.p_mismatch),
            p_value_threshold=float(self.p_value_threshold or network.p_value_threshold),
        )


class ValidationSpec(ProtocolSpec):
    """What to check. Fixed once the validation exists, except the fields that are marked as mutable."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.proofs.inline) || self.proofs.inline.all(proof, "
            "has(proof.vector) == has(self.artifact) && has(proof.chain) == has(self.decode))",
            message="each proof needs vector in the artifact protocol, distance in the distance protocol, and chain in "
            "the decode scheme",
            field_path=".proofs",
        ),
        Rule(
            rule="!has(self.statTest.distThreshold) || !has(self.rTarget)",
            message="statTest.distThreshold needs the artifact protocol: remove it",
        ),
        Rule(
            rule="!has(self.statTest.distThreshold) || !has(self.decode) || "
            f"self.statTest.distThreshold.matches('{_TAU}')",
            message="statTest.distThreshold must be below 0.4 in the decode scheme: 0.4 is the default of vectors, "
            "under which hardly any wrong chain mismatches",
        ),
    )

    proofs: Proofs
    """The claims to check."""
    stat_test: StatTest = StatTest()
    """When the proofs count as fraud."""
    retry: SampleRetry = SampleRetry()
    """What happens when a pod does not answer for its sample."""
    concurrency_policy: Literal[ConcurrencyPolicy.WAIT, ConcurrencyPolicy.FAIL] = ConcurrencyPolicy.WAIT
    """What happens when pods compute other work: Wait for its end, or Fail, if this validation has not started yet."""

    @property
    def thresholds(self) -> Thresholds:
        """The numbers of the test: those of the spec, else the network's."""
        return self.stat_test.thresholds(self.protocol)


class Sample(Share):
    """Proofs that one pod is asked for together."""

    first: Int32
    """Position of the first of them, from 0."""
    count: Int32
    """How many they are."""
    mismatches: Int32 = 0
    """Those that mismatch."""
    not_computed: Int32 = 0
    """Those that had no finite result."""


class Verdict(ApiModel):
    """The statistical test over all proofs."""

    total: Int32
    """Nonces that were compared."""
    mismatches: Int32
    """Those that mismatch."""
    not_computed: Int32
    """Nonces that had no finite result here and are left out."""
    p_value: str
    """Probability that an honest prover mismatches as often or more often, as decimal text."""
    fraud: bool
    """Whether the p-value is below the threshold."""


class ValidationStatus(WorkStatus):
    """What came out so far, and everything that the next operator process needs to go on."""

    SHARES: ClassVar[str] = "samples"

    nonces: Int32 = 0
    """Nonces to check."""
    checked: Int32 = 0
    """Nonces checked so far."""
    mismatches: Int32 = 0
    """Those of them that mismatch."""
    not_computed: Int32 = 0
    """Those of them that had no finite result."""
    mismatch_nonces: list[Int32] = Field(default_factory=list)
    """The first nonces that mismatch; at most 100."""
    retries: Int32 = 0
    """Samples that were given out again, counting repetitions."""
    verdict: Verdict | None = None
    """The verdict, once all proofs are checked."""
    proofs_digest: str | None = None
    """SHA-256 of the proofs; they must not change while they are checked."""
    samples: list[Sample] = Field(default_factory=list)
    """One entry for the proofs that a pod is asked for together."""


class PoCValidation(Resource):
    """PoCValidation checks claims of a prover. The vLLM pods of its namespace recompute the claimed nonces. A
    statistical test says whether an honest prover would have claimed them."""

    KIND: ClassVar[Kind] = Kind(kind="PoCValidation", plural="pocvalidations", short="pocv")
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("State", "string", ".status.state", "Where the validation stands"),
        Column("Nonces", "integer", ".status.nonces", "Nonces to check"),
        Column("Checked", "integer", ".status.checked", "Nonces checked so far"),
        Column("Mismatches", "integer", ".status.mismatches", "Nonces that mismatch"),
        Column("P-Value", "string", ".status.verdict.pValue", "Probability that an honest prover mismatches so often"),
        Column("Fraud", "boolean", ".status.verdict.fraud", "Whether the p-value is below the threshold"),
        Column("Degraded", "string", ".status.degraded", "What is lost or missing"),
        Column("Age", "date", ".metadata.creationTimestamp", "Time since the creation"),
        Column("Height", "integer", ".spec.blockHeight", "Height of the block", wide=True),
        Column("Hash", "string", ".spec.blockHash", "Hash of the block", wide=True),
        Column("Message", "string", ".status.message", "What the validation does or waits for", wide=True),
    )

    spec: ValidationSpec
    """What to check."""
    status: ValidationStatus = Field(default_factory=ValidationStatus)
    """What came out so far; written by the operator."""
