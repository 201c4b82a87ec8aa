# SPDX-License-Identifier: Apache-2.0
"""The network's routes: those of its node (``/api/v1/inference/pow``), of a single pod (``/api/v1/pow``), and beside.

A host changes nothing but an address: requests and answers are those of the reference, whose clients ignore our
further fields.
"""

from http import HTTPStatus
from typing import NoReturn

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer

from poc_gateway.errors import RETRY_AFTER, Refusal, documented
from poc_gateway.node_api import generate, init_generate, node
from poc_gateway.node_api.service import NodeApi
from vllm_poc.wire.messages import API_PREFIX

NODE_PREFIX = "/api/v1/inference/pow"
#: Calls that a single pod has and a cluster has not.
_ABSENT = ("/init", "/init/validate", "/phase/generate", "/phase/validate", "/validate")


def router(service: NodeApi | None) -> APIRouter:
    """Return the routes; without a ``service``, for lack of a round template, all of them answer 503."""

    async def provide(request: Request) -> None:
        if service is None:
            detail = "the network's routes need a round template: set POC_GATEWAY_ROUND_TEMPLATE to its file"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NotConfigured", detail, headers=RETRY_AFTER)
        request.state.node_api = service

    routes = APIRouter(
        # The token is for the document alone: by now `poc_gateway.server.middleware` has asked for it.
        dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(provide)],
        responses=documented(401, 503),
    )
    absent = _absent()
    for prefix, rounds in ((NODE_PREFIX, init_generate.node), (API_PREFIX, init_generate.pod)):
        for area in (rounds, generate.routes, absent):
            routes.include_router(area, prefix=prefix)
    routes.include_router(node.routes, prefix="/api/v1")
    return routes


def _absent() -> APIRouter:
    routes = APIRouter()
    for path in _ABSENT:
        routes.add_api_route(
            path, _not_here, methods=["POST"], status_code=501, response_model=None, responses=documented(501)
        )
    return routes


async def _not_here() -> NoReturn:
    """Say which call does this in a cluster."""
    detail = (
        "a cluster has no phases and no single round to validate for: start distance rounds by POST init/generate "
        "with r_target, end them by POST stop, and let claimed artifacts be checked by POST generate with validation"
    )
    raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "NotSupported", detail)
