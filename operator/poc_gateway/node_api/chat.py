# SPDX-License-Identifier: Apache-2.0
"""Chat: everything below ``/v1`` of an ML node is passed on to one of its pods, and the answer back as it comes.

A request goes to the ready pod that has the fewest of this gateway's requests; ties are broken at random. A pod to
which no connection can be made is avoided for a while, and another one is tried, since nothing was sent. After that a
request is never repeated: the pod may have begun to compute it.

What authorises a client here is not shown to a pod: its Authorization header goes no further where the ML node has a
token. Pods that were started with ``--api-key`` get the ML node's ``chat_token`` instead.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from time import monotonic

import aiohttp
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from poc_gateway import metrics
from poc_gateway.errors import RETRY_AFTER, Refusal
from poc_gateway.node_api.cluster import ReadyPods
from poc_operator.clients.errors import StoreError
from poc_operator.observed import PodView

_log = logging.getLogger(__name__)

#: One of so many connections may be a chat's: with the one to a pod that is half of the descriptors.
_OF_ALL = 4
#: Of one peer's connections: so many quarters.
_QUARTERS_OF_PEER = 3
#: In a request's state: what to call when its body has been passed on, so that it no longer counts as under way.
BODY_SENT = "body_sent"
#: A pod that takes longer to accept a connection counts as gone.
CONNECT_SECONDS = 2.0
#: A pod may be silent for so long, as the network's own proxy allows it.
READ_SECONDS = 900.0
#: A pod to which no connection could be made is avoided for so long, and so many are tried for one request.
AVOID_SECONDS = 5.0
ATTEMPTS = 3
#: The pods are listed anew after so long, in the background; and before a request if the list is this old.
REFRESH_SECONDS, STALE_SECONDS = 2.0, 10.0
#: Less than vLLM's server keeps an idle connection, 5 s: else a request may meet its end.
_KEEP_ALIVE_SECONDS = 4.0
#: Headers that are about one connection only (RFC 9110, 7.6.1), and those that either side writes itself.
_PROXY = {"proxy-authenticate", "proxy-authorization", "proxy-connection"}
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"} | _PROXY)
_NOT_SENT = _HOP_BY_HOP | {"host", "expect"}
_NOT_ANSWERED = _HOP_BY_HOP | {"date", "server"}
_WRITTEN_BY_THE_CLIENT = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class ChatPods:
    """The pods that chat may go to: which are ready, how many requests each has, and which to avoid."""

    def __init__(self, ready_pods: ReadyPods) -> None:
        self._ready_pods = ready_pods
        self._pods: Sequence[PodView] = ()
        self._listed = float("-inf")
        self._listing: asyncio.Task[None] | None = None
        self._avoided: dict[str, float] = {}
        self.requests = Counter[str]()  # under way, by pod uid

    async def choose(self, tried: Sequence[PodView]) -> PodView | None:
        """Return the pod with the fewest requests, of those that were not tried; an avoided one if need be."""
        await self._look()
        left = [pod for pod in self._pods if pod.uid not in {one.uid for one in tried}]
        now = monotonic()
        well = [pod for pod in left if self._avoided.get(pod.uid, 0.0) <= now] or left
        least = min((self.requests[pod.uid] for pod in well), default=0)
        best = [pod for pod in well if self.requests[pod.uid] == least]
        return random.choice(best) if best else None  # noqa: S311 - no secret

    def avoid(self, pod: PodView) -> None:
        """Prefer others for a while."""
        self._avoided = {uid: until for uid, until in self._avoided.items() if until > monotonic()}
        self._avoided[pod.uid] = monotonic() + AVOID_SECONDS

    async def close(self) -> None:
        """Stop looking."""
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.gather(self._listing, return_exceptions=True)

    async def _look(self) -> None:
        age = monotonic() - self._listed
        if age > REFRESH_SECONDS and (self._listing is None or self._listing.done()):
            self._listing = asyncio.create_task(self._list())
        if age > STALE_SECONDS and self._listing is not None:
            # The task is all requests': it goes on if this one is cancelled.
            await asyncio.shield(self._listing)

    async def _list(self) -> None:
        try:
            self._pods = await self._ready_pods.ready()
        except StoreError as error:
            _log.warning("pods cannot be listed, chat goes to those that are known: %s", error)
        self._listed = monotonic()


class ChatProxy:
    """Passes requests on to an ML node's pods. ``guarded`` if the ML node's own token is in their Authorization."""

    def __init__(self, ready_pods: ReadyPods, *, guarded: bool, token: SecretStr | None) -> None:
        self._ready_pods = ready_pods
        self._pods = ChatPods(ready_pods)
        self._guarded = guarded
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections to pods."""
        await self._pods.close()
        if self._session is not None:
            await self._session.close()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; when its client goes away, the pod is told at once, by the end of the connection."""
        upload = _Upload(scope, receive)
        working = asyncio.create_task(self._answer(scope, upload, send))
        gone = asyncio.create_task(upload.disconnected())
        try:
            await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            gone.cancel()
            await asyncio.wait([working, gone])

    async def _answer(self, scope: Scope, upload: "_Upload", send: Send) -> None:
        tried: list[PodView] = []
        while len(tried) < ATTEMPTS and (pod := await self._pods.choose(tried)) is not None:
            tried.append(pod)
            if await self._try(pod, scope, upload, send):
                return
        problem = f"to none of {len(tried)} pods a connection could be made" if tried else "no pod is ready"
        await refuse(HTTPStatus.SERVICE_UNAVAILABLE, "NoBackends", f"{problem}: try again later", scope, send)

    async def _try(self, pod: PodView, scope: Scope, upload: "_Upload", send: Send) -> bool:
        """Let this pod answer; return False if no connection to it could be made."""
        self._pods.requests[pod.uid] += 1
        answer = _Answer(send)
        try:
            async with self._request(pod, scope, upload) as response:
                await answer.stream(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            _log.warning("no connection to pod %s for chat: %s", pod.name, error)
            self._pods.avoid(pod)
            return False
        except (aiohttp.ClientError, TimeoutError) as error:
            await self._failed(pod, error, scope, upload, answer)
        finally:
            self._pods.requests[pod.uid] -= 1
            self._pods.requests += Counter()  # drops those that have none
        return True

    async def _failed(self, pod: PodView, error: Exception, scope: Scope, upload: "_Upload", answer: "_Answer") -> None:
        if upload.refusal is not None:
            await upload.refusal.response()(scope, upload.receive, answer.send)
            return
        _log.warning("pod %s broke off a request for chat: %s", pod.name, error or type(error).__name__)
        # After the first byte only the end of the connection can say so: the server ends it for an unfinished answer.
        if not answer.begun:
            detail = f"the pod that had the request did not answer it: {error or type(error).__name__}; send it again"
            await refuse(HTTPStatus.BAD_GATEWAY, "PodFailed", detail, scope, answer.send)

    def _request(
        self, pod: PodView, scope: Scope, upload: "_Upload"
    ) -> "aiohttp.client._RequestContextManager":  # aiohttp's only name for it
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, trust_env=False
            )
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url = URL(self._ready_pods.address(pod) + scope["raw_path"].decode("latin-1") + query, encoded=True)
        return self._session.request(
            scope["method"],
            url,
            headers=self._headers(scope, has_body=upload.has_body),
            data=upload.chunks() if upload.has_body else None,
            skip_auto_headers=_WRITTEN_BY_THE_CLIENT,
            allow_redirects=False,
        )

    def _headers(self, scope: Scope, *, has_body: bool) -> list[tuple[str, str]]:
        sent = _kept(scope["headers"], _NOT_SENT)
        if self._guarded or self._token is not None:
            sent = [(name, value) for name, value in sent if name != "authorization"]
        if self._token is not None:
            sent.append(("authorization", f"Bearer {self._token.get_secret_value()}"))
        if has_body and not any(name == "content-type" for name, _ in sent):
            sent.append(("content-type", "application/json"))  # the network's client leaves it out
        return sent


class _Upload:
    """The body of a request, passed on as it comes; then the wait for its client to go away."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        self.has_body = "transfer-encoding" in headers or headers.get("content-length", "0").strip() != "0"
        self.receive = receive
        #: Why the gateway takes no more of the body.
        self.refusal: Refusal | None = None
        self._sent: Callable[[], None] = scope["state"].get(BODY_SENT, lambda: None)
        self._over = asyncio.Event()
        if not self.has_body:
            self._over.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body. It is received once, when a connection has been made."""
        more = True
        try:
            while more:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionResetError("the client went away before its request was complete")
                more = message.get("more_body", False)
                if message.get("body"):
                    yield message["body"]
        except Refusal as refusal:
            self.refusal = refusal
            raise
        finally:
            self._sent()
            self._over.set()

    async def disconnected(self) -> None:
        """Return when the client has closed its connection, after its request was complete."""
        await self._over.wait()
        with suppress(Refusal):
            while (await self.receive())["type"] != "http.disconnect":
                pass


class _Answer:
    """Passes an answer on, each piece when it comes."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.begun = False

    async def stream(self, response: aiohttp.ClientResponse) -> None:
        headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in _kept(response.raw_headers, _NOT_ANSWERED)
        ]
        self.begun = True
        await self.send({"type": "http.response.start", "status": response.status, "headers": headers})
        async for piece in response.content.iter_any():
            await self.send({"type": "http.response.body", "body": piece, "more_body": True})
        await self.send({"type": "http.response.body", "body": b""})


def _kept(headers: Sequence[tuple[bytes, bytes]], left_out: frozenset[str]) -> list[tuple[str, str]]:
    """Return headers by their lower-case names, without those and without what Connection names."""
    told = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    named = {word.strip().lower() for name, value in told if name == "connection" for word in value.split(",")}
    return [(name, value) for name, value in told if name not in left_out and name not in named]


async def refuse(status: HTTPStatus, reason: str, detail: str, scope: Scope, send: Send) -> None:
    """Answer in the words of our errors, and in those of vLLM's, which chat's clients read."""
    refusal = Refusal(status, reason, detail)
    metrics.HTTP_REFUSALS.labels(reason).inc()
    error = {"message": detail, "type": reason, "code": status.value}
    body = refusal.body.model_dump(mode="json", exclude_none=True) | {"error": error}
    # It asks again after a while, and has no need of a connection until then.
    headers = {**RETRY_AFTER, "Connection": "close"} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
    await JSONResponse(body, status, headers)(scope, _nothing, send)


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}


class ChatPlaces:
    """The requests for chat under way, which leave room for other calls.

    ``most`` connections may be open in all, and ``of_peer`` of one peer. A request for chat lasts for minutes, and has
    two: its client's, and one to a pod. The network's node sends chat and its other calls from one address.
    """

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
            await refuse(HTTPStatus.SERVICE_UNAVAILABLE, "TooManyChats", detail, scope, send)
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
