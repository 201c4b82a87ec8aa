# SPDX-License-Identifier: Apache-2.0
"""The network's routes: those of its node (``/api/v1/inference/pow``), of a single pod (``/api/v1/pow``), and beside.

A host changes nothing but an address: requests and answers are those of the reference, whose clients ignore our
further fields.
"""

from http import HTTPStatus
from typing import Annotated, NoReturn

from fastapi import APIRouter, Depends, Request, Response
from fastapi.security import HTTPBearer

from poc_gateway.errors import Refusal, documented
from poc_gateway.network import views
from poc_gateway.network.access import RETRY_AFTER
from poc_gateway.network.disconnect import while_connected
from poc_gateway.network.messages import (
    FanOut,
    NetworkGenerate,
    NetworkInit,
    NodeState,
    NodeStatus,
    PodCommand,
    PodStatus,
    UpRequest,
)
from poc_gateway.network.service import Network, fan_out, pod_command, stopped
from vllm_poc.wire.generate import GeneratedResponse, JobResponse, ValidatedResponse
from vllm_poc.wire.messages import API_PREFIX, PowState

NODE_PREFIX = "/api/v1/inference/pow"


async def _given(request: Request) -> Network:
    network: Network = request.state.network
    return network


Service = Annotated[Network, Depends(_given)]

#: What keeps a body from being taken on.
_CHANGES = documented(409, 422)
_Work = GeneratedResponse | ValidatedResponse | JobResponse

_node, _pod, _common, _beside = APIRouter(), APIRouter(), APIRouter(), APIRouter()


@_node.post("/init/generate", responses=_CHANGES, response_model_exclude_none=True)
async def node_init_generate(body: NetworkInit, network: Service) -> FanOut:
    """Let the cluster generate; a repeat with the same content changes nothing."""
    round_, pods = await network.init_generate(body)
    groups = round_.status.groups or round_.spec.nodes.groups or len(pods)
    return fan_out(pods, backends=len(pods), n_groups=groups, detail=views.note(round_, pods))


@_node.post("/stop", response_model_exclude_none=True)
async def node_stop(network: Service) -> FanOut:
    """End the round and wait until its results are flushed. Queued work goes on."""
    return stopped(*await network.stop())


@_node.get("/status", response_model_exclude_none=True)
async def node_status(network: Service) -> NodeStatus:
    """Tell what the pods do."""
    return views.node_status(*await network.look())


@_pod.post("/init/generate", responses=_CHANGES, response_model_exclude_none=True)
async def pod_init_generate(body: NetworkInit, network: Service) -> PodCommand:
    """Let the cluster generate; a repeat with the same content changes nothing."""
    return pod_command(PowState.GENERATING, views.note(*await network.init_generate(body)))


@_pod.post("/stop", response_model_exclude_none=True)
async def pod_stop(network: Service) -> PodCommand:
    """End the round and wait until its results are flushed. Queued work goes on."""
    left, _ = await network.stop()
    return pod_command(PowState.STOPPED, left)


@_pod.get("/status")
async def pod_status(network: Service) -> PodStatus:
    """Tell what the cluster does, as if it was one pod."""
    return views.pod_status(*await network.look())


@_common.post("/generate", response_model=_Work, responses=documented(409, 422, 507))
async def generate(body: NetworkGenerate, request: Request, network: Service) -> Response:
    """Compute named nonces, or compare received artifacts with them, on whichever pods are free.

    With `wait` the answer is the result, and the work is dropped if the client goes away. Without, the work is
    queued, survives a restart of the gateway, and its result is also sent to `url` if there is one.
    The p-value's threshold is `stat_test.fraud_threshold`, or else `stat_test.p_value_threshold`.
    """
    checked = network.check(body)
    if checked.wait:
        result = await while_connected(request, network.jobs.compute(checked))
        return _json(result.model_dump_json(exclude_none=True))
    return _json((await network.jobs.submit(checked)).model_dump_json(exclude_none=True))


@_common.get("/generate/{request_id}", response_model=_Work, responses=documented(404, 422))
async def generate_result(request_id: str, network: Service) -> Response:
    """Tell the state or the result of queued work."""
    return _json(await network.jobs.find(request_id))


@_beside.get("/state")
async def state(network: Service) -> NodeState:
    """Tell what the node does."""
    return await network.state()


@_beside.post("/stop", response_model_exclude_none=True)
async def beside_stop(network: Service) -> FanOut:
    """End the round. Inference goes on: the pods are the cluster's, and serve others too."""
    return stopped(*await network.stop())


@_beside.post("/inference/up", responses=_CHANGES)
async def up(body: UpRequest, network: Service) -> dict[str, str]:
    """Confirm that the model is served; how it is served is set by the cluster's chart."""
    await network.up(body)
    return {"status": "OK"}


async def _not_here() -> NoReturn:
    """Say which call does this in a cluster."""
    detail = (
        "a cluster has no phases and no single round to validate for: start distance rounds by POST init/generate "
        "with r_target, end them by POST stop, and let claimed artifacts be checked by POST generate with validation"
    )
    raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "NotSupported", detail)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


for path in ("/init", "/init/validate", "/phase/generate", "/phase/validate", "/validate"):
    _common.add_api_route(
        path, _not_here, methods=["POST"], status_code=501, response_model=None, responses=documented(501)
    )


def router(network: Network | None) -> APIRouter:
    """Return the routes; without a ``network``, for lack of a round template, all of them answer 503."""

    async def provide(request: Request) -> None:
        if network is None:
            detail = "the network's routes need a round template: set POC_GATEWAY_ROUND_TEMPLATE to its file"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NotConfigured", detail, headers=RETRY_AFTER)
        request.state.network = network

    routes = APIRouter(
        # The token is for the document alone: by now `poc_gateway.access` has asked for it.
        dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(provide)],
        responses=documented(401, 503),
    )
    parts = ((_node, NODE_PREFIX), (_common, NODE_PREFIX), (_pod, API_PREFIX), (_common, API_PREFIX))
    for part, prefix in (*parts, (_beside, "/api/v1")):
        routes.include_router(part, prefix=prefix)
    return routes
