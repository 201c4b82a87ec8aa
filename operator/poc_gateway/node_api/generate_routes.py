# SPDX-License-Identifier: Apache-2.0
"""The area ``generate``: compute named nonces, or compare received artifacts with them, on whichever pods are free."""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from poc_gateway.errors import RETRY_AFTER, Refusal, documented
from poc_gateway.node_api.base_url import Service
from poc_gateway.node_api.messages import NetworkGenerate
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
    checked = service.check(body)
    if checked.wait:
        result = await _while_connected(request, _in_time(service.jobs.compute(checked), len(checked.nonces)))
        return _json(result.model_dump_json(exclude_none=True))
    return _json((await service.jobs.submit(checked)).model_dump_json(exclude_none=True))


@routes.get("/generate/{request_id}", response_model=_Work, responses=documented(404, 422))
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


async def _while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what ``work`` returns; cancel it when the client closes its connection: nobody waits."""
    working, gone = asyncio.ensure_future(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait([working, gone])
    # Nobody reads this; it ends the request.
    raise Refusal(HTTPStatus.REQUEST_TIMEOUT, "ClientGone", "the client closed its connection")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
