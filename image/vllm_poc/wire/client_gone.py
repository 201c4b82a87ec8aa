# SPDX-License-Identifier: Apache-2.0
"""Work that a client waits for is worth no more when the client is gone: both servers drop it then.

A request tells of a closed connection by its next ASGI message alone, which nobody else reads once its body is there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

Result = TypeVar("Result")
#: Returns the next ASGI message of a request, whose body has been read.
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):  # noqa: N818 - reads as a state
    """The client has closed its connection. Nobody reads an answer."""

    def __init__(self) -> None:
        super().__init__("the client closed its connection")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what ``work`` returns. ClientGone when the client closes its connection first; the work is cancelled."""
    working, gone = asyncio.ensure_future(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait([working, gone])
    raise ClientGone


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
