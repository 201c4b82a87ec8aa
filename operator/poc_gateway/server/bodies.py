# SPDX-License-Identifier: Apache-2.0
"""Bounds of the bodies under way: how much memory all of them may take, and how long one may take to arrive."""

import asyncio
from http import HTTPStatus

from starlette.types import Message, Receive

from poc_gateway.errors import Refusal


class Body:
    """One request's body that is under way."""

    def __init__(self, bodies: "Bodies") -> None:
        loop = asyncio.get_running_loop()
        self.begun = loop.time()
        self.taken = 0
        self.whole = False
        self.evicted = False
        self._bodies = bodies
        self._timeout: asyncio.Timeout | None = None

    async def next(self, receive: Receive) -> Message:
        """Return the next message; a Refusal if it does not come in time, or others need the room."""
        if self.whole:
            return await receive()
        try:
            async with asyncio.timeout_at(self.begun + self._bodies.seconds) as self._timeout:
                message = await receive()
        except TimeoutError:
            raise (self._bodies.busy() if self.evicted else self._bodies.slow()) from None
        finally:
            self._timeout = None
        if self.evicted:
            raise self._bodies.busy()
        self.whole = not message.get("more_body", False)
        self._bodies.add(self, len(message.get("body", b"")))
        return message

    def evict(self) -> None:
        """End the body, since others need the room."""
        self.evicted = True
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """The bodies of all requests under way, which may have ``most`` bytes together, and each so many seconds.

    When there is no room for more, the body makes room that has been under way for longest and is not whole: one that
    stalls must not stop those that arrive.
    """

    #: A body that is younger is not slow.
    PATIENCE_SECONDS = 1.0

    def __init__(self, most: int, seconds: float) -> None:
        self.seconds = seconds
        self._most = most
        self._bytes = 0
        self._under_way = dict[Body, None]()

    def begin(self) -> Body:
        """Return a new one, of which nothing has arrived."""
        body = Body(self)
        self._under_way[body] = None
        return body

    def add(self, body: Body, size: int) -> None:
        """Count what has arrived of a body; a Refusal if there is no room for it."""
        body.taken += size
        if body not in self._under_way:  # it was passed on, and takes no room here
            return
        self._bytes += size
        while size and self._bytes > self._most:
            slow = self._slowest(body)
            if slow is None:
                raise self.busy()
            self.end(slow)
            slow.evict()

    def end(self, body: Body) -> None:
        """Give a body's room back."""
        if body in self._under_way:
            del self._under_way[body]
            self._bytes -= body.taken

    def _slowest(self, asking: Body) -> Body | None:
        now = asyncio.get_running_loop().time()
        for body in self._under_way:
            if now - body.begun < self.PATIENCE_SECONDS:
                return None
            if body is not asking and body.taken and not body.whole:
                return body
        return None

    def busy(self) -> Refusal:
        """Return the answer to one that finds no room."""
        detail = f"the bodies of all requests under way exceed {self._most} bytes: send this one again in a moment"
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "Busy", detail, headers={"Retry-After": "1"})

    def slow(self) -> Refusal:
        """Return the answer to one that has not come in time."""
        detail = (
            f"the body did not arrive within {self.seconds:g} s: send less at once or raise POC_GATEWAY_BODY_SECONDS"
        )
        return Refusal(HTTPStatus.REQUEST_TIMEOUT, "RequestTimeout", detail, headers={"Connection": "close"})
