# SPDX-License-Identifier: Apache-2.0
"""Requests to the gateway's routes: made by schemathesis from their OpenAPI document, then brought to what is really
there, and spoilt in ways that it does not know.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies as st

from poc_operator.credentials import sign
from tests.support.builders.fuzz import ODD_NUMBERS, ODD_TEXTS, bodies
from tests.support.builders.openapi_cases import OF_THE_TOOL, AnyCase
from tests.support.builders.secrets import CALLBACK_KEY, TOKEN, a_grant, basic

NETWORK_TOKEN = "fuzz-token"  # noqa: S105 - of tests alone
BASE = "http://gateway"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "ODD"]
_TOKENS = ["", "Bearer", "Bearer \0", "Bearer é", "Basic \ud800", "Basic cG9kOg==", f"Bearer {TOKEN}x"]
_TYPES = ["", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "application/xml", "/", "é"]
_ACCEPTS = ["", "text/csv", "image/png", "application/json;q=x", ",", "\0", "é"]
_TAILS = ["/", "/x", "%00", "//", "/..", "%ff", "%2f"]
_ODD = [
    *map(repr, ODD_NUMBERS),
    *ODD_TEXTS,
    "9223372036854775808",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59-14:00",
]


@dataclass(frozen=True)
class Target:
    """Parameters of something that is there, and bodies that suit it by the end of their path."""

    parameters: Mapping[str, str]
    bodies: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Request:
    """What is sent, and what it was made from. ``on_route`` if method and path are still those of the case."""

    case: AnyCase
    method: str
    url: str
    headers: Mapping[bytes, bytes]
    body: bytes
    on_route: bool

    def __repr__(self) -> str:
        return f"{self.method} {self.url} {dict(self.headers)} {self.body[:2000]!r}"


@st.composite
def requests(draw: st.DrawFn, some: st.SearchStrategy[AnyCase], targets: Sequence[Target]) -> Request:
    """A case, mostly for one of ``targets`` and with the right token."""
    case, target = draw(some), draw(st.sampled_from(targets))
    sent: dict[str, Any] = case.as_transport_kwargs(base_url=BASE)
    method = str(sent["method"])
    url, on_route = _path(draw, case, target)
    if _one_in(draw, 30):
        method = draw(st.sampled_from(_METHODS))
    if _one_in(draw, 30):
        on_route = False
        url += draw(st.sampled_from(_TAILS))
    query = urlencode(_query(draw, case, sent.get("params") or {}, target), doseq=True, errors="surrogatepass")
    return Request(
        case=case,
        method=method,
        url=f"{url}?{query}" if query else url,
        headers=_headers(draw, case, sent["headers"], target),
        body=_body(draw, case, sent, target),
        on_route=on_route and method == sent["method"],
    )


def _one_in(draw: st.DrawFn, count: int) -> bool:
    # Hypothesis simplifies towards 0, which therefore means no.
    return draw(st.integers(0, count - 1)) == count - 1


def _path(draw: st.DrawFn, case: AnyCase, target: Target) -> tuple[str, bool]:
    parameters, on_route = dict(case.path_parameters), True
    if not _one_in(draw, 8):
        parameters |= {name: value for name, value in target.parameters.items() if name in parameters}
    if parameters and _one_in(draw, 15):
        odd = draw(st.sampled_from(_ODD))
        parameters[draw(st.sampled_from(sorted(parameters)))] = quote(odd, safe="", errors="surrogatepass")
        # Servers decode the path before they split it.
        on_route = bool(odd) and "/" not in odd
    return BASE + case.operation.path.format_map(parameters), on_route


def _query(draw: st.DrawFn, case: AnyCase, generated: Mapping[str, Any], target: Target) -> dict[str, Any]:
    query = dict(generated)
    if "uid" in query and not _one_in(draw, 4):
        query["uid"] = target.parameters["uid"]
    names = sorted({*query, *(parameter.name for parameter in case.operation.query)})
    if names and _one_in(draw, 4):
        query[draw(st.sampled_from(names))] = draw(st.sampled_from(_ODD))
    return query


def _right(case: AnyCase, target: Target) -> str:
    """Return what the route asks for: the credential of a pod of the round, the network's token, or people's."""
    path = case.operation.path
    if path.startswith("/callbacks/"):
        grant = a_grant(target.parameters.get("uid", ""), since=0, rate=1_000_000)
        return basic(sign(CALLBACK_KEY, grant, 2**40))["Authorization"]
    return f"Bearer {NETWORK_TOKEN if path.startswith('/api/') else TOKEN}"


def _headers(draw: st.DrawFn, case: AnyCase, generated: Mapping[str, Any], target: Target) -> dict[bytes, bytes]:
    headers = {name: str(value) for name, value in generated.items() if name not in OF_THE_TOOL}
    if not _one_in(draw, 20):
        headers["Authorization"] = _right(case, target)
    for name, values in (("Authorization", _TOKENS), ("Content-Type", _TYPES), ("Accept", _ACCEPTS)):
        if _one_in(draw, 30):
            headers[name] = draw(st.sampled_from(values))
    return {name.encode(): value.encode(errors="surrogatepass") for name, value in headers.items()}


def _body(draw: st.DrawFn, case: AnyCase, sent: Mapping[str, Any], target: Target) -> bytes:
    suiting = [body for end, some in target.bodies.items() if case.operation.path.endswith(end) for body in some]
    if suiting and not _one_in(draw, 3):
        return draw(bodies(draw(st.sampled_from(suiting))))
    if _one_in(draw, 20):
        return draw(bodies({}))
    if "json" in sent:
        return json.dumps(sent["json"]).encode()
    data = sent.get("data") or b""
    return data if isinstance(data, bytes) else str(data).encode(errors="surrogatepass")
