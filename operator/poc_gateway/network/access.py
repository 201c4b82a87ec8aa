# SPDX-License-Identifier: Apache-2.0
"""Where the network's results may be sent to, and what is told of a field that is wrong."""

from fnmatch import fnmatchcase
from http import HTTPStatus
from urllib.parse import urlsplit

from poc_gateway.errors import Refusal
from poc_gateway.settings import Settings
from vllm_poc.wire.messages import CallbackRequest, FieldError

#: With every 503: when to ask again.
RETRY_AFTER = {"Retry-After": "5"}


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
