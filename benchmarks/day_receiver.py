# SPDX-License-Identifier: Apache-2.0
"""A callback receiver in a process of its own that checks the order of each slot and the bytes of each vector.

python -m benchmarks.day_receiver SLOTS prints its port. It keeps a few numbers per slot, so it may run for a day.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from struct import pack
from typing import Any

import uvloop
from aiohttp import web

ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 2**26
#: Of a vector of twelve numbers the first nine, which are the same for all nonces; the other three tell the nonce.
_HEAD = b64encode(pack("<9e", *range(9))).decode()
#: Bits of a nonce in one number: those of an fp16 with an exponent that is never infinity's.
_BITS = 14
_MOST_FAULTS = 10


def vector_b64(nonce: int, salt: int = 0) -> str:
    """Return the vector that an honest pod computes for a nonce; with a ``salt`` another pod's."""
    low, high = nonce & (1 << _BITS) - 1, nonce >> _BITS & (1 << _BITS) - 1
    return _HEAD + b64encode(pack("<3H", low, high, salt)).decode()


def artifacts(nonces: range) -> list[dict[str, Any]]:
    """Return honest artifacts as they are on the wire."""
    return [{"nonce": nonce, "vector_b64": vector_b64(nonce)} for nonce in nonces]


@dataclass
class Audit:
    """What has arrived. ``next`` has for each slot the first nonce that has not, in the order of slots.

    ``repeated`` counts artifacts of payloads that came again, ``faults`` says what must never happen.
    """

    next: list[int]
    payloads: int = 0
    repeated: int = 0
    faults: list[str] = field(default_factory=list)

    def take(self, payload: dict[str, Any], height: int, last: dict[int, int]) -> None:
        """Check a payload; ``last`` has the first nonce of each slot's payload before it."""
        self.payloads += 1
        items, slots = payload["artifacts"], len(self.next)
        first, end = items[0]["nonce"], items[-1]["nonce"] + slots
        slot = first % slots
        if payload["block_height"] != height:
            self._fault(f"payload of height {payload['block_height']}")
        if items != artifacts(range(first, end, slots)):
            self._fault(f"slot {slot}: nonces {first} to {end - slots} with a gap, in disorder, or with other bytes")
        if not last.get(slot, slot) <= first <= self.next[slot]:
            self._fault(f"slot {slot}: nonce {first} came after the payload at {last.get(slot)}")
        self.repeated += max(0, min(end, self.next[slot]) - first) // slots
        self.next[slot] = max(end, self.next[slot])
        last[slot] = first

    def _fault(self, text: str) -> None:
        self.faults = [*self.faults, text][:_MOST_FAULTS]


@contextmanager
def auditing(slots: int, height: int) -> Iterator[str]:
    """Run the receiver while the context lasts; its address. GET /audit of it is the `Audit`."""
    argv = [sys.executable, "-m", "benchmarks.day_receiver", str(slots), str(height)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            yield f"http://{ADDRESS}:{int(process.stdout.readline())}"
        finally:
            process.terminate()


async def _serve(slots: int, height: int) -> None:
    audit, last = Audit(list(range(slots))), dict[int, int]()

    async def generated(request: web.Request) -> web.Response:
        audit.take(json.loads(await request.read()), height, last)
        return web.Response()

    async def tell(_: web.Request) -> web.Response:
        return web.json_response(asdict(audit))

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/generated", generated)
    app.router.add_get("/audit", tell)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slots", type=int)
    parser.add_argument("height", type=int)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options.slots, options.height))


if __name__ == "__main__":
    main()
