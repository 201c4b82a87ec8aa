# SPDX-License-Identifier: Apache-2.0
"""The network's requests and answers, where they differ from a pod's."""

from datetime import datetime
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from vllm_poc.wire.answers import RoundConfig, RoundStats
from vllm_poc.wire.generate import GenerateRequest, JobState
from vllm_poc.wire.messages import InitGenerateRequest, Scheme, WireMessage

#: The reference's node numbers its backends from this port on; clients show it and ask for jobs by it.
FIRST_PORT = 5001

_OF_THE_CLUSTER = {"group_id": 0, "n_groups": 1, "start_index": 0, "end_index": None}


class NetworkInit(InitGenerateRequest):
    """Start a round on the whole cluster: its pods become the groups of the request's node."""

    @model_validator(mode="after")
    def _leaves_slots_to_the_cluster(self) -> Self:
        told = [name for name, default in _OF_THE_CLUSTER.items() if getattr(self, name) != default]
        if told:
            raise ValueError(f"{', '.join(told)} cannot be told to a cluster, which splits a node's nonces itself")
        if self.use_layer_hooks or self.use_sign_flips is False:
            raise ValueError(
                "use_layer_hooks and use_sign_flips: this cluster's distance rounds use sign flips only, leave both out"
            )
        return self


class NetworkGenerate(GenerateRequest):
    """Compute named nonces, whoever's they are, on any pods of the cluster.

    What ``stat_test`` does not say is decided by `poc_gateway.node_api.job_results.stat_test_of`.
    """


class QueuedRequest(WireMessage):
    """A request for named nonces that has not ended. ``nonces`` is 0 if a release before this one took it."""

    request_id: str
    status: Literal[JobState.QUEUED, JobState.RUNNING]
    nonces: int
    created_at: datetime


class QueuedRequests(WireMessage):
    """``GET pow/generate``: the oldest requests that have not ended, and how many there are."""

    total: int
    requests: list[QueuedRequest]


class UpRequest(WireMessage):
    """Body of ``POST inference/up``. Only ``model`` can be compared: how it is served is set by the cluster's chart."""

    model: str = Field(min_length=1)


class UpStatus(WireMessage):
    """``GET inference/up/status``."""

    is_running: bool
    status: Literal["not_started", "starting", "running"]
    error: str | None = None


class ModelName(WireMessage):
    """A model of the hub, at a commit or at any."""

    hf_repo: str = Field(min_length=1, max_length=512)
    hf_commit: str | None = None


WeightsState = Literal["DOWNLOADED", "DOWNLOADING", "NOT_FOUND"]


class ModelStatus(WireMessage):
    """``POST models/status``. How far a download is, pods do not tell."""

    model: ModelName
    status: WeightsState
    progress: None = None
    error_message: str | None = None


class ModelDownload(WireMessage):
    """``POST models/download``. IGNORED means that the model is not fetched."""

    task_id: str
    status: Literal["DOWNLOADED", "DOWNLOADING", "IGNORED"]
    model: ModelName


class ListedModel(WireMessage):
    """A model whose weights are there."""

    model: ModelName
    status: WeightsState


class ModelList(WireMessage):
    """``GET models/list``."""

    models: list[ListedModel]


class GpuDevice(WireMessage):
    """A GPU, by its place among all of the ML node's. Sizes are MiB; null is what its driver does not tell."""

    index: int
    name: str
    total_memory_mb: int | None
    free_memory_mb: int | None
    used_memory_mb: int | None
    utilization_percent: int | None
    temperature_c: int | None
    is_available: bool
    error_message: str | None


class GpuDevices(WireMessage):
    """``GET gpu/devices``."""

    devices: list[GpuDevice]
    count: int


class GpuDriver(WireMessage):
    """``GET gpu/driver``."""

    driver_version: str
    cuda_driver_version: str | None
    nvml_version: str | None


class Backend(WireMessage):
    """One pod, by its place among the ready ones."""

    port: int
    status: str


class BackendStatus(Backend):
    """One pod, and how far its slot is."""

    nonces_per_second: float = 0.0
    stats: RoundStats = Field(default_factory=RoundStats)


class BackendFailure(WireMessage):
    """What went wrong, by the pod's place."""

    port: int
    error: str


class FanOut(WireMessage):
    """The node's answer to a call that changes the state. ``detail`` is ours: what keeps it from taking effect."""

    status: Literal["OK"] = "OK"
    backends: int | None = None
    n_groups: int | None = None
    results: list[Backend]
    errors: list[BackendFailure] = Field(default_factory=list)
    detail: str | None = None


class NodeStatus(WireMessage):
    """The node's status: of all pods together, and of each."""

    status: Literal["GENERATING", "MIXED", "IDLE", "NO_BACKENDS"]
    backends: list[BackendStatus]
    detail: str | None = None


class PodCommand(WireMessage):
    """A pod's answer to a call that changes the state."""

    status: Literal["OK"] = "OK"
    pow_status: dict[str, Any]
    detail: str | None = None


class PodStatus(WireMessage):
    """The cluster's status, told as one pod would. Of the distance protocol are the fields from ``state`` on.

    The lists of valid nonces are left out: they are delivered, and served by the gateway's own result routes.
    """

    status: Literal["GENERATING", "IDLE"]
    config: RoundConfig | None = None
    stats: RoundStats
    state: str
    total_checked: int = 0
    total_valid: int = 0
    elapsed_seconds: float = 0.0
    rate_per_second: float = 0.0
    r_target: float | None = None
    detail: str | None = None


class NodeState(WireMessage):
    """``GET /api/v1/state``."""

    state: Literal["POW", "INFERENCE", "STOPPED"]
    version: str
    poc_status: str
    inference_healthy: bool
    loaded_model: str | None
    poc_validation_inference: bool


class NodeVersions(WireMessage):
    """``GET /api/v1/versions``. vLLM's release is that of the first pod that answers.

    The release of the network's plugin is that of the pod which offers least; null if that pod is one of ours.
    ``schemes``, which is ours, are those that every ready pod offers.
    """

    version: str
    vllm_version: str | None
    gonka_poc_version: str | None = None
    poc_validation_inference: bool
    schemes: list[Scheme]


class PowVersions(WireMessage):
    """``GET pow/versions``, as a pod answers it. Our pods name no release of the network's plugin."""

    vllm_version: str
    gonka_poc_version: str | None = None
    poc_validation_inference: bool
    schemes: list[Scheme]
