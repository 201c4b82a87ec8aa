# SPDX-License-Identifier: Apache-2.0
"""Requests beside a round get no more than their share, whether their clients wait for the answer or leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from tests.support.fakes.clock import STEP, FakeClock, settle
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from tests.wire.test_phases import VALID, batch
from vllm_poc.wire.messages import API_PREFIX

SHARE, WINDOW_SECONDS, SLICE_SECONDS = 0.25, 0.5, 1 / 64
#: While this long is measured, a share has its window many times.
MEASURED_SECONDS = 4.0
CLIENTS = 20
#: Turns of the event loop from one slice to the next, at most.
TURNS = 50
BESIDE = DISTANCE | {"public_key": "prover", "nonces": VALID, "wait": True, "beside_round": True}
CHAINS = ARTIFACT["params"] | {"decode": True, "max_tokens": 4}
BESIDE_OF_CHAINS = ARTIFACT | {
    "public_key": "prover",
    "params": CHAINS,
    "nonces": VALID[:4],
    "wait": True,
    "beside_round": True,
}
DECODES = {"DECODE_CODEBOOK": "/codebook.pt", "DECODE_RESERVE_BYTES": "100000"}

Client = Callable[[Pod, FakeClock], Awaitable[object]]


@pytest.fixture
def clock() -> FakeClock:
    """What all of the pod goes by."""
    return FakeClock()


async def stays(pod: Pod, _: FakeClock) -> None:
    assert (await pod.post("generate", BESIDE)).status_code == 200


async def judges(pod: Pod, _: FakeClock) -> None:
    assert (await pod.post("validate", batch(VALID))).status_code == 200


async def leaves(pod: Pod, clock: FakeClock) -> None:
    """Ask, and close the connection as soon as a slice is under way, or a little later."""
    await asks_until(pod, BESIDE, clock.sleep(0.02))


async def leaves_late(pod: Pod, clock: FakeClock) -> None:
    await asks_until(pod, BESIDE, clock.sleep(0.05))


async def leaves_chains(pod: Pod, clock: FakeClock) -> None:
    await asks_until(pod, BESIDE_OF_CHAINS, clock.sleep(0.03))


async def asks_until(pod: Pod, body: dict[str, Any], left: Awaitable[None]) -> None:
    """POST generate on a connection that its client closes once ``left`` is over."""
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if not sent:
            await left
            return {"type": "http.disconnect"}
        return sent.pop()

    async def send(_: MutableMapping[str, Any]) -> None:
        """Nobody reads it."""

    scope = {"type": "http", "method": "POST", "path": f"{API_PREFIX}/generate", "query_string": b"", "headers": []}
    await pod.app(scope | {"client": ("127.0.0.1", 1), "root_path": "", "scheme": "http"}, receive, send)


@asynccontextmanager
async def clients(pod: Pod, clock: FakeClock, kinds: list[Client]) -> AsyncIterator[None]:
    """Let clients of these kinds ask, each again and again."""

    async def hammer(kind: Client) -> None:
        for _ in count():
            await kind(pod, clock)

    asking = [asyncio.create_task(hammer(kinds[number % len(kinds)])) for number in range(CLIENTS)]
    yield
    for one in asking:
        assert not one.done() or one.result() is None
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.parametrize(
    "pod_settings", [DECODES | {"REQUEST_SHARE": str(SHARE), "SHARE_WINDOW_SECONDS": str(WINDOW_SECONDS)}]
)
@pytest.mark.parametrize(
    "kinds",
    [[stays], [judges], [leaves], [leaves_late], [leaves_chains], [stays, judges, leaves, leaves_late, leaves_chains]],
    ids=lambda kinds: ", ".join(kind.__name__ for kind in kinds),
)
async def test_requests_beside_a_round_get_no_more_than_their_share(
    pod: Pod, clock: FakeClock, kinds: list[Client]
) -> None:
    pod.engine.seconds_per_batch = SLICE_SECONDS
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    async with clients(pod, clock, kinds):
        began, before = clock.now(), calls(pod)
        while clock.now() < began + MEASURED_SECONDS:
            clock.advance(STEP)
            await settle(TURNS)
        asked, rounds = ((now - then) * SLICE_SECONDS for now, then in zip(calls(pod), before, strict=True))
    window = SLICE_SECONDS / WINDOW_SECONDS  # a slice begins as soon as there is less than the share
    assert asked / MEASURED_SECONDS <= SHARE + window, f"requests got {asked / MEASURED_SECONDS:.0%}"
    assert asked > 0
    assert rounds / MEASURED_SECONDS >= 0.9 * (1 - SHARE - window), f"the round got {rounds / MEASURED_SECONDS:.0%}"


@pytest.mark.parametrize("pod_settings", [DECODES | {"REQUEST_SHARE": str(SHARE), "SHARE_WINDOW_SECONDS": "0.125"}])
async def test_vectors_without_end_leave_chains_half_of_the_share(pod: Pod, clock: FakeClock) -> None:
    """A batch of chains is longer than the window, and rests behind itself."""
    pod.engine.seconds_per_batch = SLICE_SECONDS
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    done = 0

    async def chains() -> None:
        nonlocal done
        while True:
            assert (await pod.post("generate", BESIDE_OF_CHAINS)).status_code == 200
            done += 1

    asking = asyncio.create_task(chains())
    async with clients(pod, clock, [stays]):
        began = clock.now()
        while clock.now() < began + 2 * MEASURED_SECONDS:
            clock.advance(STEP)
            await settle(TURNS)
    asking.cancel()
    await asyncio.wait([asking])
    alone = 2 * MEASURED_SECONDS * SHARE / (5 * SLICE_SECONDS)  # a batch has five calls
    assert done >= alone / 3, f"{done} batches, and {alone:.0f} without vectors"


def calls(pod: Pod) -> tuple[int, int]:
    """Return how many calls the workers have answered: of requests, and of the round."""
    keys = [call["public_key"] for call in (*pod.engine.batches, *pod.engine.decode_calls)]
    return keys.count("prover"), len(keys) - keys.count("prover")
