# SPDX-License-Identifier: Apache-2.0
"""What a request must pass before a route sees it: bounds, then who it is from, then what its body is.

These are ASGI middlewares, since a framework reads and parses a body before it runs a route's dependencies, and that is
the expensive part, which must not be had for nothing.
"""

import base64
import hmac
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poc_gateway.errors import Refusal
from poc_gateway.ingest.deliveries import GRANT
from poc_gateway.metrics import record_of
from poc_gateway.node_api.base_url import resolved
from poc_gateway.node_api.chat import BODY_SENT
from poc_gateway.query.web.routes import OPEN_PAGES
from poc_gateway.server.connections import Bodies
from poc_gateway.settings import Settings
from poc_operator.credentials import GATEWAY_TOKEN_HEADER, CredentialError, Verifier
from vllm_poc.wire.callbacks import GATEWAY_REALM, GATEWAY_USER
from vllm_poc.wire.messages import is_json

#: A peer may use so many seconds' worth of requests at once.
BURST_SECONDS = 4.0
#: Peers that are remembered; the one that was silent longest is forgotten first.
MOST_PEERS = 10_000
#: The bodies of all requests under way may have the size of so many largest ones.
LARGEST_AT_ONCE = 4

#: Whether a request may pass; a Refusal if it may not.
Authorize = Callable[[Scope], Refusal | None]

#: What anybody may ask, the kubelet among them.
OPEN_PATHS = frozenset({"/readyz", "/livez", "/health", "/openapi.json"})
#: What the network's client asks without its token: the names of the models, which the chain tells everybody.
MODELS_PATH = "/v1/models"
_CALLBACKS = "/callbacks/"
_OPERATORS = re.compile(r"(?:GET /rounds/[^/]+/[^/]+/(?:progress|sample|rivals)|POST /rounds/[^/]+/[^/]+/rivals)")
#: Where the uid stands in /callbacks/{namespace}/{name}/{uid}/….
_UID = 4
_JSON = "application/json"


class BodyLimit(NamedTuple):
    """The size of the largest body, and the setting that says so."""

    setting: str
    bytes: int


class Peers:
    """A token bucket per address, kept as the moment at which the bucket is full again."""

    def __init__(self, per_second: float) -> None:
        self._seconds_each = 1 / per_second
        self._full_at = OrderedDict[str, float]()

    def wait_seconds(self, address: str, now: float) -> float:
        """Take one request; return 0 if it may pass, else after how many seconds the next may."""
        full_at = max(self._full_at.get(address, now), now) + self._seconds_each
        excess = full_at - now - max(BURST_SECONDS, self._seconds_each)
        if excess > 0:
            return excess
        self._full_at[address] = full_at
        self._full_at.move_to_end(address)
        if len(self._full_at) > MOST_PEERS:
            self._full_at.popitem(last=False)
        return 0.0


class Limits:
    """Answers 413 to bodies above the limit ``body`` and 429 to peers that ask more often than ``peer_requests``.

    And 408 to bodies that take longer than ``body_seconds``, 503 while the bodies of all requests under way exceed
    `LARGEST_AT_ONCE` of the largest, and 400 to addresses with a NUL, a character that PostgreSQL fails to look for.
    Requests whose paths are ``apart`` have limits of their own, so that they take no room from the others.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        body: BodyLimit,
        body_seconds: float,
        peer_requests: float,
        apart: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._app = app
        self._body = body
        self._bodies, self._bodies_apart = (Bodies(LARGEST_AT_ONCE * body.bytes, body_seconds) for _ in range(2))
        self._peers, self._peers_apart = (Peers(peer_requests) for _ in range(2))
        self._apart = apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_apart = self._apart(scope["path"])
        refusal = self._refusal(scope, self._peers_apart if is_apart else self._peers)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._bounded(self._bodies_apart if is_apart else self._bodies, scope, receive, send)

    def _refusal(self, scope: Scope, peers: Peers) -> Refusal | None:
        address = scope["client"][0] if scope["client"] else ""
        wait = peers.wait_seconds(address, time.monotonic())
        if wait > 0:
            detail = "this address sends too many requests: send fewer, larger ones or raise POC_GATEWAY_PEER_REQUESTS"
            headers = {"Retry-After": str(math.ceil(wait))}
            return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "TooManyRequests", detail, headers=headers)
        if b"%00" in scope["query_string"] or "\0" in scope["path"]:
            detail = "the address has a NUL (%00), which no name has: leave it out"
            return Refusal(HTTPStatus.BAD_REQUEST, "InvalidRequest", detail)
        length = Headers(scope=scope).get("content-length", "")
        return self._too_large() if length.isdecimal() and int(length) > self._body.bytes else None

    async def _bounded(self, bodies: Bodies, scope: Scope, receive: Receive, send: Send) -> None:
        # A chunked body tells its length only while it arrives, and others may never arrive in full.
        body = bodies.begin()

        async def bounded() -> Message:
            message = await body.next(receive)
            if body.taken > self._body.bytes:
                raise self._too_large()
            return message

        state = {**scope.get("state", {}), BODY_SENT: partial(bodies.end, body)}
        try:
            await self._app({**scope, "state": state}, bounded, send)
        finally:
            record_of(state).received = body.taken
            bodies.end(body)

    def _too_large(self) -> Refusal:
        detail = f"the body exceeds {self._body.bytes} bytes: send less at once or raise {self._body.setting}"
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BodyTooLarge", detail)


class Access:
    """ASGI middleware that answers what ``authorize`` refuses, on every path but the open ones."""

    def __init__(self, app: ASGIApp, *, authorize: Authorize) -> None:
        self._app = app
        self._authorize = authorize

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        asks = scope["type"] == "http" and scope["path"] not in OPEN_PATHS
        refusal = self._authorize(scope) if asks else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)


def inside_access(settings: Settings) -> Authorize:
    """Return who may use the inside's port; all without the secrets.

    Pods deliver with their credential, the operator asks with its token, and everything else is for people's.
    """
    verifier = Verifier([key.get_secret_value() for key in settings.callback_key])
    people, operator = settings.token, settings.operator_token

    def authorize(scope: Scope) -> Refusal | None:
        if not people or _is_page(scope):
            return None
        if scope["path"].startswith(_CALLBACKS):
            return _admit_pod(scope, verifier)
        if _has_bearer(scope, people) or (_is_asked_by_operator(scope) and _has_bearer(scope, operator)):
            return None
        if _is_one_of(Headers(scope=scope).get(GATEWAY_TOKEN_HEADER, ""), people):
            return None
        return _unauthorized("send the gateway's token as 'Authorization: Bearer <token>'", "Bearer")

    return authorize


def _is_page(scope: Scope) -> bool:
    # A browser needs the page before it can ask its user for the token.
    return scope["method"] == "GET" and scope["path"] in OPEN_PAGES


def _is_asked_by_operator(scope: Scope) -> bool:
    return _OPERATORS.fullmatch(f"{scope['method']} {scope['path']}") is not None


def _admit_pod(scope: Scope, verifier: Verifier) -> Refusal | None:
    try:
        grant = verifier.verify(_password(scope), time.time())
    except CredentialError as error:
        detail = f"the credential is not accepted: {error}; deliver to the address that the operator gave"
        return _unauthorized(detail, f'Basic realm="{GATEWAY_REALM}"')
    uid = (scope["path"].split("/") + [""] * _UID)[_UID]
    if grant.round != uid:
        detail = f"the address is of the round {uid}, and the credential of another: deliver to the address as given"
        return Refusal(HTTPStatus.FORBIDDEN, "WrongRound", detail)
    scope.setdefault("state", {})[GRANT] = grant
    return None


def _password(scope: Scope) -> str:
    """Return the credential that was sent; empty if there is none."""
    scheme, _, sent = _sent(scope).partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        user, _, password = base64.b64decode(sent.strip(), validate=True).decode().partition(":")
    except ValueError:
        return ""
    return password if user == GATEWAY_USER else ""


def network_access(tokens: Sequence[SecretStr]) -> Authorize:
    """Return who may use the network's port: the ML node's token, ``tokens`` where it has none; all without any."""

    def authorize(scope: Scope) -> Refusal | None:
        node = resolved(scope).node
        if (scope["method"], scope["path"]) == ("GET", MODELS_PATH):
            return None
        wanted = node.tokens if node is not None else tokens
        if not wanted or _has_bearer(scope, wanted):
            return None
        detail = (
            "Authorization: send the header with Bearer and the ML node's token, or POC_GATEWAY_NETWORK_TOKEN if it "
            "has none of its own: that is the key network-token of the Secret RELEASE-gateway-tokens, or of "
            "that which gateway.auth.existingSecret names"
        )
        return _unauthorized(detail, "Bearer")

    return authorize


def _has_bearer(scope: Scope, tokens: Sequence[SecretStr]) -> bool:
    scheme, _, sent = _sent(scope).partition(" ")
    return _is_one_of(sent.strip(), tokens) and scheme.lower() == "bearer"


def _is_one_of(sent: str, tokens: Sequence[SecretStr]) -> bool:
    secrets = [token.get_secret_value().encode() for token in tokens]
    return any(hmac.compare_digest(sent.encode(), secret) for secret in secrets)


def _sent(scope: Scope) -> str:
    return Headers(scope=scope).get("authorization", "")


def _unauthorized(detail: str, challenge: str) -> Refusal:
    return Refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", detail, headers={"WWW-Authenticate": challenge})


class JsonBodies:
    """Labels a body without a Content-Type as JSON; answers 415 to a body of another type.

    The network's client sends JSON without a Content-Type. Releases of FastAPI differ in what they make of that: some
    read JSON, newer ones hand the bytes to the route, which refuses them. Here it is labelled before FastAPI sees it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] != "http" or not _has_body(headers := MutableHeaders(raw=list(scope["headers"]))):
            await self._app(scope, receive, send)
            return
        sent = headers.get("content-type", "").strip()
        if not is_json(sent):
            await _unsupported(sent).response()(scope, receive, send)
            return
        if not sent:
            headers["content-type"] = _JSON
        await self._app({**scope, "headers": headers.raw}, receive, send)


def _has_body(headers: MutableHeaders) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() != "0"


def _unsupported(sent: str) -> Refusal:
    detail = f"Content-Type is {sent}, and bodies are JSON: send {_JSON}, or leave the header out"
    return Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", detail)
