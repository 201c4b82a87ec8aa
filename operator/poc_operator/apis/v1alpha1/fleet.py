# SPDX-License-Identifier: Apache-2.0
"""PoCFleet: the vLLM pods that serve one model, and the objects that they need."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType, OtherCondition, StoredCondition
from poc_operator.apis.v1alpha1.fields import ObjectName
from poc_operator.apis.v1alpha1.fleet_decode import FleetDecode
from poc_operator.apis.v1alpha1.fleet_pod import (
    OWN_FLAG,
    TEXT,
    Argument,
    Auth,
    Cache,
    DisruptionBudget,
    EnvVar,
    FleetModel,
    Gpu,
    HostName,
    HuggingFace,
    ImageName,
    Metrics,
    Parallelism,
    PodTemplate,
    PullSecret,
    Resources,
    Spread,
)
from poc_operator.apis.v1alpha1.fleet_update import UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import (
    Download,
    Healing,
    PodList,
    ReferenceList,
    RestartList,
    SelfCheck,
    Update,
)
from poc_operator.apis.v1alpha1.meta import Column, Kind, Resource
from poc_operator.apis.v1alpha1.schema import ApiModel, Grammar, Int32, Int64, ListMap, Message, Rule, cel_text
from poc_operator.apis.v1alpha1.validation import StatTest

#: A hub id, with or without an organisation.
HUB_ID = "[A-Za-z0-9][-A-Za-z0-9._]*(?:/[A-Za-z0-9][-A-Za-z0-9._]*)?"
#: Pods that one fleet may have. The status has an entry for each, of up to 4 KB with the fields' managers, and vectors
#: beside: with more of them etcd could refuse it, and nothing would be evicted or rolled back.
MAX_REPLICAS = 256
#: How long a pod may load at most.
MAX_STARTUP_SECONDS = 86_400


def _nodes(spec: str) -> str:
    return f"(has({spec}.parallelism) ? {spec}.parallelism.kubernetesNodes : 1)"


class FleetSpec(ApiModel):
    """The vLLM pods of one model."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.parallelism) || !has(self.model.preset)",
            message="parallelism needs model.path: a preset sets its own, so remove parallelism",
            field_path=".parallelism",
        ),
        Rule(
            rule="!has(self.gpu.product) || !has(self.model.path) || has(self.gpu.count)",
            message="gpu.product needs gpu.count with model.path, or pods get no GPU: set gpu.count, or select "
            "Kubernetes nodes by podTemplate.spec.nodeSelector instead",
            field_path=".gpu",
        ),
        Rule(
            rule="!has(self.parallelism) || self.parallelism.tensor * self.parallelism.pipeline == "
            "(has(self.gpu.count) ? self.gpu.count : 1) * self.parallelism.kubernetesNodes",
            message="parallelism.tensor * parallelism.pipeline must be gpu.count (1 if it is not set) * "
            "parallelism.kubernetesNodes",
            field_path=".parallelism",
        ),
        Rule(
            rule=f"{_nodes('self')} == {_nodes('oldSelf')}",
            message="parallelism.kubernetesNodes cannot be changed: make another fleet",
            field_path=".parallelism",
        ),
        Rule(
            rule=f"{_nodes('self')} == 1 || !has(self.cache.accessMode) || self.cache.accessMode != 'ReadWriteOnce'",
            message="cache.accessMode must be ReadWriteMany if parallelism.kubernetesNodes is more than 1",
            field_path=".cache.accessMode",
        ),
        Rule(
            rule=f"!self.cache.download || !has(self.model.path) || self.model.path.matches({cel_text(f'^{HUB_ID}$')})",
            message="cache.download needs a hub id in model.path, such as Qwen/Qwen3-8B",
            field_path=".cache.download",
        ),
        Rule(
            rule="!self.auth.open || (has(self.callbackAllow) && self.callbackAllow.size() > 0)",
            message='auth.open needs callbackAllow: name the hosts that pods may post to, or "*" for any',
            field_path=".callbackAllow",
        ),
        Rule(
            rule="!has(self.decode) || !has(self.model.path) || has(self.decode.reserve)",
            message="decode.reserve is needed with model.path: a preset has its own",
            field_path=".decode",
        ),
        Rule(
            rule="!has(self.decode) || !has(self.parallelism) || self.parallelism.pipeline == 1",
            message="the decode scheme does not run in a pipeline: set parallelism.pipeline to 1, or remove decode",
            field_path=".decode",
        ),
    )

    model: FleetModel
    """What vLLM loads."""
    served_name: Annotated[str, Field(max_length=256), TEXT] | None = None
    """Name to serve the model under. Without it: its hub id or path."""
    image: ImageName | None = None
    """The worker image. Without it: `fleets.image` of the operator's chart."""
    image_pull_secrets: Annotated[list[PullSecret], Field(max_length=16), ListMap(("name",))] | None = None
    """Secrets with credentials for the registry."""
    replicas: Annotated[Int32, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Number of replicas: pods, or groups of `parallelism.kubernetesNodes` pods. `kubectl scale` and autoscalers change
    it. For more pods make another fleet: rounds take the pods of several by `selector`."""
    gpu: Gpu = Gpu()
    """The GPUs of each pod."""
    parallelism: Parallelism | None = None
    """How the GPUs of a replica share the model. Without it, all of them are one tensor-parallel group of one pod."""
    engine_args: (
        Annotated[
            list[Argument],
            Field(max_length=64),
            Rule(
                rule=f"self.all(flag, !flag.matches({cel_text(f'^(?:{OWN_FLAG})$')}))",
                message="must not set --enable-poc, --host, --port, --served-model-name, --tensor-parallel-size, "
                "--pipeline-parallel-size, --nnodes, --node-rank, --master-addr or --headless: fields of the spec "
                "stand for them",
            ),
        ]
        | None
    ) = None
    """More flags of vLLM, each with its value as in `--max-model-len=8192`. They come after those of the preset, and
    the last one wins."""
    env: Annotated[list[EnvVar], Field(max_length=64), ListMap(("name",))] | None = None
    """More environment variables."""
    cache: Cache = Cache()
    """Where weights and compile caches are kept."""
    hugging_face: HuggingFace = HuggingFace()
    """Access to Hugging Face."""
    auth: Auth = Auth()
    """Who may call the PoC routes."""
    callback_allow: (
        Annotated[
            list[
                Annotated[
                    str,
                    Field(max_length=253),
                    Grammar("[-A-Za-z0-9._:*?]+", "must be a host or a pattern such as *.example.org"),
                ]
            ],
            Field(max_length=64),
        ]
        | None
    ) = None
    """Hosts that pods may post results to, as patterns such as `*.example.org`. With a gateway, its host must be among
    them. Without this list it is the only one if the operator runs with `--gateway-url`. Else it is any host that the
    caller names; callers have the token."""
    decode: FleetDecode | None = None
    """The decode scheme. Without it, pods compute the prefill scheme alone."""
    port: Annotated[Int32, Field(ge=1, le=65_535)] = 8000
    """Port of vLLM's server."""
    host: HostName | None = None
    """Address that vLLM's server listens on. Without it: all of the pod."""
    resources: Resources = Resources()
    """CPU and memory of each pod."""
    startup_seconds: Annotated[Int32, Field(ge=30, le=MAX_STARTUP_SECONDS)] | None = None
    """How long a pod may load its model before it is restarted. Without it: an hour, and unless
    `huggingFace.offline` is true, 50 s more for each GiB of the preset's weights."""
    termination_grace_period_seconds: Annotated[Int32, Field(ge=30, le=3600)] = 60
    """Time that a pod has to end. It must hold a pause of 5 s, the pod's `VLLM_POC_DRAIN_SECONDS` (20), vLLM's
    `--shutdown-timeout`, and some seconds for vLLM itself."""
    priority_class_name: ObjectName | None = None
    """Priority class of the pods."""
    spread: Spread | None = None
    """How the pods are spread. Without it, the scheduler decides."""
    disruption_budget: DisruptionBudget = DisruptionBudget()
    """How many pods may be evicted at a time, as when Kubernetes nodes are drained."""
    metrics: Metrics = Metrics()
    """How Prometheus finds the metrics of the pods."""
    update: Update = Update()
    """How pods get a new revision of their template."""
    self_check: SelfCheck = SelfCheck()
    """How pods prove that they compute what the others do."""
    healing: Healing = Healing()
    """What is done about a pod that is ready and gets nothing done although work waits for it, or whose GPUs fail."""
    pod_template: PodTemplate | None = None
    """Changes of the pods' template that the spec has no field for."""

    @property
    def kubernetes_nodes(self) -> int:
        """Kubernetes nodes that one replica spans."""
        return self.parallelism.kubernetes_nodes if self.parallelism is not None else 1


class FleetStatus(ApiModel):
    """What there is of the fleet; written by the operator."""

    observed_generation: Int64 = 0
    """Generation of the spec that this status is about."""
    replicas: Int32 = 0
    """Pods that exist. Of a replica that spans several Kubernetes nodes only the first pod counts, here and below."""
    ready_replicas: Int32 = 0
    """Those of them that are ready."""
    updated_replicas: Int32 = 0
    """Those of them that have the newest revision of the template."""
    ready: str = ""
    """Ready pods and wanted ones, as in `2/4`."""
    reason: str = ""
    """The one word that `kubectl get` shows: the reason of the condition Ready. If Ready is true and something is
    wrong all the same, it is the reason of Degraded."""
    message: Message = ""
    """What the fleet does or waits for, in one sentence. What is wrong comes first."""
    current_revision: str = ""
    """Revision that all pods had last."""
    update_revision: str = ""
    """Newest revision: that of the pods that are created from now on."""
    selector: str = ""
    """Selects the fleet's pods, for autoscalers."""
    model: str = ""
    """Hub id or path of the model."""
    gpu_product: str = ""
    """GPU product that a preset was resolved for."""
    gpu_count: Int32 = 0
    """GPUs of each pod."""
    seq_len: Int32 | None = None
    """The network's tokens per nonce for the model, by the preset: `model.seqLen` of rounds."""
    k_dim: Int32 | None = None
    """The network's numbers per vector for the model, by the preset: `artifact.kDim` of rounds."""
    stat_test: StatTest | None = None
    """The preset's thresholds for self-checks, as far as it has them. Not set if they are not known."""
    expected_nonces_per_minute: Int32 | None = None
    """Nonces per minute that all replicas together should compute. The figure is the network's published one, not
    measured here."""
    pods: PodList = Field(default_factory=list)
    """The pods that exist, and what their self-checks have found."""
    self_check_references: ReferenceList = Field(default_factory=list)
    """The vectors that pods are compared with. They are forgotten while `selfCheck.enabled` is false."""
    restarts: RestartList = Field(default_factory=list)
    """Pods that hung or whose GPUs failed, and that were to be replaced within the last hour."""
    download: Download | None = None
    """The last download, if `cache.download` is true."""
    update: UpdateStatus = UpdateStatus()
    """How far the newest revision is on its way to all pods."""
    conditions: Annotated[list[StoredCondition], ListMap(("type",))] = Field(default_factory=list)
    """Conditions, for programs."""

    @property
    def own_conditions(self) -> Mapping[str, Condition]:
        """The conditions of the operator, by type."""
        return {str(found.type): found for found in self.conditions if isinstance(found, Condition)}

    @property
    def all_conditions(self) -> list[Condition | OtherCondition]:
        """All conditions, those of other writers too."""
        return list(self.conditions)

    def stored(self) -> dict[str, Any]:
        """Return the status as JSON for the API server."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


#: The fleet's name stands in names of Services and in a label of the pods.
_NAME = "[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?"


class PoCFleet(Resource):
    """PoCFleet keeps the vLLM pods of one model: their StatefulSet or LeaderWorkerSet, Services, disruption
    budget, network policy, cache and token. Rounds take its pods by `fleetRef`."""

    KIND: ClassVar[Kind] = Kind(
        kind="PoCFleet",
        plural="pocfleets",
        short="pocf",
        scale=True,
        name_rule=Rule(
            rule=f"self.metadata.name.matches({cel_text(f'^{_NAME}$')})",
            message="the name must have at most 40 lower-case letters, digits and '-', begin with a letter and not end "
            "with '-': Services are named after it",
        ),
    )
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("Model", "string", ".status.model", "Hub id or path of the model"),
        Column("Ready", "string", ".status.ready", "Ready pods and wanted ones"),
        Column("Up-To-Date", "integer", ".status.updatedReplicas", "Pods of the newest revision"),
        Column("Status", "string", ".status.reason", "Whether the fleet is ready, or what is wrong"),
        Column("Age", "date", ".metadata.creationTimestamp", "Time since the creation"),
        Column("GPU", "string", ".status.gpuProduct", "GPU product", wide=True),
        Column("Revision", "string", ".status.updateRevision", "Newest revision", wide=True),
        Column("Update", "string", ".status.update.phase", "How far an update is", wide=True),
        Column("Message", "string", ".status.message", "What the fleet does or waits for", wide=True),
    )
    CONDITIONS: ClassVar[Mapping[str, str]] = {
        ConditionType.READY: "All replicas are ready and have passed the self-check. `False` reads as in progress in "
        "tools that follow kstatus.",
        ConditionType.PROGRESSING: "Pods are created, load their model, are checked, or have an old revision.",
        ConditionType.DEGRADED: "A pod cannot run or fails the self-check, an update failed, or objects of the fleet "
        "cannot be kept as they should be.",
        ConditionType.STALLED: "The fleet cannot go on without a change by you, as of its spec, or of an image that "
        "cannot be pulled. `True` reads as failed in tools that follow kstatus.",
    }

    spec: FleetSpec
    """The vLLM pods of one model."""
    status: FleetStatus = Field(default_factory=FleetStatus)
    """What there is of the fleet; written by the operator."""
