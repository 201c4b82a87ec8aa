# SPDX-License-Identifier: Apache-2.0
"""The pods of `benchmarks.day`: how much they deliver, how, and when the gateway is killed meanwhile."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from http import HTTPStatus
from random import Random
from typing import Any

import aiohttp

from benchmarks.day_receiver import vector_b64
from poc_operator.credentials import RATE_LIMIT
from tests.support.builders.deliveries import K_DIM, ROUND, path
from tests.support.builders.secrets import a_grant, pod_headers

SLOTS = 64
BATCH = 256
UID = "day"
_HEAD = json.dumps({"node_id": 0, "encoding": {"k_dim": K_DIM}, **ROUND})[:-1]
#: Pause before a delivery that failed comes again.
_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class Plan:
    """``artifacts`` in all, in as many batches for each slot; ``kills`` at moments that the ``seed`` decides."""

    artifacts: int
    kills: int
    seed: int = 1

    @property
    def batches(self) -> int:
        """Batches of each slot, at least one."""
        return max(1, self.artifacts // (SLOTS * BATCH))

    @property
    def total(self) -> int:
        """Artifacts that are delivered."""
        return self.batches * SLOTS * BATCH

    def moments(self) -> list[int]:
        """After how many stored artifacts a kill comes: one in each of equal parts, the last after all."""
        random = Random(self.seed)  # noqa: S311 - not for secrets
        return [int((one + random.random()) / self.kills * self.total) for one in range(self.kills - 1)] + [self.total]


@dataclass
class Pods:
    """Each slot's pod delivers batch after batch, each again until it is acknowledged."""

    session: aiohttp.ClientSession
    plan: Plan
    #: Batches of each slot that were acknowledged.
    acknowledged: list[int] = field(default_factory=lambda: [0] * SLOTS)
    #: Artifacts that were acknowledged as stored before, since an earlier acknowledgement was lost.
    duplicates: int = 0
    conflicts: int = 0

    def __post_init__(self) -> None:
        grants = [a_grant(UID, slot, f"pod-{slot}", rate=RATE_LIMIT) for slot in range(SLOTS)]
        self._headers = [pod_headers(grant, seconds=86_400) for grant in grants]

    @property
    def stored(self) -> int:
        """Artifacts that were acknowledged."""
        return sum(self.acknowledged) * BATCH

    async def run(self) -> None:
        """Deliver everything."""
        await asyncio.gather(*(self._deliver_slot(slot) for slot in range(SLOTS)))

    async def rival(self, slot: int, salt: int) -> None:
        """Deliver the slot's first batch with other bytes; RuntimeError if that is no conflict for every nonce."""
        receipt = await self._deliver(slot, _body(slot, 0, salt))
        if receipt["conflicts"] != BATCH:
            raise RuntimeError(f"other bytes for nonces of slot {slot} that are stored: {receipt}")
        self.conflicts += BATCH

    async def _deliver_slot(self, slot: int) -> None:
        for index in range(self.plan.batches):
            receipt = await self._deliver(slot, _body(slot, index))
            if receipt["stored"] + receipt["duplicates"] != BATCH:
                raise RuntimeError(f"batch {index} of slot {slot} was not stored: {receipt}")
            self.duplicates += receipt["duplicates"]
            self.acknowledged[slot] += 1

    async def _deliver(self, slot: int, body: bytes) -> dict[str, Any]:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.session.post(path(UID), data=body, headers=self._headers[slot]) as answer:
                    if answer.status == HTTPStatus.OK:
                        receipt: dict[str, Any] = await answer.json()
                        return receipt
                    if answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
                        raise RuntimeError(f"HTTP {answer.status}: {await answer.text()}")
            await asyncio.sleep(_RETRY_SECONDS)


def _body(slot: int, index: int, salt: int = 0) -> bytes:
    first = slot + index * BATCH * SLOTS
    nonces = range(first, first + BATCH * SLOTS, SLOTS)
    items = ",".join(f'{{"nonce":{nonce},"vector_b64":"{vector_b64(nonce, salt)}"}}' for nonce in nonces)
    return f'{_HEAD},"artifacts":[{items}]}}'.encode()
