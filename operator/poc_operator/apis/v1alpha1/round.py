# SPDX-License-Identifier: Apache-2.0
"""PoCRound: compute new nonces for a block and a key, each pod those of its own residue class."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field

from poc_operator.apis.v1alpha1.fields import MAX_SECONDS, Decimal, ObjectName, Seconds
from poc_operator.apis.v1alpha1.meta import Column, Kind, Resource
from poc_operator.apis.v1alpha1.schema import ApiModel, Grammar, Int32, Int64, Mutable, Rule
from poc_operator.apis.v1alpha1.status import Share, WorkStatus
from poc_operator.apis.v1alpha1.work import ConcurrencyPolicy, ProtocolSpec
from vllm_poc.wire.messages import CALLBACK_URL, MAX_CALLBACK_URL, MAX_HOST, check_callback_url
from vllm_poc.wire.partition import MAX_NONCE

#: Slots that one round may have in this cluster. Their list is the largest part of the status, and the API server must
#: be able to store it whatever their counters, pods and errors are.
MAX_SLOTS = 3_000

#: Largest priority, as a PriorityClass of a user may have.
MAX_PRIORITY = 1_000_000_000

CallbackURL = Annotated[
    str,
    Field(max_length=MAX_CALLBACK_URL),
    AfterValidator(check_callback_url),
    Grammar(
        CALLBACK_URL,
        "must be an http:// or https:// URL with a host, a valid port if any, "
        "without user name, password, query or fragment",
    ),
    Rule(
        rule=rf"self.matches('^https?://(?:\\[|[^/:]{{1,{MAX_HOST}}}(?:[/:]|$))')",
        message=f"must have a host name of at most {MAX_HOST} characters",
    ),
    Rule(
        rule=r"!self.matches('^https?://\\[[0-9A-Fa-f:]+\\]') || "
        "isIP(self.substring(self.indexOf('[') + 1, self.indexOf(']')))",
        message="must have a valid IPv6 address in its brackets",
    ),
    Rule(
        rule="!self.lowerAscii().matches('^https?://(?:[^/]*[.])?xn--')",
        message="must not have an internationalised host name (xn--): use another name of the host",
    ),
]


class CallbackSecretRef(ApiModel):
    """A Secret of the round's namespace, of the type `kubernetes.io/basic-auth`: its keys `username` and `password` are
    what the receiver asks for. It needs `rbac.readSecrets` in the operator's chart, which is off."""

    name: ObjectName
    """Name of the Secret."""


class Nodes(ApiModel):
    """The ML nodes that this cluster serves: ids `first` to `last` of `count`, each by `groups` pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(rule="self.first <= self.last", message="the range is empty: first must not exceed last"),
        Rule(
            rule="self.last < self.count",
            message="last must be below count: ML node ids run from 0 to count-1",
        ),
        Rule(
            rule=f"(self.last - self.first + 1) * (has(self.groups) ? self.groups : 1) <= {MAX_SLOTS}",
            message=f"has too many slots: (last - first + 1) * groups must not exceed {MAX_SLOTS}; "
            "serve fewer ML nodes in this round, or use fewer groups",
        ),
    )

    first: Annotated[Int32, Field(ge=0, le=99_999)]
    """First ML node id served here."""
    last: Annotated[Int32, Field(ge=0, le=99_999)]
    """Last ML node id served here."""
    count: Annotated[Int32, Field(ge=1, le=100_000)]
    """Number of ML node ids of the whole host."""
    groups: Annotated[Int32, Field(ge=1, le=64)] | None = None
    """Pods per ML node id. All clusters of a host must use the same number. Without it, the replicas of the fleet share
    the ids evenly; without a fleet, the pods that match when the first of them is ready."""

    @property
    def ids(self) -> range:
        """The ids served here."""
        return range(self.first, self.last + 1)


class Stop(ApiModel):
    """When a round is complete: exactly one field is set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="[has(self.afterSeconds), has(self.afterNonces), has(self.afterValid)].filter(x, x).size() == 1",
            message="set exactly one of afterSeconds, afterNonces and afterValid",
        ),
    )

    after_seconds: Annotated[Int32, Field(ge=1, le=MAX_SECONDS)] | None = None
    """Complete so many seconds after the first pod started."""
    after_nonces: Annotated[Int32, Field(ge=1, le=MAX_NONCE)] | None = None
    """Complete when so many nonces are computed and settled: delivered, rejected, or with nothing to send."""
    after_valid: Annotated[Int32, Field(ge=1, le=MAX_NONCE)] | None = None
    """Complete when so many valid nonces have been delivered. Distance protocol only."""


class RetryPolicy(StrEnum):
    """Where a slot that its pod lost starts again."""

    RESUME = "Resume"
    RESTART = "Restart"
    NEVER = "Never"


class Retry(ApiModel):
    """What happens when a pod loses its slot, as by a restart. What the cluster caused, as an eviction, is free, and so
    is a deleted pod that delivers and stops within its grace period."""

    policy: RetryPolicy = RetryPolicy.RESUME
    """Resume at the first nonce that is not delivered, Restart at the first of all, or Never: give the slot up."""
    backoff_limit_per_slot: Annotated[Int32, Field(ge=0, le=1000)] = 10
    """Retries of one slot. It fails when it is lost once more."""
    backoff_limit: Annotated[Int32, Field(ge=0, le=100_000)] = 1000
    """Retries in the whole round. A slot that is lost after them fails."""


class StallAction(StrEnum):
    """What is done about a pod that stalls again after its work was given to it anew."""

    RETRY = "Retry"
    DELETE_POD = "DeletePod"


class Stall(ApiModel):
    """What happens when a pod computes without progress although no chat holds it back, or does not answer."""

    after_seconds: Annotated[Int32, Field(ge=10, le=86_400)] = 120
    """Seconds without progress after which a pod's work is stopped and given to it anew. In the decode scheme a pod
    gets half a second for each of `decode.maxTokens` at least, and twice its longest batch so far."""
    unreachable_seconds: Annotated[Int32, Field(ge=10, le=86_400)] = 300
    """Seconds without an answer after which a pod counts as stalled."""
    action: StallAction = StallAction.RETRY
    """DeletePod evicts a pod that stalls again or does not answer, so that its slot moves on. A PodDisruptionBudget
    that forbids it is followed, and the eviction is tried again later. It needs `rbac.deletePods` in the operator's
    chart."""


class CrossCheck(ApiModel):
    """Pods recompute some nonces of each other now and then, and those that differ are named."""

    interval_seconds: Annotated[Int32, Field(ge=10, le=86_400)] = 300
    """Seconds between two comparisons."""
    nonces: Annotated[Int32, Field(ge=1, le=64)] = 8
    """Nonces that each pod computes for one."""
    max_difference: Decimal | None = None
    """Largest L2 distance of two vectors, 0.2 unless told otherwise, or largest difference of two distances, 0.002
    unless told otherwise."""


class RoundSpec(ProtocolSpec):
    """What to compute. Fixed once the round exists, except the fields that are marked as mutable."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.stop) || !has(self.stop.afterValid) || has(self.rTarget)",
            message="stop.afterValid needs rTarget: in the artifact protocol every nonce counts, use stop.afterNonces",
        ),
        Rule(
            rule="!has(self.crossCheck) || !has(self.decode)",
            message="crossCheck cannot compare chains, since those of honest GPUs fork: remove it, and check results "
            "by a PoCValidation",
            field_path=".crossCheck",
        ),
        Rule(
            rule="!has(self.callbackSecretRef) || has(self.callbackURL)",
            message="callbackSecretRef needs callbackURL: set it, or remove callbackSecretRef",
            field_path=".callbackSecretRef",
        ),
        Rule(
            rule="self.finish || !oldSelf.finish",
            message="cannot be taken back: create a new round",
            field_path=".finish",
        ),
    )

    nodes: Nodes
    """The ML nodes that this cluster serves; pods are spread over them."""
    callback_url: CallbackURL | None = None
    """Results are posted to this URL + `/generated`, by the pods or by the gateway. Pods deliver to the gateway if the
    operator runs with `--gateway-url`. Without this URL results are only counted, or kept in the gateway."""
    callback_secret_ref: CallbackSecretRef | None = None
    """The user and the password for `callbackURL`, sent as Basic authentication. The Secret may change while the round
    runs; it is read again about once a minute."""
    stop: Stop | None = None
    """When the round is complete. Without it, the round runs until it is suspended, finished or deleted, until a
    deadline passes, or until all nonces are computed."""
    retry: Retry = Retry()
    """What happens when a pod loses its slot, as by a restart."""
    stall: Stall = Stall()
    """What happens when a pod gets nothing done, or does not answer."""
    cross_check: CrossCheck | None = None
    """Lets the pods recompute nonces of each other. Without it they do not."""
    concurrency_policy: ConcurrencyPolicy = ConcurrencyPolicy.WAIT
    """What happens when a pod computes other work. Wait: this round gets the pod when it is its turn. Replace: the
    other work is stopped if its priority is lower, or the same and its block height lower. Work that is no round of the
    namespace has priority 0. Fail: this round fails, unless it has started."""
    priority: Annotated[Int32, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), Mutable()] = 0
    """Of several rounds that wait for a pod, the one with the highest priority gets it. Of those with the same, rounds
    with `concurrencyPolicy: Replace` go first, the highest block before the others. Then the oldest round goes first.
    With Replace the priority also says whose work is stopped."""
    stop_deadline_seconds: Annotated[Seconds, Mutable()] = 300
    """How long the pods may take to stop when the round ends or is suspended. Those that still compute then are named,
    and not waited for any longer."""
    finish: Annotated[bool, Mutable()] = False
    """True ends the round now as if its `stop` were reached: pods deliver what is left, and the round is Complete. A
    suspended round is complete at once, and so is one that has not started. It cannot be taken back."""


class Assignment(Share):
    """One slot and who works on it."""

    node: Int32 = 0
    """ML node id of the slot."""
    group: Int32 = 0
    """Group of the slot."""
    session: str | None = None
    """Session of the pod's server; another session means that it has restarted."""
    start: Int64 = 0
    """Index of the slot's nonces at which the current pod began."""
    next: Int64 = 0
    """First index that is not computed."""
    end: Int64 | None = None
    """First index that the pod must not compute yet. With `stop.afterNonces` or `stop.afterValid` the operator deals
    out what is left."""
    delivered: Int64 = 0
    """First index that is not settled."""
    valid: Int64 = 0
    """Valid nonces up to `delivered`, of all pods that worked on the slot."""
    valid_before: Int64 = 0
    """Those of them below `start`, from earlier pods."""
    rejected: Int64 = 0
    """Nonces up to `delivered` that had no finite result or were refused."""
    rejected_before: Int64 = 0
    """Those of them below `start`, from earlier pods."""
    disruptions: Int32 = 0
    """Attempts that do not count as retries. The cluster ended them, the pod refused to start, or other work came
    first."""
    stalls: Int32 = 0
    """How often the current pod has stalled."""
    restarts: Int32 | None = None
    """How often the container of the pod's server had restarted when the pod last answered. Unset if no operator has
    looked yet."""
    previous: str | None = None
    """Name of the pod that had the slot before, while it waits. Another pod is preferred."""
    lost: datetime | None = None
    """Since when the slot's work is lost; it is given out again once the gateway has said what it has of it."""
    leased: bool = True
    """Whether the pod stops by itself when its lease runs out. Reference pods do not."""
    lease_end_time: datetime | None = None
    """When the lease of a pod that is not asked to compute on has run out. Another pod may have the slot then."""
    displaces: bool = False
    """Whether the slot's reference pod computed other work when it got the slot, and has not been idle since. What it
    computes is not of the slot then."""
    unconfirmed: bool = False
    """Whether the pod had to stop and did not say that it has, since it does not answer."""


class Totals(ApiModel):
    """Sums over all slots."""

    checked: Int64 = 0
    """Nonces computed and kept."""
    valid: Int64 = 0
    """Valid nonces that were delivered; in the artifact protocol, artifacts that were delivered. With a gateway each
    result is counted once, however often pods computed it."""
    delivered: Int64 = 0
    """Nonces that are settled: delivered, rejected, or with nothing to send."""
    rejected: Int64 = 0
    """Nonces without a finite result, or refused by the receiver for good."""
    retries: Int32 = 0
    """Slots that were given out again, counting repetitions."""
    rate: str = "0"
    """Nonces per second as decimal text: of the pods that compute now, and the mean once the round is over."""


class Deviation(ApiModel):
    """A pod whose results differ from those of most others, or that the others do not outvote."""

    pod: str
    """Name of the pod."""
    mismatches: Int32
    """Nonces for which it differs."""


class CrossCheckStatus(ApiModel):
    """The last comparison of the round's pods. While one is under way, the deviations are from the one before."""

    time: datetime
    """When it began."""
    pending: bool
    """Whether it still runs."""
    number: Int32
    """Its number, from 1."""
    nonces: list[Int32] = Field(default_factory=list)
    """The nonces of the comparison that runs."""
    compared: Int32 = 0
    """Pods that were compared."""
    deviating: list[Deviation] = Field(default_factory=list)
    """The first pods that differ; at most 20."""
    deviating_pods: Int32 = 0
    """How many pods differ."""


class RivalDecision(ApiModel):
    """What was found out about the results of one nonce, until the gateway has taken note of it."""

    nonce: Int32
    """The nonce."""
    forged: bool = False
    """Whether no result is honest."""
    conflict: Int64 | None = None
    """The gateway's id of the honest result, if it is not the stored one."""
    alike: list[Int64] = Field(default_factory=list)
    """The gateway's ids of others that differ from it no more than GPUs do."""
    up_to: Int64
    """The largest of the gateway's ids that were compared."""


class RivalCheckStatus(ApiModel):
    """The last time that a pod was asked to compute nonces for which others had delivered different results."""

    time: datetime
    """When it began."""
    number: Int32
    """Its number, from 1."""
    pending: bool
    """Whether the pod computes."""
    answered: bool
    """Whether it had an answer."""
    pod: str
    """Name of the pod that was asked: it has delivered none of the results."""
    uid: str
    """Its uid."""
    nonces: list[Int32] = Field(default_factory=list)
    """The nonces that it computes."""
    decisions: list[RivalDecision] = Field(default_factory=list)
    """What the gateway has yet to take note of."""


class SlotWait(ApiModel):
    """How long a slot had no pod after the start of the round."""

    node: Int32
    """ML node id of the slot."""
    group: Int32
    """Group of the slot."""
    seconds: Int64 = 0
    """Seconds without a pod that are over."""
    since: datetime | None = None
    """Since when it has none. Unset while it has one."""


#: So many slots are told of.
MAX_WAITS = 20
_NOT_COUNTED = dict.fromkeys(("next", "delivered", "valid", "rejected"), 0)


class RoundStatus(WorkStatus):
    """What came out so far, and everything that the next operator process needs to go on."""

    SHARES: ClassVar[str] = "assignments"

    totals: Totals = Totals()
    """Sums over all slots."""
    slots: Int32 = 0
    """Number of residue classes that the nonces are split into, `nodes.count` times `groups`; fixed at the start."""
    groups: Int32 = 0
    """Groups per ML node; fixed at the start."""
    lease_end_time: datetime | None = None
    """When the leases of all pods have run out if nobody renews them. It is recorded before they are."""
    worked_seconds: Int64 = 0
    """Seconds that the pods worked before the last suspension, for the mean rate."""
    slot_waits: Annotated[list[SlotWait], Field(max_length=MAX_WAITS)] = Field(default_factory=list)
    """Slots that had no pod after the start of the round, about the 20 longest."""
    cross_check: CrossCheckStatus | None = None
    """The last comparison of the pods."""
    rivals: RivalCheckStatus | None = None
    """The last decision about nonces for which pods delivered different results."""
    assignments: list[Assignment] = Field(default_factory=list)
    """One entry for each slot that this cluster serves."""

    def without_counters(self) -> Self:
        """Return the status without what moves while pods just compute: counters, and messages, which repeat them."""
        slots = [slot.model_copy(update=_NOT_COUNTED) for slot in self.assignments]
        conditions = self.with_own_conditions(message="")
        cleared = {"message": "", "totals": Totals(), "assignments": slots, "conditions": conditions}
        return self.model_copy(update=cleared)


class PoCRound(Resource):
    """PoCRound is one round of Proof of Compute. The vLLM pods of its namespace compute new nonces for a block and a
    key, each pod those of its own residue class."""

    KIND: ClassVar[Kind] = Kind(kind="PoCRound", plural="pocrounds", short="pocr")
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("State", "string", ".status.state", "Where the round stands"),
        Column("Desired", "integer", ".status.desired", "Slots of the round"),
        Column("Running", "integer", ".status.running", "Slots that a pod computes now"),
        Column("Done", "integer", ".status.done", "Slots that are done"),
        Column("Checked", "integer", ".status.totals.checked", "Nonces computed"),
        Column("Valid", "integer", ".status.totals.valid", "Valid nonces delivered"),
        Column("Rate", "string", ".status.totals.rate", "Nonces per second, the mean once the round is over"),
        Column("Degraded", "string", ".status.degraded", "What is lost or missing"),
        Column("Age", "date", ".metadata.creationTimestamp", "Time since the creation"),
        Column("Retries", "integer", ".status.totals.retries", "Slots that were given out again", wide=True),
        Column("Priority", "integer", ".spec.priority", "Priority in the queue for pods", wide=True),
        Column("Height", "integer", ".spec.blockHeight", "Height of the block", wide=True),
        Column("Hash", "string", ".spec.blockHash", "Hash of the block", wide=True),
        Column("RTarget", "string", ".spec.rTarget", "Target of the distance protocol", wide=True),
        Column("Message", "string", ".status.message", "What the round does or waits for", wide=True),
    )

    spec: RoundSpec
    """What to compute."""
    status: RoundStatus = Field(default_factory=RoundStatus)
    """What came out so far; written by the operator."""
