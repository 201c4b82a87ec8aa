# SPDX-License-Identifier: Apache-2.0
"""A pod's server that only answers the operator, for benchmarks with thousands of them.

The real application takes two milliseconds of a core for a poll. Thousands of pods would keep one process so busy that
the operator waited for them, which no fleet of real pods would do.
"""

import json
from collections import deque
from secrets import token_hex
from time import monotonic
from typing import Any

from starlette.types import Receive, Scope, Send

from tests.simulation.engine import Work
from tests.simulation.session import Poll
from vllm_poc.wire.answers import CommandResponse, ModelLimits, PowState, PowStatus, StatusResponse
from vllm_poc.wire.messages import API_PREFIX, InitGenerateRequest

_HEADERS = [(b"content-type", b"application/json")]
#: Polls that are remembered: those of the last minutes.
_POLLS = 100


class LightSession:
    """Computes on paper: a batch each ``seconds_per_batch`` from its start on, all valid and delivered at once."""

    def __init__(self, pod: str, seconds_per_batch: float) -> None:
        self.pod = pod
        self.work: list[Work] = []
        self.polls: deque[Poll] = deque(maxlen=_POLLS)
        self.born = monotonic()
        self.died: float | None = None
        self._seconds_per_batch = seconds_per_batch
        self._round: InitGenerateRequest | None = None
        self._began = 0.0
        self._session_id = token_hex(8)
        model = ModelLimits(names=["tiny"], max_seq_len=64, hidden_size=64)
        idle = StatusResponse(
            status=PowState.IDLE, state=PowState.IDLE, session_id=self._session_id, leases=True, model=model
        )
        self._status: dict[str, Any] = idle.model_dump(mode="json")

    async def start(self) -> None:
        """Begin to live."""

    async def kill(self) -> None:
        """Die."""
        self.died = monotonic()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        route = scope["path"].removeprefix(f"{API_PREFIX}/")
        if route == "status":
            await _answer(send, self._told())
        elif route == "init/generate":
            await self._start(await _body(receive), send)
        elif route == "stop":
            self._status |= {"status": PowState.IDLE, "state": PowState.STOPPED, "stop_reason": "Requested"}
            self._round = None
            await _answer(send, self._obeyed(PowState.STOPPED))
        else:
            await _answer(send, self._obeyed(PowState.GENERATING))

    async def _start(self, body: bytes, send: Send) -> None:
        request = self._round = InitGenerateRequest.model_validate_json(body)
        self._began = monotonic()
        self.work.append(Work(request.block_hash, [], began=self._began))
        told = {name: getattr(request, name) for name in ("round_id", "owner", "start_index", "lease_seconds")}
        self._status |= told | {
            "status": PowState.GENERATING,
            "state": PowState.GENERATING,
            "stop_reason": None,
            "config": None,
        }
        await _answer(send, self._obeyed(PowState.GENERATING))

    def _told(self) -> dict[str, Any]:
        now = monotonic()
        if self._round is not None:
            done = int((now - self._began) / self._seconds_per_batch) * self._round.batch_size
            index = self._round.start_index + done
            self._status |= {"next_index": index, "delivered_index": index, "delivered_valid": done}
            self._status |= {"total_checked": done, "total_valid": done, "lease_remaining_seconds": 3600}
            self.polls.append(Poll(now, self._session_id, self._round.round_id, None, index, index))
        return self._status

    def _obeyed(self, state: PowState) -> dict[str, Any]:
        told = PowStatus(status=state, session_id=self._session_id, round_id=self._status["round_id"])
        return CommandResponse(pow_status=told).model_dump(mode="json")


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _answer(send: Send, told: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})
