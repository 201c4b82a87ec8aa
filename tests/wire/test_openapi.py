# SPDX-License-Identifier: Apache-2.0
"""Requests made from the pod's OpenAPI document are answered in time and as it says, and the server stays well.

FUZZ_EXAMPLES=10000 pytest tests/wire/test_openapi.py
"""

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.builders.fuzz import ANSWER_SECONDS, REQUESTS, SETTINGS, bodies, check_answer
from tests.support.builders.openapi_cases import OF_THE_TOOL, AnyCase, cases
from tests.support.servers.pod import Pod
from vllm_poc.server.routes import create_app
from vllm_poc.server.service import PocService
from vllm_poc.wire.messages import API_PREFIX

#: Requests to each set of routes.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
#: The end of an operation's name, by what it is about.
ROUTES: dict[str, Sequence[str]] = {
    "rounds": ["/init", "/init/generate", "/init/validate", "/extend", "/phase/generate", "/phase/validate", "/stop"],
    "named nonces": ["/generate", "/generate/{request_id}", "/validate"],
    "reading": ["/status", "/versions", "/gpus"],
}
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
#: What any request may be answered beside what its route says: no such route, or a body that is none.
GENERAL = {httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED, httpx.codes.BAD_REQUEST}

log = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(120 + EXAMPLES // 5)

APP = create_app(cast(PocService, None))
NAMES, _ = cases(APP)


def routes_of(name: str) -> set[str]:
    """Return the names of the operations of a set."""
    return {f"{verb} {API_PREFIX}{route}" for route in ROUTES[name] for verb in ("GET", "POST")} & set(NAMES)


def test_every_operation_is_in_a_set() -> None:
    assert set().union(*map(routes_of, ROUTES)) == set(NAMES)


@st.composite
def requests(draw: st.DrawFn, some: st.SearchStrategy[AnyCase]) -> tuple[AnyCase, bytes]:
    """A case, and its body: the document's, or one that is nearly right."""
    case = draw(some)
    valid = [body for _, route, body in REQUESTS if f"{API_PREFIX}/{route}" == case.operation.path and body]
    nearly: bool = draw(st.sampled_from([True, True, False]))
    if valid and nearly:
        return case, draw(bodies(draw(st.sampled_from(valid))))
    sent: dict[str, Any] = case.as_transport_kwargs(base_url="http://pod")
    return case, json.dumps(sent["json"]).encode() if "json" in sent else b""


async def ask(pod: Pod, case: AnyCase, body: bytes) -> httpx.Response:
    """Send a request and judge the answer."""
    sent: dict[str, Any] = case.as_transport_kwargs(base_url="http://pod")
    headers = {name: value for name, value in sent["headers"].items() if name not in OF_THE_TOOL}
    wired = {name.encode(): str(value).encode(errors="surrogatepass") for name, value in headers.items()}
    async with asyncio.timeout(ANSWER_SECONDS):
        answer = await pod.http.request(
            sent["method"], sent["url"], params=sent.get("params"), headers=wired, content=body
        )
    check_answer(sent["method"], answer.status_code, answer.content)
    if answer.status_code not in GENERAL:
        case.validate_response(answer, checks=CHECKS)
    return answer


@pytest.mark.parametrize("pod_settings", [SETTINGS])
@pytest.mark.parametrize("name", ROUTES)
async def test_what_the_document_tells_is_what_happens(pod: Pod, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "vllm.vllm_poc")  # of callbacks that nobody takes
    _, some = cases(APP, routes_of(name))
    statuses, drawn = Counter[int](), list[tuple[AnyCase, bytes]]()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(request=requests(some))
    def draw(request: tuple[AnyCase, bytes]) -> None:
        drawn.append(request)

    await asyncio.to_thread(draw)
    for case, body in drawn:
        answer = await ask(pod, case, body)
        statuses[answer.status_code] += 1
        status = await pod.http.get(f"{API_PREFIX}/status?lists=false")
        assert status.status_code == httpx.codes.OK, f"after {case.method} {case.path} {body!r}"
    log.info("%s: %s", name, dict(statuses))
    assert statuses[httpx.codes.OK] > EXAMPLES / 100, statuses
