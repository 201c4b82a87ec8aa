# SPDX-License-Identifier: Apache-2.0
"""Who may use the routes: whoever has the token of the port, and a pod that has the password of its round.

It is asked before anything of a body is received: a framework reads and parses a body before it runs a route's
dependencies, and that is the expensive part, which must not be had for nothing.
"""

import base64
import hmac
from collections.abc import Callable
from http import HTTPStatus

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from poc_gateway.errors import Refusal
from poc_operator.clients.gateway import POD_USER, round_password

#: Whether a request may pass; a Refusal if it may not.
Guard = Callable[[Scope], Refusal | None]

#: What anybody may ask, the kubelet among them.
OPEN_PATHS = frozenset({"/readyz", "/health", "/openapi.json"})
_CALLBACKS = "/callbacks/"
#: Where the uid stands in /callbacks/{namespace}/{name}/{uid}/….
_UID = 4


class Access:
    """ASGI middleware that answers what ``guard`` refuses, on every path but the open ones."""

    def __init__(self, app: ASGIApp, *, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        asks = scope["type"] == "http" and scope["path"] not in OPEN_PATHS
        refusal = self._guard(scope) if asks else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)


def inside_guard(token: SecretStr | None) -> Guard:
    """Return the guard of the inside's port: the token, or for callbacks also the round's password; all without one."""

    def guard(scope: Scope) -> Refusal | None:
        if token is None or _has_bearer(scope, token):
            return None
        if not scope["path"].startswith(_CALLBACKS):
            return _unauthorized("send the gateway's token as 'Authorization: Bearer <token>'", "Bearer")
        uid = (scope["path"].split("/") + [""] * _UID)[_UID]
        password = round_password(token.get_secret_value(), uid)
        basic = base64.b64encode(f"{POD_USER}:{password}".encode()).decode()
        if hmac.compare_digest(_sent(scope).encode(), f"Basic {basic}".encode()):
            return None
        detail = f"deliver to the address that the operator gave, with {POD_USER}:<the round's password>@ in it"
        return _unauthorized(detail, 'Basic realm="poc-gateway"')

    return guard


def network_guard(token: SecretStr | None) -> Guard:
    """Return the guard of the network's port: the token; all without one."""

    def guard(scope: Scope) -> Refusal | None:
        if token is None or _has_bearer(scope, token):
            return None
        detail = "Authorization: send the header with Bearer and the value of POC_GATEWAY_NETWORK_TOKEN"
        return _unauthorized(detail, "Bearer")

    return guard


def _has_bearer(scope: Scope, token: SecretStr) -> bool:
    scheme, _, sent = _sent(scope).partition(" ")
    is_token = hmac.compare_digest(sent.strip().encode(), token.get_secret_value().encode())
    return is_token and scheme.lower() == "bearer"


def _sent(scope: Scope) -> str:
    return Headers(scope=scope).get("authorization", "")


def _unauthorized(detail: str, challenge: str) -> Refusal:
    return Refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", detail, headers={"WWW-Authenticate": challenge})
