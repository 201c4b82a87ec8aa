# SPDX-License-Identifier: Apache-2.0
"""The page's files, which hold nothing that is secret, and its stream, which asks for the token of people.

All addresses in the files are relative, so that the page works below any prefix, such as that of the API server's
proxy. The stream takes the token in a header alone: an address ends in logs and in histories.
"""

from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Header
from starlette.responses import RedirectResponse, Response, StreamingResponse

from poc_gateway.errors import Refusal
from poc_gateway.query.web.feed import Feed

#: Where the page is.
PREFIX = "/web"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_INDEX = "index.html"
#: The files that there are; every one of them is served, and nothing else.
FILES = {
    file.name: file.read_bytes()
    for file in (files("poc_gateway.query.web") / "static").iterdir()
    if file.name.rpartition(".")[2] in _TYPES
}
#: What anybody may ask: without the token a browser has to be able to ask for it.
OPEN_PAGES = frozenset({PREFIX, f"{PREFIX}/", *(f"{PREFIX}/{name}" for name in FILES if name != _INDEX)})
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_RETRY_SECONDS = 30


def router(feed: Feed) -> APIRouter:
    """Return the routes. They are for the page alone, and no part of the API that is documented."""
    routes = APIRouter(prefix=PREFIX, include_in_schema=False)

    async def events(last_event_id: Annotated[str | None, Header(max_length=64)] = None) -> StreamingResponse:
        """Stream what happens until the viewer goes, or the server."""
        if feed.viewers.full:
            raise _refusal(feed.viewers.most)
        # X-Accel-Buffering tells proxies that keep answers back, as nginx does, to pass this one on at once.
        headers = {**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(feed.stream(last_event_id), media_type="text/event-stream", headers=headers)

    async def to_page() -> RedirectResponse:
        """Send a browser to the page; relative, since only the browser knows the prefix."""
        return RedirectResponse(f"{PREFIX[1:]}/", headers=HEADERS)

    routes.get("")(to_page)
    routes.get("/events")(events)
    for name in FILES:
        routes.get("/" if name == _INDEX else f"/{name}")(partial(_file, name))
    return routes


async def _file(name: str) -> Response:
    return Response(FILES[name], media_type=_TYPES[name.rpartition(".")[2]], headers=HEADERS)


def _refusal(most: int) -> Refusal:
    detail = f"{most} pages watch already, as many as POC_GATEWAY_VIEWERS allows: close one, or raise it"
    headers = {"Retry-After": str(_RETRY_SECONDS)}
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "TooManyViewers", detail, headers=headers)
