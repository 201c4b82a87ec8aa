# SPDX-License-Identifier: Apache-2.0
"""The area of the machine: GPUs, clock and metrics of an ML node, whose machine is all its pods together.

GPUs are numbered through all pods, in the order of the pods' names.
"""

import time
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Response

from poc_gateway.errors import Refusal, documented
from poc_gateway.node_api import node_metrics
from poc_gateway.node_api.base_url import Service
from poc_gateway.node_api.messages import GpuDevice, GpuDevices, GpuDriver
from vllm_poc.wire.gpus import Gpu

routes = APIRouter()

_MIB = 2**20


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
