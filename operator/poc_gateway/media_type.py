# SPDX-License-Identifier: Apache-2.0
"""The ASGI middleware that takes every body for JSON, and refuses those that say that they are something else.

The network's client sends JSON without a Content-Type. Releases of FastAPI differ in what they make of that: some
read JSON, newer ones hand the bytes to the route, which refuses them. Here the body is labelled before FastAPI sees it.
"""

from email.message import Message as Headed
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from poc_gateway.errors import Refusal

_JSON = "application/json"


class JsonBodies:
    """Labels a body without a Content-Type as JSON; answers 415 to a body of another type."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] != "http" or not _has_body(headers := MutableHeaders(raw=list(scope["headers"]))):
            await self._app(scope, receive, send)
            return
        sent = headers.get("content-type", "").strip()
        if sent and not is_json(sent):
            await _unsupported(sent).response()(scope, receive, send)
            return
        if not sent:
            headers["content-type"] = _JSON
        await self._app({**scope, "headers": headers.raw}, receive, send)


def is_json(content_type: str) -> bool:
    """Return whether a Content-Type is of JSON: ``application/json`` or ``application/*+json``, with any parameters."""
    headed = Headed()
    headed["content-type"] = content_type
    subtype = headed.get_content_subtype()
    return headed.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _has_body(headers: MutableHeaders) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() != "0"


def _unsupported(sent: str) -> Refusal:
    detail = f"Content-Type is {sent}, and bodies are JSON: send {_JSON}, or leave the header out"
    return Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", detail)
