# SPDX-License-Identifier: Apache-2.0
"""How a fleet is kept right: when its pods are replaced, how they are checked, and what is known of each pod."""

from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from poc_operator.apis.v1alpha1.schema import (
    ERROR_BYTES,
    ApiModel,
    Int32,
    Int64,
    ListMap,
    Message,
    Open,
    Rule,
    shorten,
)
from poc_operator.apis.v1alpha1.validation import StatTest

#: Nonces of a self-check unless the spec says otherwise. With the network's thresholds, 7 mismatches of 32 fail.
CHECK_NONCES = 32
#: Tokens per nonce and numbers per vector, unless the spec or the preset says otherwise.
CHECK_SEQ_LEN, CHECK_K_DIM = 256, 12
#: Numbers that all vectors of a check may have together: the status has them, 3 bytes each.
MAX_CHECK_NUMBERS = 65_536
#: Models beside the present one that a fleet remembers as downloaded.
MAX_EARLIER = 4


class UpdateStrategy(StrEnum):
    """When pods of an old revision are replaced."""

    BETWEEN_ROUNDS = "BetweenRounds"
    IMMEDIATE = "Immediate"
    NEVER = "Never"


class Update(ApiModel):
    """How pods get a new revision of their template."""

    strategy: UpdateStrategy = UpdateStrategy.BETWEEN_ROUNDS
    """When a pod may be replaced: BetweenRounds while no round needs it and none is expected, Immediate at any time,
    Never by the operator."""
    max_unavailable: Annotated[Int32, Field(ge=1, le=100)] = 1
    """Pods that may be away at a time because of an update."""
    canary: bool = True
    """Whether one pod is replaced first, and the others only when it is ready and has passed the self-check."""
    paused: bool = False
    """True: no further pod is replaced until it is false again."""


class SelfCheck(ApiModel):
    """How pods prove, before they take part and then from time to time, that they compute what the others do."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=f"!has(self.kDim) || self.nonces * self.kDim <= {MAX_CHECK_NUMBERS}",
            message=f"selfCheck.nonces * selfCheck.kDim must be at most {MAX_CHECK_NUMBERS}: set fewer nonces",
            field_path=".nonces",
        ),
    )

    enabled: bool = True
    """False: every ready pod takes part."""
    nonces: Annotated[Int32, Field(ge=8, le=1000)] = CHECK_NONCES
    """Nonces that a pod computes for a check."""
    interval_seconds: Annotated[Int32, Field(ge=60, le=604_800)] = 86_400
    """Seconds between two checks of a pod. A pod is also checked whenever its server has started."""
    seq_len: Annotated[Int32, Field(ge=1, le=65_536)] | None = None
    """Tokens per nonce. Without it: the preset's, else 256."""
    k_dim: Annotated[Int32, Field(ge=1, le=8192)] | None = None
    """Numbers per vector. Without it: the preset's, else 12."""
    stat_test: StatTest = StatTest()
    """When a pod counts as failed: as for proofs of a validation. What is left out here the preset says, else the
    defaults."""


class Healing(ApiModel):
    """What is done about a pod that is ready and gets nothing done although work waits for it, or whose GPUs fail."""

    enabled: bool = True
    """False: such a pod is told of, and stays."""
    hung_seconds: Annotated[Int32, Field(ge=60, le=86_400)] = 600
    """Seconds without any progress, while work waits, after which a pod counts as hung. They must exceed the longest
    time that one step of the model may take."""
    gpu_errors: Annotated[Int32, Field(ge=1, le=10_000)] = 3
    """A pod whose GPUs have had so many errors is replaced, while no round needs it and none is expected. Double-bit
    ECC errors count, and Xid errors that no program caused, since the operator first asked the pod."""
    restarts_per_hour: Annotated[Int32, Field(ge=1, le=60)] = 2
    """Pods of the fleet that may be replaced for both within an hour."""


class Stage(StrEnum):
    """Where a pod is on its way to serving. A reader must expect other words."""

    PENDING = "Pending"
    CREATING = "Creating"
    PULLING = "Pulling"
    LOADING = "Loading"
    CHECKING = "Checking"
    READY = "Ready"
    NOT_READY = "NotReady"
    FAILING = "Failing"


class CheckResult(StrEnum):
    """What a pod's last self-check found. A reader must expect other words."""

    PENDING = "Pending"
    PASSED = "Passed"
    FAILED = "Failed"


#: What a pod tells of its server, cut when it is read, so that two fingerprints compare as they are stored.
_Told = Annotated[str, AfterValidator(partial(shorten, limit=ERROR_BYTES))]


class Fingerprint(ApiModel):
    """What a pod's results depend on, as far as it tells. Empty where it does not."""

    gpu: _Told = ""
    """Product of the GPUs."""
    driver: _Told = ""
    """Version of their driver."""
    vllm: _Told = ""
    """Version of vLLM."""
    attention: _Told = ""
    """vLLM's name of the kernels for attention."""
    experts: _Told = ""
    """vLLM's name of the kernels for experts."""
    flags: _Told = ""
    """vLLM's further flags that may change results, as they took effect."""
    batch: _Told = ""
    """Nonces of the check that a forward pass has by vLLM's limits. One that the pod has tuned may have others."""
    details: _Told = ""
    """More that tells servers apart: dtype, KV cache, quantization, and whose forward pass it is."""


class FleetPod(ApiModel):
    """One pod of the fleet."""

    name: str
    """Name of the pod."""
    uid: str
    """Uid of the pod."""
    server: str = ""
    """The container that the result is about; its id changes with every restart."""
    reference: str = ""
    """Name of the check that the result is about: that of its reference in `selfCheckReferences`."""
    judged_by: str = ""
    """Digest of what the result was judged by: the test's numbers, and the preset's vectors. If these change, the pod
    is judged anew."""
    revision: str = ""
    """Revision of the template that it was made from."""
    stage: Annotated[Stage, Open()] = Stage.PENDING
    """Where it is on its way to serving. Pending until it has a Kubernetes node, Creating until that has its volumes
    and its network. Then Pulling until its container exists, Loading until vLLM serves, Checking until its
    self-check has a result, and Ready. NotReady has served and does not answer its probe now. Failing does not run, and
    waiting does not help."""
    node: str = ""
    """Kubernetes node that it was given to."""
    memory_errors: Int64 | None = None
    """Double-bit ECC errors of its GPUs over their lives, as told last. None if its GPUs do not count them."""
    memory_errors_before: Int64 | None = None
    """Those that its GPUs had when the operator first asked this pod."""
    xid_errors: Int64 | None = None
    """Xid errors of its GPUs: the most that one server of the pod has counted since it was first asked. Those that
    programs cause do not count. None if the driver does not tell."""
    last_xid: Int64 | None = None
    """Number of the last of these Xid errors."""
    result: Annotated[CheckResult, Open()] = CheckResult.PENDING
    """What its last self-check found."""
    p_value: str | None = None
    """Probability that an honest pod has at least so many mismatches: what the network's test would judge by."""
    message: Message = ""
    """The finding in one sentence."""
    checked_time: datetime | None = None
    """When it was checked last."""
    fingerprint: Fingerprint | None = None
    """What its results depend on."""


class DownloadState(StrEnum):
    """How far a download is. A reader must expect other words."""

    DOWNLOADING = "Downloading"
    DOWNLOADED = "Downloaded"
    FAILED = "Failed"


class DownloadedModel(ApiModel):
    """A model that the cache has beside the present one."""

    job: str
    """Name of the Job that downloaded it."""
    model: str
    """Hub id of the model."""
    claim: str = ""
    """UID of the PVC that has it. Empty if it is not known."""


class Download(ApiModel):
    """The download of a model into the cache."""

    job: str
    """Name of the Job, another one for each model, revision and PVC."""
    model: str
    """Hub id of the model."""
    claim: str = ""
    """UID of the PVC that has it. Another PVC of the same name does not. Empty if it is not known."""
    state: Annotated[DownloadState, Open()] = DownloadState.DOWNLOADING
    """How far it is."""
    percent: Int32 | None = None
    """Percent of the bytes that are there. None if its pod does not tell."""
    message: Message = ""
    """Why it failed, in the container's words."""
    earlier: Annotated[list[DownloadedModel], Field(max_length=MAX_EARLIER), ListMap(("job",))] = Field(
        default_factory=list
    )
    """Models that were downloaded before, the last ones. A spec that goes back to one of them waits for no download."""


class Restart(ApiModel):
    """A pod that was to be replaced, since it hung or its GPUs failed."""

    name: str
    """Name of the pod."""
    uid: str
    """Uid of the pod."""
    time: datetime
    """When that was decided."""
    reason: str = "PodHung"
    """PodHung or GpuFaulty. A reader must expect other words."""
    node: str = ""
    """Kubernetes node that it ran on."""
    message: Message = ""
    """What it had not got done, or the errors of its GPUs."""


class SelfCheckReference(ApiModel):
    """The vectors that pods of one model are compared with."""

    name: str
    """What was computed: model, `seqLen`, `kDim` and the number of nonces."""
    vectors: str
    """The vectors, one after the other, as base64 of fp16 numbers, little-endian. One of NaN was not computed."""
    pod: str = ""
    """Name of the pod that computed them."""
    time: datetime | None = None
    """When it did."""
    fingerprint: Fingerprint = Fingerprint()
    """What its results depend on."""


ReferenceList = Annotated[list[SelfCheckReference], ListMap(("name",))]
PodList = Annotated[list[FleetPod], ListMap(("name",))]
RestartList = Annotated[list[Restart], ListMap(("uid",))]
