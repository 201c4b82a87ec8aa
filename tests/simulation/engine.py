# SPDX-License-Identifier: Apache-2.0
"""The fake engine, which also keeps when it computed what."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

from tests.support.fakes.engine import FakeEngineClient


@dataclass
class Work:
    """One call for a batch: ``done`` unless it was cut short, or another one goes on with its chains.

    Times are of the monotonic clock.
    """

    block_hash: str
    nonces: list[int]
    began: float
    ended: float | None = None
    done: bool = False
    #: Indices of each result in the decode scheme; 0 of a vector.
    chain_length: int = 0


class RecordingEngine(FakeEngineClient):
    """The engine of one server process."""

    def __init__(self, seconds_per_batch: float) -> None:
        super().__init__()
        self.seconds_per_batch = seconds_per_batch
        self.work: list[Work] = []

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:  # noqa: ASYNC109
        if method not in {"poc_compute", "poc_decode"}:
            return await super().collective_rpc(method, timeout, args)
        request = args[0]
        work = Work(request["block_hash"], request["nonces"], began=monotonic())
        work.chain_length = request["max_tokens"] + 1 if method == "poc_decode" else 0
        self.work.append(work)
        try:
            answers = await super().collective_rpc(method, timeout, args)
            work.done = answers[-1].get("complete", False)  # a failure is not
            return answers
        finally:
            work.ended = monotonic()
