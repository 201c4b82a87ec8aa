# SPDX-License-Identifier: Apache-2.0
"""Who may use the routes: people and the operator with the gateway's token, a pod with its round's password."""

import base64
import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import Request
from pydantic import SecretStr

from poc_gateway.errors import Refusal
from poc_operator.model.passwords import POD_USER, round_password

Guard = Callable[[Request], Awaitable[None]]


def token_guard(token: SecretStr | None) -> Guard:
    """Return a dependency that lets requests with the bearer token pass; all, if there is no token."""

    async def guard(request: Request) -> None:
        if token is not None and not _is_bearer(request, token):
            detail = "send the gateway's token as 'Authorization: Bearer <token>'"
            raise _unauthorized(detail, "Bearer")

    return guard


def callback_guard(token: SecretStr | None) -> Guard:
    """Return a dependency for routes with a ``uid`` in their path, which a pod of that round may use too."""

    async def guard(request: Request) -> None:
        if token is None or _is_bearer(request, token):
            return
        password = round_password(token.get_secret_value(), request.path_params["uid"])
        basic = base64.b64encode(f"{POD_USER}:{password}".encode()).decode()
        if not _is(request, f"Basic {basic}"):
            detail = f"deliver to the address that the operator gave, with {POD_USER}:<the round's password>@ in it"
            raise _unauthorized(detail, 'Basic realm="poc-gateway"')

    return guard


def _is_bearer(request: Request, token: SecretStr) -> bool:
    return _is(request, f"Bearer {token.get_secret_value()}")


def _is(request: Request, expected: str) -> bool:
    return hmac.compare_digest(request.headers.get("authorization", "").encode(), expected.encode())


def _unauthorized(detail: str, challenge: str) -> Refusal:
    return Refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", detail, headers={"WWW-Authenticate": challenge})
