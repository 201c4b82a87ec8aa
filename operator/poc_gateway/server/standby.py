# SPDX-License-Identifier: Apache-2.0
"""Owning the database, or standing by until its owner is gone.

With SQLite a gateway that stands by serves nothing. With PostgreSQL it serves requests like all others, and stands by
only for what `poc_gateway.server.owner` does.

::

    standing by ── the fence is free ──> owner ── the fence is lost ──> sends nothing
         ^                                 ^                              │
         │                                 └── taken again, and nobody ───┤
         │                                     has owned it since         │
         └────────── the process ends, and is started again <─────────────┘ somebody has
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from poc_gateway.errors import Refusal
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseAway, DatabaseError
from poc_gateway.store.fence import LOOK_SECONDS, Fence

_log = logging.getLogger(__name__)

#: What owns the database is ended within this time when the fence is lost: posts in flight have ten seconds of it.
_END_SECONDS = 15.0
#: Why a gateway that needs a database for itself does nothing.
STANDS_BY = "another gateway owns the database: this one stands by until that has ended"


class Gate:
    """An ASGI app that answers 503, with the reason, until the one behind it is ready; 200 to ``/livez``."""

    def __init__(self) -> None:
        self.reason = "the gateway is starting"
        self._app: ASGIApp | None = None

    def tell(self, reason: str) -> None:
        """Answer with this reason from now on."""
        self.reason = reason

    def open(self, app: ASGIApp) -> None:
        """Pass all requests to ``app`` from now on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/livez":
            await JSONResponse({"status": "OK"})(scope, receive, send)
        elif scope["type"] == "http":
            headers = {"Retry-After": "1", "Connection": "close"}
            refusal = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "StandBy", self.reason, headers=headers)
            await refusal.response()(scope, receive, send)


async def taken(fence: Fence, tell: Callable[[str], None], *, reason: str = STANDS_BY) -> None:
    """Wait until the fence is ours; ``tell`` is called with why it is not: ``reason`` if another has it.

    DatabaseError if it can never be ours.
    """
    told = ""
    while True:
        try:
            if await asyncio.to_thread(fence.take):
                return
            why = reason
        except DatabaseAway as error:
            why = str(error)
        if why != told:
            _log.warning("%s", why)
        told = why
        tell(why)
        await asyncio.sleep(LOOK_SECONDS)


async def while_owner(fence: Fence, database: Database, *works: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the works for as long as the fence is ours, and again when it is taken back; FenceLost if another had it."""
    while True:
        await until_lost(fence, database, *works)
        await taken(fence, lambda _: None)
        await _taken_over(database)


async def until_lost(fence: Fence, database: Database, *works: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the works until the fence is lost; raises what one of them raises."""
    tasks = [asyncio.create_task(work()) for work in works]
    lost = asyncio.create_task(_lost(fence, database))
    try:
        await asyncio.wait([*tasks, lost], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _ended(*tasks, lost)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    _log.error("the database's fence is lost: nothing is forwarded until it is taken again")


async def _lost(fence: Fence, database: Database) -> None:
    # Nobody tells: to know it is to ask. After a restore the lock is ours, and the database another's.
    while not database.fence_is_lost and await asyncio.to_thread(fence.holds):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_SECONDS)


async def opened(open_database: Callable[[], Database]) -> Database:
    """Open a database in a thread. If this is cancelled, wait for the thread, which writes until then, and close it."""
    opening = asyncio.ensure_future(asyncio.to_thread(open_database))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(Exception):
            await asyncio.to_thread((await opening).close)
        raise


async def reached(open_database: Callable[[], Database], tell: Callable[[str], None]) -> Database:
    """Open a database as `opened` does, when it answers; ``tell`` is called with why it does not."""
    while True:
        try:
            return await opened(open_database)
        except DatabaseAway as error:
            _log.warning("%s", error)
            tell(str(error))
        await asyncio.sleep(LOOK_SECONDS)


async def _taken_over(database: Database) -> None:
    while True:
        try:
            return await database.take_over()
        except FenceLost:
            raise
        except DatabaseError as error:
            _log.warning("the database cannot be owned again yet: %s", error)
            await asyncio.sleep(LOOK_SECONDS)


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait(tasks, timeout=_END_SECONDS)


async def first_of(serving: Awaitable[None], living: Awaitable[None], stop: Callable[[], None]) -> None:
    """Run both. When the server ends, the other is ended; when the other fails, the server is stopped first."""
    server, life = asyncio.ensure_future(serving), asyncio.ensure_future(living)
    try:
        await asyncio.wait([server, life], return_when=asyncio.FIRST_COMPLETED)
        stop()
        await server
    finally:
        life.cancel()
        await asyncio.wait([life])
    if not life.cancelled():
        life.result()
