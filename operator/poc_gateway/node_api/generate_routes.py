# SPDX-License-Identifier: Apache-2.0
"""The area ``generate``: compute named nonces, or compare received artifacts with them, on whichever pods are free.

And callbacks that are relayed.
"""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from poc_gateway.errors import RETRY_AFTER, Refusal, documented
from poc_gateway.node_api.base_url import Service
from poc_gateway.node_api.messages import NetworkGenerate, QueuedRequests
from vllm_poc.wire.callbacks import Callback
from vllm_poc.wire.client_gone import ClientGone, while_connected
from vllm_poc.wire.generate import GeneratedResponse, JobResponse, ValidatedResponse

Result = TypeVar("Result")
_Work = GeneratedResponse | ValidatedResponse | JobResponse

routes = APIRouter()

#: A request with ``wait`` is answered within this time: proxies, and the network's, wait for 60 s.
WAIT_SECONDS = 55.0


@routes.post("/generate", response_model=_Work, responses=documented(409, 422, 507))
async def generate(body: NetworkGenerate, request: Request, service: Service) -> Response:
    """Compute named nonces, or compare received artifacts with them, on whichever pods are free.

    With `wait` the answer is the result, or 503 after 55 s; the work is dropped if the client goes away. Without, it
    is queued, survives a restart of the gateway, and its result is also sent to `url` if there is one.
    What `stat_test` leaves out is the network's for the model, or what the settings say.
    """
    checked = await service.check(body)
    if checked.wait:
        work = _in_time(service.jobs.compute(checked), len(checked.nonces))
        try:
            result = await while_connected(request.receive, work)
        except ClientGone as error:
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, "ClientGone", str(error)) from None
        return _json(result.model_dump_json(exclude_none=True))
    return _json((await service.jobs.submit(checked)).model_dump_json(exclude_none=True))


@routes.post(
    "/callback-relay/{token}/{suffix}",
    response_class=Response,
    responses=documented(403, 404, 409, 422, 429, 502, 507),
)
async def relay(token: str, suffix: str, body: Callback, request: Request, service: Service) -> Response:
    """Send a callback of this ML node once more, and answer with its receiver's status.

    `token` is the first 32 hex digits of the SHA-256 of the callback address, which a round or a request of this ML
    node must name. `suffix` is `generated` or `validated`. 403 if the gateway does not have the content from pods of
    this ML node, 409 if it holds the content back or has given it up, 502 if the receiver cannot be reached, 429 while
    four others are relayed.
    """
    del body  # FastAPI has checked it; what is compared with the ledger is its text
    return Response(status_code=await service.relay(token, suffix, await request.body()))


@routes.get("/generate")
async def queued(service: Service) -> QueuedRequests:
    """List queued work that has not ended, the oldest first: a thousand requests at most, and how many there are."""
    return await service.jobs.unfinished()


@routes.delete("/generate/{request_id}", response_model=_Work, responses=documented(400, 404, 422))
async def give_up(request_id: str, service: Service) -> Response:
    """Give queued work up, and tell its state; what has ended keeps its result."""
    return _json(await service.jobs.give_up(request_id))


@routes.get("/generate/{request_id}", response_model=_Work, responses=documented(400, 404, 422))
async def generate_result(request_id: str, service: Service) -> Response:
    """Tell the state or the result of queued work."""
    return _json(await service.jobs.find(request_id))


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


async def _in_time(work: Coroutine[Any, Any, Result], nonces: int) -> Result:
    """Return what ``work`` returns; refused with 503 if that takes longer than a client would wait."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            return await work
    except TimeoutError:
        detail = (
            f"the pods did not compute {nonces} nonces within {WAIT_SECONDS:.0f} s: send the request without wait and "
            "fetch its result, or send fewer nonces at once"
        )
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NotInTime", detail, headers=RETRY_AFTER) from None
