# SPDX-License-Identifier: Apache-2.0
"""The area of the node itself: its state, whether it serves a model, and stop."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter

from poc_gateway.errors import Refusal
from poc_gateway.node_api.base_url import Service
from poc_gateway.node_api.cluster import ReadyPod
from poc_gateway.node_api.init_generate import CHANGES, node_status, stopped
from poc_gateway.node_api.messages import FanOut, NodeState, UpRequest
from poc_gateway.node_api.service import models_of
from poc_operator.apis.v1alpha1 import meta
from poc_operator.apis.v1alpha1.round import PoCRound

routes = APIRouter()


@routes.get("/state")
async def state(service: Service) -> NodeState:
    """Tell what the node does."""
    found = await service.pods.poll()
    models = models_of(found)
    return NodeState(
        **_state_fields(await service.rounds.active(), found),
        version=meta.VERSION,
        loaded_model=service.model_name(models) if models else None,
    )


@routes.post("/stop", response_model_exclude_none=True)
async def stop(service: Service) -> FanOut:
    """End the round. Inference goes on: the pods are the cluster's, and serve others too."""
    return stopped(*await service.stop())


@routes.post("/inference/up", responses=CHANGES)
async def up(body: UpRequest, service: Service) -> dict[str, str]:
    """Confirm that the model is served; how it is served is set by the cluster's chart."""
    models = models_of(await service.pods.poll())
    if not models:
        detail = f"model: no pod has told what it serves, so {body.model} may be on its way: try again"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NoBackends", detail, headers={"Retry-After": "10"})
    if body.model not in models:
        detail = f"model: this cluster serves {', '.join(models)}; another is set in its chart, not by request"
        raise Refusal(HTTPStatus.CONFLICT, "ModelMismatch", detail)
    return {"status": "OK"}


def _state_fields(round_: PoCRound | None, pods: Sequence[ReadyPod]) -> dict[str, Any]:
    """Return POW while a pod computes a round, INFERENCE while pods answer, else STOPPED, and what that is from."""
    answering = any(pod.status is not None for pod in pods)
    status = node_status(round_, [pod.pod for pod in pods]).status
    serving = "INFERENCE" if answering else "STOPPED"
    state_ = "POW" if status in ("GENERATING", "MIXED") else serving
    return {"state": state_, "poc_status": status, "inference_healthy": answering}
