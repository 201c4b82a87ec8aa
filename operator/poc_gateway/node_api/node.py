# SPDX-License-Identifier: Apache-2.0
"""The area of the ML node itself: its state, what runs on it, whether it serves a model, and stop.

The pods are the cluster's: what they serve is set by a chart, and no call of the network starts or stops them.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter

from poc_gateway import __version__
from poc_gateway.errors import Refusal, documented
from poc_gateway.node_api.base_url import Service
from poc_gateway.node_api.cluster import ReadyPod
from poc_gateway.node_api.messages import FanOut, NodeState, NodeVersions, UpRequest, UpStatus
from poc_gateway.node_api.round_routes import CHANGES, node_status, stopped
from poc_gateway.node_api.service import NodeApi, models_of
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import StoreError

routes = APIRouter()


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
        return NodeVersions(version=__version__, vllm_version=None, poc_validation_inference=False)


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
