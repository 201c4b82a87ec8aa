# SPDX-License-Identifier: Apache-2.0
"""The network's routes: those of its node (``/api/v1/inference/pow``), of a single pod (``/api/v1/pow``), and beside.

A host changes nothing but an address: requests and answers are those of the reference, whose clients ignore our
further fields.
"""

from functools import cache
from http import HTTPStatus
from typing import NoReturn

from fastapi import APIRouter, Depends
from fastapi.security import HTTPBearer

from poc_gateway.errors import Refusal, documented
from poc_gateway.node_api import generate_routes, node, round_routes
from poc_gateway.node_api.base_url import node_of
from vllm_poc.wire.messages import API_PREFIX

NODE_PREFIX = "/api/v1/inference/pow"
#: Calls that a single pod has and a cluster has not.
_ABSENT = ("/init", "/init/validate", "/phase/generate", "/phase/validate", "/validate")


@cache
def router() -> APIRouter:
    """Return the routes of an ML node; `poc_gateway.node_api.base_url` says of which one."""
    routes, absent = APIRouter(), _absent()
    # The token is for the document alone: by now `poc_gateway.server.middleware` has asked for it.
    dependencies = [Depends(HTTPBearer(auto_error=False)), Depends(node_of)]
    areas = [
        (prefix, area)
        for prefix, rounds in ((NODE_PREFIX, round_routes.node), (API_PREFIX, round_routes.pod))
        for area in (rounds, generate_routes.routes, absent)
    ]
    for prefix, area in [*areas, ("/api/v1", node.routes)]:
        routes.include_router(area, prefix=prefix, dependencies=dependencies, responses=documented(401, 404, 503))
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
