# SPDX-License-Identifier: Apache-2.0
"""Who may call the network's routes, and how failures of what lies behind them are told."""

import hmac
from collections.abc import Callable
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import SecretStr

from poc_gateway.settings import Settings
from poc_gateway.store.errors import DatabaseError
from poc_operator.store.errors import RoundInvalid, StoreError
from vllm_poc.server.errors import field_refusal, refusal, response
from vllm_poc.wire.requests import CallbackRequest

#: With every 503: when to ask again.
RETRY_AFTER = {"Retry-After": "5"}

_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def guard(token: SecretStr | None) -> Callable[[_Credentials], None]:
    """Return the dependency that refuses with 401 whoever does not send the token; without a token, nobody."""
    expected = token.get_secret_value().encode() if token is not None else None

    def check(credentials: _Credentials) -> None:
        sent = credentials.credentials.encode() if credentials is not None else b""
        if expected is not None and not hmac.compare_digest(sent, expected):
            detail = "Authorization: send the header with Bearer and the value of POC_GATEWAY_NETWORK_TOKEN"
            raise refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", detail, {"WWW-Authenticate": "Bearer"})

    return check


def check_receiver(request: CallbackRequest, settings: Settings) -> None:
    """Refuse with 422 a callback to a host that is not allowed."""
    host = urlsplit(request.receiver or "").hostname
    if host is not None and not any(fnmatchcase(host, pattern) for pattern in settings.receiver_allow):
        field = "url" if request.url is not None else "callback_url"
        allowed = ", ".join(settings.receiver_allow)
        raise field_refusal(field, f"callbacks to {host} are not allowed; POC_GATEWAY_RECEIVER_ALLOW allows {allowed}")


def install_handlers(app: FastAPI) -> None:
    """Tell failures of API server and database as 503, and a spec that the API server refuses as 422."""
    app.exception_handler(StoreError)(_store_failed)
    app.exception_handler(DatabaseError)(_database_failed)


async def _store_failed(_: Request, error: StoreError) -> JSONResponse:
    if isinstance(error, RoundInvalid):
        return response(refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "InvalidRequest", str(error)))
    detail = f"the Kubernetes API server cannot be used ({error}): try again"
    return response(refusal(HTTPStatus.SERVICE_UNAVAILABLE, "ApiServerUnavailable", detail, RETRY_AFTER))


async def _database_failed(_: Request, error: DatabaseError) -> JSONResponse:
    return response(refusal(HTTPStatus.SERVICE_UNAVAILABLE, "DatabaseUnavailable", str(error), RETRY_AFTER))
