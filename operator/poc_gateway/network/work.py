# SPDX-License-Identifier: Apache-2.0
"""One request for named nonces: what is left of it, and when pods that fail end it."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from poc_gateway.errors import Refusal
from poc_gateway.network.access import RETRY_AFTER
from poc_gateway.network.chunks import size_of
from poc_operator.clients.errors import PodError, PodRefused
from vllm_poc.wire.generate import GenerateRequest

#: Chunks of one request that may fail in a row.
FAILURES = 10
#: Refusals that every pod would give, since they are about the request.
_FINAL = {
    "InvalidRequest": HTTPStatus.UNPROCESSABLE_ENTITY,
    "SequenceTooLong": HTTPStatus.UNPROCESSABLE_ENTITY,
    "ModelMismatch": HTTPStatus.CONFLICT,
    "ModelUnsupported": HTTPStatus.CONFLICT,
}


@dataclass(eq=False)
class Work:
    """One request and how far it got. ``begun`` once a pod had a chunk of it."""

    request: GenerateRequest
    done: "asyncio.Future[None]"
    waiting: deque[int]
    values: dict[int, str | float | None] = field(default_factory=dict)
    begun: bool = False
    failures: int = 0

    def take(self, pods: int) -> list[int]:
        """Take the next chunk."""
        self.begun = True
        size = size_of(self.request, len(self.waiting), pods)
        return [self.waiting.popleft() for _ in range(size)]

    def give_back(self, nonces: Sequence[int], error: PodError) -> None:
        """Let another pod compute the chunk; fail if pods keep failing, or the request is at fault."""
        self.waiting.extendleft(reversed(nonces))
        self.failures += 1
        if isinstance(error, PodRefused) and error.reason in _FINAL:
            self._fail(_FINAL[error.reason], error.reason, str(error))
        elif self.failures >= FAILURES:
            detail = f"{FAILURES} pods in a row failed to compute nonces, the last with: {error}"
            self._fail(HTTPStatus.SERVICE_UNAVAILABLE, "PodsFailed", detail)

    def put(self, values: dict[int, str | float | None]) -> None:
        """Take over what a pod computed."""
        self.failures = 0
        self.values.update(values)
        if len(self.values) == len(self.request.nonces) and not self.done.done():
            self.done.set_result(None)

    def _fail(self, status: HTTPStatus, reason: str, detail: str) -> None:
        if not self.done.done():
            headers = RETRY_AFTER if status is HTTPStatus.SERVICE_UNAVAILABLE else None
            self.done.set_exception(Refusal(status, reason, detail, headers=headers))
