# SPDX-License-Identifier: Apache-2.0
"""How many requests for chat there may be at once, so that other calls always find room.

A request for chat lasts for minutes, and has two connections: its client's, and one to a pod. So all of them may have
half of the file descriptors that connections may have. The network's node sends chat and its other calls from one
address; of one peer's connections a quarter is left to those.
"""

from collections import Counter
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from poc_gateway.node_api import chat

#: One of so many connections may be a chat's: with the one to a pod that is half of the descriptors.
_OF_ALL = 4
#: Of one peer's connections: so many quarters.
_QUARTERS_OF_PEER = 3


class ChatPlaces:
    """The requests for chat under way. ``most`` connections may be open in all, and ``of_peer`` of one peer."""

    def __init__(self, *, most: int, of_peer: int) -> None:
        self._most = max(1, most // _OF_ALL)
        self._of_peer = max(1, of_peer * _QUARTERS_OF_PEER // 4)
        self._by_peer = Counter[str]()
        self.count = 0

    def problem(self, peer: str) -> str | None:
        """Return why a peer's request has no place; None if it has one."""
        if self.count >= self._most:
            return f"{self.count} requests for chat are under way, as many as the gateway has file descriptors for"
        if self._by_peer[peer] >= self._of_peer:
            which = "three quarters of POC_GATEWAY_PEER_CONNECTIONS"
            return f"this address has {self._of_peer} requests for chat under way, which is {which}"
        return None

    async def serve(self, peer: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let ``app`` answer a peer's request for chat, and count it while that lasts; 503 if it has no place."""
        if (problem := self.problem(peer)) is not None:
            detail = f"{problem}: send this one again in a moment"
            await chat.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "TooManyChats", detail, scope, send)
            return
        self.count += 1
        self._by_peer[peer] += 1
        try:
            await app(scope, receive, send)
        finally:
            self.count -= 1
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
