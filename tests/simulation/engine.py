# SPDX-License-Identifier: Apache-2.0
"""The fake engine, which also keeps when it computed what."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

from tests.support.fakes.engine import FakeEngineClient


@dataclass
class Work:
    """One batch: ``done`` unless it was cut short. Times are of the monotonic clock."""

    block_hash: str
    nonces: list[int]
    began: float
    ended: float | None = None
    done: bool = False


class RecordingEngine(FakeEngineClient):
    """The engine of one server process."""

    def __init__(self, seconds_per_batch: float) -> None:
        super().__init__()
        self.seconds_per_batch = seconds_per_batch
        self.work: list[Work] = []

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:  # noqa: ASYNC109
        if method != "poc_compute":
            return await super().collective_rpc(method, timeout, args)
        work = Work(args[0]["block_hash"], args[0]["nonces"], began=monotonic())
        self.work.append(work)
        try:
            answers = await super().collective_rpc(method, timeout, args)
            work.done = True
            return answers
        finally:
            work.ended = monotonic()
