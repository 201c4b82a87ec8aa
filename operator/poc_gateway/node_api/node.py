# SPDX-License-Identifier: Apache-2.0
"""The area of the ML node itself: its state, what runs on it, whether it serves a model, stop, machine, and weights.

The pods are the cluster's: what they serve is set by a chart, and no call of the network starts or stops them. All of
them together are the machine. Its GPUs are numbered through all pods, in the order of the pods' names.

The weights too are the cluster's to fetch and to delete. A model counts as downloaded when a ready pod serves it, and
as being downloaded while pods that will serve it are not ready. The commit is not compared, since a server does not
tell which one it has loaded.
"""

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import APIRouter, Response

from poc_gateway import __version__
from poc_gateway.errors import Refusal, documented
from poc_gateway.node_api import node_metrics
from poc_gateway.node_api.base_url import Service
from poc_gateway.node_api.cluster import ReadyPod
from poc_gateway.node_api.messages import (
    FanOut,
    GpuDevice,
    GpuDevices,
    GpuDriver,
    ListedModel,
    ModelDownload,
    ModelList,
    ModelName,
    ModelStatus,
    NodeState,
    NodeVersions,
    UpRequest,
    UpStatus,
    WeightsState,
)
from poc_gateway.node_api.round_routes import CHANGES, node_status, stopped
from poc_gateway.node_api.service import NodeApi, models_of
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import StoreError
from vllm_poc.wire.answers import Gpu

routes = APIRouter()

_MIB = 2**20


@routes.get("/state")
async def state(service: Service) -> NodeState:
    """Tell what the ML node does. Without `poc_validation_inference` it gets no chat during a validation."""
    round_, found = await service.observe()
    models = models_of(found)
    return NodeState(
        **state_fields(round_, found),
        version=__version__,
        loaded_model=service.model_name(models) if models else None,
        poc_validation_inference=(await service.versions()).poc_validation_inference,
    )


@routes.get("/versions")
async def versions(service: Service) -> NodeVersions:
    """Tell what runs here; always answered, if need be without what pods would have told."""
    try:
        return await service.versions()
    except StoreError:
        return NodeVersions(version=__version__, vllm_version=None, poc_validation_inference=False, schemes=[])


@routes.post("/stop", response_model_exclude_none=True)
async def stop(service: Service) -> FanOut:
    """End the round. Inference goes on: the pods are the cluster's, and serve others too."""
    return stopped(*await service.stop())


@routes.post("/inference/up", responses=CHANGES)
async def up(body: UpRequest, service: Service) -> dict[str, str]:
    """Confirm that the model is served; how it is served is set by the cluster's chart."""
    models = await _checked(body, service)
    if not models:
        detail = f"model: no pod has told what it serves, so {body.model} may be on its way: try again"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NoBackends", detail, headers={"Retry-After": "10"})
    return {"status": "OK"}


@routes.post("/inference/up/async", status_code=202, responses=CHANGES)
async def up_async(body: UpRequest, service: Service) -> dict[str, str]:
    """Accept the model unless pods serve another one; `up/status` tells when a pod serves it."""
    await _checked(body, service)
    return {"status": "accepted"}


@routes.get("/inference/up/status")
async def up_status(service: Service) -> UpStatus:
    """Tell whether a pod serves, or pods are on their way."""
    if any(pod.status is not None for pod in await service.pods.poll()):
        return UpStatus(is_running=True, status="running")
    starting = await service.pods.starting()
    return UpStatus(is_running=False, status="starting" if starting else "not_started")


@routes.post("/inference/down", responses=documented(422))
async def down(service: Service) -> dict[str, str]:
    """Change nothing: pods go on serving, since the cluster's chart says how many there are."""
    return {"status": "OK", "detail": "the pods are the cluster's and go on: scale them by their chart"}


@routes.get("/gpu/devices")
async def gpu_devices(service: Service) -> GpuDevices:
    """Tell of the GPUs of all ready pods; none on CPUs."""
    found = [gpu for pod in await service.pods.gpus() for gpu in (pod.devices if pod is not None else ())]
    devices = [_device(place, gpu) for place, gpu in enumerate(found)]
    return GpuDevices(devices=devices, count=len(devices))


@routes.get("/gpu/driver", responses=documented(503))
async def gpu_driver(service: Service) -> GpuDriver:
    """Tell the versions of the driver, from the first pod that has one."""
    for pod in await service.pods.gpus():
        if pod is not None and pod.driver_version is not None:
            return GpuDriver.model_validate(pod, from_attributes=True)
    detail = "no ready pod tells of an NVIDIA driver: its server has no GPU, or no binding of NVML"
    raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NoDriver", detail)


@routes.get("/clock", status_code=204, response_class=Response)
async def clock() -> Response:
    """Tell when the request came and when the answer went, in nanoseconds since 1970, as two headers."""
    received = time.time_ns()
    headers = {"X-Server-Recv-Ns": str(received), "X-Server-Send-Ns": str(time.time_ns())}
    return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)


@routes.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The exposition"}},
)
async def metrics(service: Service) -> Response:
    """Tell the metrics of schema version 1: of vLLM by replica, of the GPUs, and of what is served."""
    return Response(await service.metrics.text(), media_type=node_metrics.MEDIA_TYPE)


@routes.post("/models/status", responses=documented(422))
async def model_status(body: ModelName, service: Service) -> ModelStatus:
    """Tell whether the weights are there."""
    return ModelStatus(model=body, status=await _weights_of(body.hf_repo, service))


@routes.post("/models/download", status_code=202, responses=documented(422))
async def download(body: ModelName, service: Service) -> ModelDownload:
    """Tell how far the pods are; a model that they do not serve is not fetched, and the answer is IGNORED."""
    state = await _weights_of(body.hf_repo, service)
    told = "IGNORED" if state == "NOT_FOUND" else state
    return ModelDownload(task_id=body.hf_repo, status=told, model=body)


@routes.delete("/models", response_model=None, responses=documented(404, 409, 422))
async def delete(body: ModelName, service: Service) -> NoReturn:
    """Refuse: the weights are the cluster's, and pods may be using them."""
    if await _weights_of(body.hf_repo, service) == "NOT_FOUND":
        detail = f"hf_repo: this ML node has no weights of {body.hf_repo}"
        raise Refusal(HTTPStatus.NOT_FOUND, "ModelNotFound", detail)
    detail = f"hf_repo: pods of this ML node serve {body.hf_repo}, and its weights are removed with them, by the chart"
    raise Refusal(HTTPStatus.CONFLICT, "ModelInUse", detail)


@routes.get("/models/list")
async def listed(service: Service) -> ModelList:
    """List the models that ready pods serve."""
    served = _hub_names(models_of(await service.pods.poll()))
    return ModelList(models=[ListedModel(model=ModelName(hf_repo=name), status="DOWNLOADED") for name in served])


@routes.get("/models/space", response_model=None, responses=documented(404))
async def space() -> NoReturn:
    """Refuse: each pod has a cache of its own, which the cluster's volumes bound."""
    detail = "the ML node's weights lie on volumes of the cluster: look at their size with `kubectl get pvc`"
    raise Refusal(HTTPStatus.NOT_FOUND, "NotSupported", detail)


def state_fields(round_: PoCRound | None, pods: Sequence[ReadyPod]) -> dict[str, Any]:
    """Return POW while a pod computes a round, INFERENCE while pods answer, else STOPPED, and what that is from."""
    answering = any(pod.status is not None for pod in pods)
    status = node_status(round_, pods).status
    serving = "INFERENCE" if answering else "STOPPED"
    state_ = "POW" if status in ("GENERATING", "MIXED") else serving
    return {"state": state_, "poc_status": status, "inference_healthy": answering}


async def _checked(body: UpRequest, service: NodeApi) -> Sequence[str]:
    """Return the models that the pods serve; refused with 409 if the one that is asked for is not among them."""
    models = models_of(await service.pods.poll())
    if models and body.model not in models:
        detail = f"model: this cluster serves {', '.join(models)}; another is set in its chart, not by request"
        raise Refusal(HTTPStatus.CONFLICT, "ModelMismatch", detail)
    return models


def _device(place: int, gpu: Gpu) -> GpuDevice:
    def mib(size: int | None) -> int | None:
        return size // _MIB if size is not None else None

    fields: dict[str, Any] = {
        "index": place,
        "name": gpu.name or "unknown",
        "total_memory_mb": mib(gpu.memory_total_bytes),
        "free_memory_mb": mib(gpu.memory_free_bytes),
        "used_memory_mb": mib(gpu.memory_used_bytes),
        "utilization_percent": _rounded(gpu.utilization_percent),
        "temperature_c": _rounded(gpu.temperature_celsius),
        "is_available": gpu.error is None,
        "error_message": gpu.error,
    }
    return GpuDevice.model_validate(fields)


def _rounded(value: float | None) -> int | None:
    return round(value) if value is not None else None


async def _weights_of(name: str, service: NodeApi) -> WeightsState:
    if name in models_of(await service.pods.poll()):
        return "DOWNLOADED"
    # What pods will serve that are not ready, only the template can tell.
    awaited = name == service.ml_node.template.model and await service.pods.starting()
    return "DOWNLOADING" if awaited else "NOT_FOUND"


def _hub_names(served: Sequence[str]) -> list[str]:
    return [name for name in served if not name.startswith("/")]
