# SPDX-License-Identifier: Apache-2.0
"""Who may call the network's routes, where results may be sent to, and what is told of a field that is wrong."""

import hmac
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import SecretStr

from poc_gateway.errors import Refusal
from poc_gateway.settings import Settings
from vllm_poc.wire.requests import CallbackRequest
from vllm_poc.wire.responses import FieldError

#: With every 503: when to ask again.
RETRY_AFTER = {"Retry-After": "5"}

_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def guard(token: SecretStr | None) -> Callable[[_Credentials], Awaitable[None]]:
    """Return the dependency that refuses with 401 whoever does not send the token; without a token, nobody."""
    expected = token.get_secret_value().encode() if token is not None else None

    async def check(credentials: _Credentials) -> None:
        sent = credentials.credentials.encode() if credentials is not None else b""
        if expected is not None and not hmac.compare_digest(sent, expected):
            detail = "Authorization: send the header with Bearer and the value of POC_GATEWAY_NETWORK_TOKEN"
            raise Refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})

    return check


def check_receiver(request: CallbackRequest, settings: Settings) -> None:
    """Refuse with 422 a callback that would never be sent: to a host that is not allowed, or with a password."""
    receiver = urlsplit(request.receiver or "")
    field, host = "url" if request.url is not None else "callback_url", receiver.hostname
    if "@" in receiver.netloc:
        raise field_refusal(field, "holds a user or a password, and results are sent without either: take them out")
    if host is not None and not any(fnmatchcase(host, pattern) for pattern in settings.receiver_allow):
        allowed = ", ".join(settings.receiver_allow)
        raise field_refusal(field, f"callbacks to {host} are not allowed; POC_GATEWAY_RECEIVER_ALLOW allows {allowed}")


def field_refusal(field: str, message: str, status: HTTPStatus = HTTPStatus.UNPROCESSABLE_ENTITY) -> Refusal:
    """Return a refusal about one field of the request."""
    return Refusal(status, "InvalidRequest", f"{field}: {message}", errors=[FieldError(field=field, message=message)])
