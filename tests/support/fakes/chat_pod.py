# SPDX-License-Identifier: Apache-2.0
"""A server that streams chats as vLLM does, piece by piece, and remembers what it was asked."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

PIECE = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'


class Asked(NamedTuple):
    method: str
    raw_path: bytes
    query: bytes
    headers: Mapping[str, str]
    body: bytes


class ChatPod:
    """An ASGI app. It answers with ``pieces``, the second and later ones only after `release`.

    With ``breaks`` it ends the connection after the first piece.
    """

    def __init__(self, name: str, pieces: int = 3) -> None:
        self.name = name
        self.asked: list[Asked] = []
        self.gone = asyncio.Event()
        self.breaks = False
        self._pieces = pieces
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let all answers end."""
        self._released.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append(Asked(scope["method"], scope["raw_path"], scope["query_string"], headers, body))
        answering, listening = asyncio.create_task(self._answer(send)), asyncio.create_task(receive())
        await asyncio.wait([answering, listening], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.gone.set()
        answering.cancel()
        listening.cancel()
        await asyncio.gather(answering, listening, return_exceptions=True)

    async def _answer(self, send: Any) -> None:  # noqa: ANN401
        headers = {"content-type": "text/event-stream", "x-pod": self.name, "connection": "x-private", "x-private": "1"}
        start = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        for _ in range(self._pieces):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            if self.breaks:
                return
            await self._released.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
