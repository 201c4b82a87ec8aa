# SPDX-License-Identifier: Apache-2.0
"""What every answer of the gateway must look like, and that a refused request leaves the store as it was."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
from fastapi import FastAPI
from hypothesis import reject
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.builders.fuzz import ANSWER_SECONDS
from tests.support.builders.gateway_requests import Request
from vllm_poc.wire.answers import ErrorResponse

_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
_DOCUMENT = Path(__file__).parents[3] / "docs/reference/gateway-api.md"
_ROW = re.compile(r"^\| (5\d\d) (`.+?`) \|", re.MULTILINE)
#: The server errors that the documentation tells of, as (status, reason).
DOCUMENTED = {
    (int(status), reason)
    for status, reasons in _ROW.findall(_DOCUMENT.read_text())
    for reason in re.findall(r"`(\w+)`", reasons)
}
#: What is stored, by its kind.
State = Mapping[str, Sequence[object]]
#: A detail that names no field has this many words at least.
_SENTENCE = 6


class Fuzzing:
    """Sends requests to an app, each once, and judges the answers. Only one that succeeds may change ``state``.

    ``refusing`` are the operations that cannot succeed here, each with the reason that it gives when all else is well.
    """

    def __init__(self, app: FastAPI, state: Callable[[], State], refusing: Mapping[str, str]) -> None:
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        self._state = state
        self._refusing = refusing
        self._before = state()
        self._asked = set[str]()
        self.statuses = Counter[int]()
        #: Operations that did what they are for.
        self.done = set[str]()

    async def ask(self, request: Request) -> None:
        """Send a request, unless it was sent before, and judge its answer."""
        if str(request) in self._asked:
            return
        try:
            await self._judge(request)
        except Exception as error:
            # Hypothesis would tell of it only if it failed again, in another state.
            error.add_note(f"This was about {request}")
            raise
        self._asked.add(str(request))

    async def close(self) -> None:
        """Close the client."""
        await self._http.aclose()

    async def _judge(self, request: Request) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._http.request(
                    request.method, request.url, headers=request.headers, content=request.body
                )
        except httpx.InvalidURL:  # too long for the client
            reject()
        before, self._before = self._before, self._state()
        if answer.is_error or request.method == "GET":
            told = f"answered {answer.status_code}, and has changed the store: "
            assert self._before == before, told + _changed(before, self._before)
        check_error(request.method, answer)
        if request.on_route:
            request.case.validate_response(answer, checks=_CHECKS)
            if self._is_done(request.case.operation.label, answer):
                self.done.add(request.case.operation.label)
        self.statuses[int(answer.status_code)] += 1

    def _is_done(self, operation: str, answer: httpx.Response) -> bool:
        if answer.is_success or answer.status_code == httpx.codes.NOT_IMPLEMENTED:
            return True
        return operation in self._refusing and answer.json()["reason"] == self._refusing[operation]


def _changed(before: State, after: State) -> str:
    lost = [f"-{name} {row}" for name in before for row in before[name] if row not in after[name]]
    return "\n".join(lost + [f"+{name} {row}" for name in after for row in after[name] if row not in before[name]])


def check_error(method: str, answer: httpx.Response) -> None:
    """Fail if an answer is an error that does not say what to do, or one of the server that is not documented."""
    status = answer.status_code
    if status == httpx.codes.METHOD_NOT_ALLOWED:
        assert answer.headers["Allow"]
    if not answer.is_error or method == "HEAD":
        return
    error = ErrorResponse.model_validate_json(answer.content)
    assert error.reason
    assert error.detail
    assert error.errors or len(error.detail.split()) >= _SENTENCE, error
    assert error.errors or status != httpx.codes.UNPROCESSABLE_ENTITY, error
    # Rules between fields have no field, but name them.
    assert all(one.message and (one.field or len(one.message.split()) >= _SENTENCE) for one in error.errors), error
    assert not answer.is_server_error or (status, error.reason) in DOCUMENTED, error
