# SPDX-License-Identifier: Apache-2.0
"""Requests that a busy engine does not get to are refused in time, and leave nothing behind."""

import asyncio
from time import monotonic
from typing import Any

import pytest

from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from tests.wire.test_decode import DECODE, DECODES, MOST
from tests.wire.test_pauses import REQUESTS, call, nobody_waits
from tests.wire.test_requests import error_of
from vllm_poc.wire.messages import API_PREFIX

BUSY_SECONDS = 0.3
IMPATIENT = {"BUSY_SECONDS": str(BUSY_SECONDS)}
BESIDE = {name: REQUESTS[name] for name in ("beside a round", "validate")}
NONCE = 10**9  # beyond what the round gets to

impatient = pytest.mark.parametrize("pod_settings", [IMPATIENT])


def chat_is_busy(pod: Pod) -> None:
    pod.engine.output_processor.busy = True


def calls_take_long(pod: Pod) -> None:
    pod.engine.seconds_per_batch = 1


@impatient
@pytest.mark.parametrize("make_busy", [chat_is_busy, calls_take_long])
@pytest.mark.parametrize("name", BESIDE)
async def test_a_request_beside_a_round_does_not_wait_for_ever(
    pod: Pod,
    name: str,
    make_busy: Any,  # noqa: ANN401 - pytest's
) -> None:
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    make_busy(pod)
    route, body = BESIDE[name]
    started = monotonic()
    answer = await pod.post(route, body | {"nonces": [NONCE]})
    assert BUSY_SECONDS <= monotonic() - started < BUSY_SECONDS + 5
    error = error_of(answer, 503, "Busy")
    assert error.detail == "the engine has not got to this within 0.3 s, a round runs: ask again later"
    assert int(answer.headers["Retry-After"]) > 0
    await nobody_waits(pod)
    pod.engine.output_processor.busy, pod.engine.seconds_per_batch = False, 0.001
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before + 50)
    # Nothing ends a slice that has begun. Whoever is gone gets no further one.
    assert sum(NONCE in batch["nonces"] for batch in pod.engine.batches) <= (make_busy is calls_take_long)


@pytest.mark.parametrize("pod_settings", [IMPATIENT | {"SLICE_SECONDS": "1"}])
@pytest.mark.parametrize("name", BESIDE)
async def test_a_request_that_is_got_to_is_waited_for(pod: Pod, name: str) -> None:
    """However long all of it takes."""
    await pod.post("init/validate", DISTANCE | SLOT)
    pod.engine.seconds_per_batch = 0.1
    route, body = BESIDE[name]
    many = list(range(16 * 8))
    started = monotonic()
    lists = {"nonces": many, "dist": [1.4] * len(many)} if route == "validate" else {"nonces": many}
    assert (await pod.post(route, body | lists)).status_code == 200
    assert monotonic() - started > 2 * BUSY_SECONDS


@pytest.mark.parametrize("pod_settings", [IMPATIENT | DECODES])
async def test_a_batch_of_chains_that_is_computed_is_waited_for(pod: Pod) -> None:
    """Its steps may take minutes beside chat, and all of them are one slice."""
    pod.engine.seconds_per_batch = BUSY_SECONDS / 4
    started = monotonic()
    answer = await pod.post("generate", DECODE | {"nonces": [1, 2, 3], "wait": True, "beside_round": True})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["artifacts"]) == 3
    assert monotonic() - started > 2 * BUSY_SECONDS


#: A batch of the round takes longer than a client waits for the engine, and so does the rest behind a request's.
SHARED = IMPATIENT | DECODES | {"REQUEST_SHARE": "0.25", "SHARE_WINDOW_SECONDS": "0.1"}


def two_batches(first: int) -> dict[str, Any]:
    """A request for chains of another slot than the round's."""
    return DECODE | {"nonces": list(range(first, first + 6 * 2 * MOST, 6)), "wait": True, "beside_round": True}


@pytest.mark.parametrize("pod_settings", [SHARED])
async def test_chains_beside_a_round_wait_for_their_turn_and_their_share(pod: Pod) -> None:
    """Of both batches: what was computed would be thrown away, and asked for again."""
    pod.engine.seconds_per_batch = BUSY_SECONDS / 6
    await pod.start(DECODE | SLOT)
    await pod.reach(lambda s: s.next_index > 0)
    answer = await pod.post("generate", two_batches(1))
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["artifacts"]) == 2 * MOST


@pytest.mark.parametrize("pod_settings", [SHARED])
async def test_chains_of_two_clients_wait_for_each_other(pod: Pod) -> None:
    """The one for the other's turn, and both for the share that the other has used."""
    pod.engine.seconds_per_batch = BUSY_SECONDS / 12
    await pod.start(DECODE | SLOT)
    await pod.reach(lambda s: s.next_index > 0)

    answers = await asyncio.gather(*(pod.post("generate", two_batches(first)) for first in (1, 1 + 6 * 2 * MOST)))
    assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize("pod_settings", [DECODES])
async def test_busy_chat_takes_no_scheme_away_after_an_update_of_the_weights(pod: Pod) -> None:
    """Clients remember for a minute what a pod does not offer, and a stage of the network takes three."""

    async def schemes() -> list[str]:
        told: list[str] = (await pod.http.get(f"{API_PREFIX}/versions")).json()["schemes"]
        return told

    assert await schemes() == ["prefill", "decode"]
    chat_is_busy(pod)
    await asyncio.sleep(0.05)
    await call(pod, ["/update_weights"])
    assert await schemes() == ["prefill", "decode"]


STARTS: dict[str, tuple[str, Any]] = {
    "init": ("init", DISTANCE | SLOT),
    "init/validate": ("init/validate", DISTANCE | SLOT),
    "phase/generate": ("phase/generate", None),
    "start": ("init/generate", DISTANCE | SLOT | {"round_id": "b"}),
    "queued": ("generate", ARTIFACT | {"nonces": [NONCE]}),
    "validate": BESIDE["validate"],
}


@impatient
@pytest.mark.parametrize("name", STARTS)
async def test_who_needs_the_models_limits_does_not_wait_for_ever(pod: Pod, name: str) -> None:
    """They are not known after new weights, and busy chat holds up the round, whose slice is first."""
    await pod.start(DISTANCE | SLOT | {"round_id": "a"})
    await pod.reach(lambda s: s.total_checked > 0)
    chat_is_busy(pod)
    await asyncio.sleep(0.05)
    await call(pod, ["/update_weights"])
    route, body = STARTS[name]
    started = monotonic()
    answer = await pod.post(route, body)
    assert monotonic() - started < BUSY_SECONDS + 5
    error_of(answer, 503, "Busy")
    assert int(answer.headers["Retry-After"]) > 0
    pod.engine.output_processor.busy = False
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)


@pytest.mark.parametrize("pod_settings", [{"REQUEST_SECONDS": "0.1"}])
async def test_who_waits_for_the_end_of_a_round_is_told_when_to_ask_again(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    pod.engine.seconds_per_batch = 1  # a receiver that falls behind must not let the request in before its limit
    answer = await pod.post("generate", DISTANCE | {"nonces": [NONCE], "wait": True})
    assert "not done within 0.1 s, a round runs" in error_of(answer, 503, "Busy").detail
    assert int(answer.headers["Retry-After"]) > 0
