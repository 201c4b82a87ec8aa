# SPDX-License-Identifier: Apache-2.0
"""The area of the weights: whether they are there. Fetching and deleting them is the cluster's business.

A model counts as downloaded when a ready pod serves it, and as being downloaded while pods that will serve it are not
ready. The commit is not compared, since a server does not tell which one it has loaded.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import NoReturn

from fastapi import APIRouter

from poc_gateway.errors import Refusal, documented
from poc_gateway.node_api.base_url import Service
from poc_gateway.node_api.messages import ListedModel, ModelDownload, ModelList, ModelName, ModelStatus, WeightsState
from poc_gateway.node_api.service import NodeApi, models_of

routes = APIRouter(prefix="/models")


@routes.post("/status", responses=documented(422))
async def model_status(body: ModelName, service: Service) -> ModelStatus:
    """Tell whether the weights are there."""
    return ModelStatus(model=body, status=await _state(body.hf_repo, service))


@routes.post("/download", status_code=202, responses=documented(422))
async def download(body: ModelName, service: Service) -> ModelDownload:
    """Tell how far the pods are; a model that they do not serve is not fetched, and the answer is IGNORED."""
    state = await _state(body.hf_repo, service)
    told = "IGNORED" if state == "NOT_FOUND" else state
    return ModelDownload(task_id=body.hf_repo, status=told, model=body)


@routes.delete("", response_model=None, responses=documented(404, 409, 422))
async def delete(body: ModelName, service: Service) -> NoReturn:
    """Refuse: the weights are the cluster's, and pods may be using them."""
    if await _state(body.hf_repo, service) == "NOT_FOUND":
        detail = f"hf_repo: this ML node has no weights of {body.hf_repo}"
        raise Refusal(HTTPStatus.NOT_FOUND, "ModelNotFound", detail)
    detail = f"hf_repo: pods of this ML node serve {body.hf_repo}, and its weights are removed with them, by the chart"
    raise Refusal(HTTPStatus.CONFLICT, "ModelInUse", detail)


@routes.get("/list")
async def listed(service: Service) -> ModelList:
    """List the models that ready pods serve."""
    served = _hub_names(models_of(await service.pods.poll()))
    return ModelList(models=[ListedModel(model=ModelName(hf_repo=name), status="DOWNLOADED") for name in served])


@routes.get("/space", response_model=None, responses=documented(404))
async def space() -> NoReturn:
    """Refuse: each pod has a cache of its own, which the cluster's volumes bound."""
    detail = "the ML node's weights lie on volumes of the cluster: look at their size with `kubectl get pvc`"
    raise Refusal(HTTPStatus.NOT_FOUND, "NotSupported", detail)


async def _state(name: str, service: NodeApi) -> WeightsState:
    if name in models_of(await service.pods.poll()):
        return "DOWNLOADED"
    # What pods will serve that are not ready, only the template can tell.
    awaited = name == service.ml_node.template.model and await service.pods.starting()
    return "DOWNLOADING" if awaited else "NOT_FOUND"


def _hub_names(served: Sequence[str]) -> list[str]:
    return [name for name in served if not name.startswith("/")]
