# SPDX-License-Identifier: Apache-2.0
"""What a fleet's spec says of its pods: model, GPUs, flags, variables, cache, and changes of the pods' template."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from poc_operator.apis.v1alpha1.fields import ObjectName
from poc_operator.apis.v1alpha1.fleet_decode import DECODE_VARIABLES
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, LABEL_KEY, LabelValue
from poc_operator.apis.v1alpha1.schema import ApiModel, Grammar, Int32, Preserved, Rule, cel_text

#: GPUs of one pod: those of one Kubernetes node.
MAX_GPUS = 16
#: Kubernetes nodes of one replica.
MAX_KUBERNETES_NODES = 16
#: Resource that a pod asks for its GPUs by.
GPU_RESOURCE = "nvidia.com/gpu"
#: Label of Kubernetes nodes with the product of their GPUs.
PRODUCT_LABEL = "nvidia.com/gpu.product"

#: Flags of vLLM that fields of the spec stand for, and what the field is.
OWN_FLAGS: Mapping[str, str] = {
    "--enable-poc": "always set",
    "--host": "host",
    "--port": "port",
    "--served-model-name": "servedName",
    "--tensor-parallel-size": "parallelism.tensor",
    "-tp": "parallelism.tensor",
    "--pipeline-parallel-size": "parallelism.pipeline",
    "-pp": "parallelism.pipeline",
    "--nnodes": "parallelism.kubernetesNodes",
    "-n": "parallelism.kubernetesNodes",
    "--node-rank": "parallelism.kubernetesNodes",
    "-r": "parallelism.kubernetesNodes",
    "--master-addr": "parallelism.kubernetesNodes",
    "--headless": "parallelism.kubernetesNodes",
}
#: Environment variables that fields of the spec stand for.
OWN_VARIABLES = (
    "VLLM_POC_TOKEN",
    "VLLM_POC_TOKEN_FILE",
    "VLLM_POC_OPEN",
    "VLLM_POC_CALLBACK_ALLOW",
    "HF_TOKEN",
    *DECODE_VARIABLES,
)


def _spellings(flag: str) -> str:
    """Return a pattern of all that vLLM takes for the flag: underscores too, and the begin of a long flag."""
    if not flag.startswith("--"):
        return flag
    first, *others = (letter.replace("-", "[-_]") for letter in flag.removeprefix("--"))
    return f"--{first}{'(?:'.join(['', *others])}{')?' * len(others)}"


OWN_FLAG = "(?:" + "|".join(map(_spellings, OWN_FLAGS)) + ")(?:=.*)?"
TEXT = Grammar("[^\\x00-\\x1f\\x7f]+", "must not be empty, nor have line breaks or other control characters")

ImageName = Annotated[str, Field(max_length=512), Grammar("[!-~]+", "must be an image's name, without spaces")]
HostName = Annotated[str, Field(max_length=253), Grammar("[0-9A-Za-z.:_-]+", "must be an address or a host name")]
Argument = Annotated[str, Field(max_length=1024), TEXT]
Quantity = Annotated[
    str,
    Field(max_length=24),
    Grammar(
        "[0-9]{1,12}(?:[.][0-9]{1,6})?(?:m|k|M|G|T|Ki|Mi|Gi|Ti)?",
        'must be a quantity in quotes, for example "4" or "64Gi"',
    ),
]
_RESOURCE_NAME = "(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
Quantities = Annotated[
    dict[str, Quantity],
    Field(max_length=16),
    Rule(
        rule=f"self.all(key, key.size() <= 317 && key.matches({cel_text(f'^(?:{_RESOURCE_NAME})$')}))",
        message="each key must be the name of a resource, such as cpu or memory",
    ),
    Rule(
        rule=f"!self.exists(key, key == {cel_text(GPU_RESOURCE)})",
        message=f"must not have {GPU_RESOURCE}: set gpu.count instead",
    ),
]


class FleetModel(ApiModel):
    """What vLLM loads: exactly one field is set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(rule="has(self.preset) != has(self.path)", message="set exactly one of preset and path"),
    )

    preset: Annotated[ObjectName, Field(max_length=63)] | None = None
    """A preset of the operator: model, flags and GPUs that fit together."""
    path: (
        Annotated[
            str,
            Field(max_length=512),
            Grammar("[^-\\x00-\\x20\\x7f][^\\x00-\\x20\\x7f]*", "must be a hub id or a path, without spaces"),
        ]
        | None
    ) = None
    """A hub id, or a path in the container."""


class Gpu(ApiModel):
    """The GPUs of each pod."""

    product: Annotated[LabelValue, Field(min_length=1)] | None = None
    """Value of the node label `nvidia.com/gpu.product`, such as `NVIDIA-H200`. Pods run only on such Kubernetes nodes.
    Without it, a preset takes the product of the cluster's Kubernetes nodes, if it knows exactly one of them."""
    count: Annotated[Int32, Field(ge=1, le=MAX_GPUS)] | None = None
    """GPUs of each pod. Without it: as many as the preset has for the product, none with `model.path`. There `product`
    needs it."""


class Parallelism(ApiModel):
    """How the GPUs of a replica share the model. The product of `tensor` and `pipeline` is the number of GPUs of its
    pods."""

    tensor: Annotated[Int32, Field(ge=1, le=MAX_GPUS)] = 1
    """vLLM's `--tensor-parallel-size`."""
    pipeline: Annotated[Int32, Field(ge=1, le=MAX_GPUS)] = 1
    """vLLM's `--pipeline-parallel-size`."""
    kubernetes_nodes: Annotated[Int32, Field(ge=1, le=MAX_KUBERNETES_NODES)] = 1
    """Kubernetes nodes that one replica spans, with one pod for each: vLLM's `--nnodes`. With more than one the pods
    are kept by a LeaderWorkerSet, whose controller the cluster must have. It cannot be changed."""


class SecretKey(ApiModel):
    """An entry of a Secret of the fleet's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[
        str, Field(max_length=253), Grammar("[-._A-Za-z0-9]+", "must have letters, digits, '-', '_' and '.' alone")
    ]
    """Key of the entry."""


class ValueFrom(ApiModel):
    """Where a variable's value is taken from."""

    secret_key_ref: SecretKey
    """An entry of a Secret."""


class EnvVar(ApiModel):
    """An environment variable of the vLLM container."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(rule="has(self.value) != has(self.valueFrom)", message="set exactly one of value and valueFrom"),
        Rule(
            rule=f"!(self.name in [{', '.join(map(cel_text, OWN_VARIABLES))}])",
            message="the operator sets VLLM_POC_TOKEN, VLLM_POC_TOKEN_FILE, VLLM_POC_OPEN, VLLM_POC_CALLBACK_ALLOW, "
            "HF_TOKEN and VLLM_POC_DECODE_*: use auth, callbackAllow, huggingFace.tokenSecret and decode",
            field_path=".name",
        ),
    )

    name: Annotated[
        str,
        Field(max_length=253),
        Grammar("[A-Za-z_][A-Za-z0-9_]*", "must be a variable's name: letters, digits and '_', no digit first"),
    ]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096), Grammar("[^\\x00]*", "must have no NUL")] | None = None
    """Its value."""
    value_from: ValueFrom | None = None
    """Where its value is taken from."""


class AccessMode(StrEnum):
    """How Kubernetes nodes may mount a PVC."""

    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"


def _same(field: str) -> str:
    there = f"has(self.{field})"
    return f"({there} == has(oldSelf.{field}) && (!{there} || self.{field} == oldSelf.{field}))"


_GIBIBYTES = "(int({}.size.replace('Gi', '').replace('Ti', '')) * ({}.size.endsWith('Ti') ? 1024 : 1))"


class Cache(ApiModel):
    """Where weights and compile caches are kept: in your PVC, in one that the operator makes, or in an emptyDir."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.existingClaim) || !has(self.size)",
            message="set at most one of existingClaim (your PVC) and size (a PVC that the operator makes)",
        ),
        Rule(
            rule="has(self.size) || (!has(self.storageClass) && !has(self.accessMode))",
            message="storageClass and accessMode need size: set it, or remove them",
        ),
        Rule(
            rule="!has(self.download) || !self.download || has(self.size) || has(self.existingClaim)",
            message="download needs a PVC: set size or existingClaim",
            field_path=".download",
        ),
        Rule(
            rule="!has(self.size) || !has(oldSelf.size) || "
            f"{_GIBIBYTES.format('self', 'self')} >= {_GIBIBYTES.format('oldSelf', 'oldSelf')}",
            message="a PVC cannot shrink: keep its size, or remove size and name another PVC in existingClaim",
            field_path=".size",
        ),
        Rule(
            rule=f"!has(self.size) || !has(oldSelf.size) || ({_same('storageClass')} && {_same('accessMode')})",
            message="storageClass and accessMode of a PVC cannot be changed: name another PVC in existingClaim",
        ),
    )

    existing_claim: ObjectName | None = None
    """A PVC of the fleet's namespace."""
    size: (
        Annotated[
            str,
            Field(max_length=8),
            Grammar("[1-9][0-9]{0,5}[GT]i", 'must be a size in Gi or Ti, for example "400Gi"'),
        ]
        | None
    ) = None
    """Size of a PVC that the operator makes for all pods of the fleet. It is deleted with the fleet."""
    storage_class: ObjectName | None = None
    """Storage class of that PVC. Without it: the cluster's default."""
    access_mode: AccessMode | None = None
    """Access mode of that PVC, ReadWriteMany unless told otherwise. ReadWriteOnce will do on one Kubernetes node."""
    download: bool = False
    """True: a Job downloads the model into the PVC, and pods get another model only when it is there."""

    @property
    def gibibytes(self) -> int | None:
        """The size of the PVC that the operator makes, in GiB."""
        return int(self.size[:-2]) * (1024 if self.size.endswith("Ti") else 1) if self.size is not None else None


class HuggingFace(ApiModel):
    """Access to Hugging Face."""

    token_secret: ObjectName | None = None
    """A Secret of the fleet's namespace whose key `token` is an access token of Hugging Face."""
    offline: bool = False
    """True: pods do not ask Hugging Face and serve from the cache alone (`HF_HUB_OFFLINE`). A download does."""


class Auth(ApiModel):
    """Who may call the PoC routes."""

    open: bool = False
    """True: whoever reaches a pod can start and stop rounds. False: callers need the token of the namespace's Secret
    that the operator reads, `auth.existingSecret` of its chart. The operator makes that Secret if there is none."""


class Resources(ApiModel):
    """CPU and memory of each pod. GPUs are asked for by `gpu`."""

    requests: Quantities | None = None
    """What each pod is guaranteed."""
    limits: Quantities | None = None
    """What each pod may use at most. `/dev/shm`, up to 8Gi, counts towards the memory."""


class WhenUnsatisfiable(StrEnum):
    """What happens to a pod that cannot be spread."""

    SCHEDULE_ANYWAY = "ScheduleAnyway"
    DO_NOT_SCHEDULE = "DoNotSchedule"


class Spread(ApiModel):
    """How the fleet's pods are spread over Kubernetes nodes."""

    topology_key: Annotated[
        str,
        Field(min_length=1, max_length=317),
        Grammar(LABEL_KEY, "must be the key of a node label, such as kubernetes.io/hostname"),
    ] = "kubernetes.io/hostname"
    """Node label whose values get the same number of pods, give or take one."""
    when_unsatisfiable: WhenUnsatisfiable = WhenUnsatisfiable.SCHEDULE_ANYWAY
    """Whether a pod that cannot be spread so is scheduled all the same."""


class DisruptionBudget(ApiModel):
    """How many pods may be evicted at a time, as when Kubernetes nodes are drained."""

    max_unavailable: Annotated[Int32, Field(ge=1, le=1000)] | None = None
    """Pods that may be away at a time. Without it: `update.maxUnavailable`. Pods that are not ready may always be
    evicted."""


LabelMap = Annotated[
    dict[str, LabelValue],
    Field(max_length=16),
    Rule(
        rule=f"self.all(key, key.size() <= 317 && key.matches({cel_text(f'^(?:{LABEL_KEY})$')}))",
        message="each key must be a label's key",
    ),
    Rule(
        rule=f"!self.exists(key, key == {cel_text(FLEET_LABEL)})",
        message=f"must not have {FLEET_LABEL}, by which the fleet finds what is its own",
    ),
]


class Metrics(ApiModel):
    """How Prometheus finds the metrics of the pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.labels) || (has(self.podMonitor) && self.podMonitor)",
            message="labels are those of the PodMonitor: set podMonitor, or remove them",
            field_path=".labels",
        ),
    )

    pod_monitor: bool = False
    """True: the operator makes a PodMonitor for Prometheus Operator, whose CRDs the cluster must have."""
    labels: LabelMap | None = None
    """More labels of the PodMonitor, by which your Prometheus selects it, such as `release`."""


class PullSecret(ApiModel):
    """A Secret with credentials for a registry."""

    name: ObjectName
    """Name of the Secret, in the fleet's namespace."""


class TemplateMetadata(ApiModel):
    """More metadata of the pods."""

    labels: LabelMap | None = None
    """More labels."""
    annotations: (
        Annotated[
            dict[str, Annotated[str, Field(max_length=4096)]],
            Field(max_length=16),
            Rule(
                rule=f"self.all(key, key.size() <= 317 && key.matches({cel_text(f'^(?:{LABEL_KEY})$')}))",
                message="each key must be an annotation's key",
            ),
        ]
        | None
    ) = None
    """More annotations."""


class PodTemplate(ApiModel):
    """A strategic merge patch of the pods' template, for what the spec has no field for. The container is `vllm`."""

    metadata: TemplateMetadata | None = None
    """More labels and annotations."""
    spec: Annotated[dict[str, Any], Preserved()] | None = None
    """Patch of the pods' spec, such as `tolerations`, `affinity` or `runtimeClassName`. Objects are merged, containers,
    volumes and variables by their names, volume mounts by their paths. Other lists replace. Null removes a field."""


def own_flag(argument: str) -> bool:
    """Whether an argument is a flag that a field of the spec stands for."""
    return re.fullmatch(OWN_FLAG, argument) is not None
