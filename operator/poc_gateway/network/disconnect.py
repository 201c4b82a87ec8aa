# SPDX-License-Identifier: Apache-2.0
"""Work whose result nobody waits for any more is dropped."""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request

from poc_gateway.errors import Refusal

Result = TypeVar("Result")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what ``work`` returns; cancel it when the client closes its connection."""
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
