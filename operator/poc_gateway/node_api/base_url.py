# SPDX-License-Identifier: Apache-2.0
"""Which ML node a request is for, and the rest of its path.

An ML node has a base URL: ``/nodes/NAME``, or a host name of its own, or the address itself if the gateway has one
ML node only. The network's client puts the version of the ML node into the path, so one such segment is left out:
before ``/nodes/NAME`` or after it.

    /nodes/a/v3.0.8/api/v1/state  ->  a, /api/v1/state
    /v3.0.8/nodes/a/v1/models     ->  a, /v1/models
"""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, NamedTuple
from urllib.parse import quote

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from poc_gateway.errors import RETRY_AFTER, Refusal
from poc_gateway.node_api.chat import ChatPlaces
from poc_gateway.node_api.service import NodeApi

_NODES = "nodes"
_VERSION = re.compile(r"[vV]?\d[\w.+-]{0,63}", re.ASCII)
#: What follows a version: the first segments of the ML node's paths. ``/v1/models`` begins with no version.
_AFTER_VERSION = frozenset({"api", "v1", _NODES, "health", "livez", "readyz"})
_STATE = "resolved"
CHAT_PREFIX = "/v1"


class Resolved(NamedTuple):
    """The ML node that a request is for, or why there is none. ``named`` if the path or the host names one."""

    node: NodeApi | None
    refusal: Refusal | None
    named: bool


class BaseUrls:
    """ASGI middleware that finds the ML node, keeps it for `resolved`, and leaves the rest of the path."""

    def __init__(self, app: ASGIApp, *, ml_nodes: Sequence[NodeApi]) -> None:
        self._app = app
        self._by_name = {one.ml_node.name: one for one in ml_nodes}
        self._by_host = {one.ml_node.host: one for one in ml_nodes if one.ml_node.host is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] == "http":
            name, path = split(scope["path"])
            state = {**scope.get("state", {}), _STATE: self._resolve(name, Headers(scope=scope).get("host", ""))}
            scope = {**scope, "path": path, "raw_path": _raw(scope, path), "state": state}
        await self._app(scope, receive, send)

    def _resolve(self, name: str | None, host: str) -> Resolved:
        if name is not None:
            node = self._by_name.get(name)
            return Resolved(node, None if node is not None else _unknown(name), named=True)
        of_host = self._by_host.get(_hostname(host))
        if of_host is not None:
            return Resolved(of_host, None, named=True)
        if len(self._by_name) == 1:
            return Resolved(next(iter(self._by_name.values())), None, named=False)
        return Resolved(None, _ambiguous() if self._by_name else _none(), named=False)


class Chat:
    """ASGI middleware that hands what is below ``/v1`` to the ML node's proxy; it stands behind `BaseUrls`.

    Answers 503 to what finds no place among ``places``, if there are any.
    """

    def __init__(self, app: ASGIApp, *, places: ChatPlaces | None = None) -> None:
        self._app = app
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] != "http" or not _is_below_chat(scope["path"]):
            await self._app(scope, receive, send)
            return
        found = resolved(scope)
        if found.node is None:
            await (found.refusal or _none()).response()(scope, receive, send)
        elif self._places is None:
            await found.node.chat.serve(scope, receive, send)
        else:
            peer = scope["client"][0] if scope["client"] else ""
            await self._places.serve(peer, found.node.chat.serve, scope, receive, send)


def is_chat(path: str) -> bool:
    """Return whether a request with this path, as it was sent, is for chat."""
    return _is_below_chat(split(path)[1])


def _is_below_chat(path: str) -> bool:
    return path == CHAT_PREFIX or path.startswith(f"{CHAT_PREFIX}/")


def resolved(scope: Scope) -> Resolved:
    """Return what `BaseUrls` found."""
    found: Resolved = scope["state"][_STATE]
    return found


async def node_of(request: Request) -> NodeApi:
    """Return the ML node that a request is for. Refusal if there is none."""
    found = resolved(request.scope)
    if found.node is None:
        raise found.refusal or _none()
    return found.node


#: What a route asks FastAPI for: the ML node that its request is for.
Service = Annotated[NodeApi, Depends(node_of)]


def split(path: str) -> tuple[str | None, str]:
    """Return the name of the ML node, if the path has one, and the path within the ML node."""
    rest = _without_version(path)
    if not rest.startswith(f"/{_NODES}/"):
        return None, rest
    _, _, name, *tail = rest.split("/", 3)
    within = f"/{tail[0]}" if tail else "/"
    return name, _without_version(within) if rest == path else within


def _without_version(path: str) -> str:
    if not path.startswith("/"):  # "OPTIONS *"
        return path
    _, first, *tail = path.split("/", 2)
    if tail and _VERSION.fullmatch(first) and tail[0].split("/", 1)[0] in _AFTER_VERSION:
        return f"/{tail[0]}"
    return path


def _raw(scope: Scope, path: str) -> bytes:
    # A proxied path is passed on as it was sent, unless its beginning was written in an unusual way.
    raw: bytes = (scope.get("raw_path") or b"").split(b"?", 1)[0]
    prefix = scope["path"].removesuffix(path).encode()
    return raw[len(prefix) :] if raw and raw.startswith(prefix) else quote(path).encode()


def _hostname(host: str) -> str:
    name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdecimal() else host
    return name.lower().removesuffix(".")


def _unknown(name: str) -> Refusal:
    detail = f"no ML node is called {name}: the values gateway.mlNodes name those that there are"
    return Refusal(HTTPStatus.NOT_FOUND, "MlNodeNotFound", detail)


def _ambiguous() -> Refusal:
    detail = "this gateway serves several ML nodes: put /nodes/NAME in front of the path, or use the ML node's host"
    return Refusal(HTTPStatus.NOT_FOUND, "MlNodeNotFound", detail)


def _none() -> Refusal:
    detail = (
        "this gateway has no ML node: set the value gateway.mlNodes, or POC_GATEWAY_ML_NODES to a file that lists them"
    )
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NotConfigured", detail, headers=RETRY_AFTER)
