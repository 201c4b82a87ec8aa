# SPDX-License-Identifier: Apache-2.0
"""Requests with 100 000 nonces are handled in pieces, so that chat's streams, which share the event loop, go on.

How long a piece may take is measured on the same machine: less than it takes to read such a request at once. On an
idle machine STALL_SECONDS=0.02 asks for that time instead.
"""

import asyncio
import gc
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import process_time
from typing import Any

import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.engine import vector
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from vllm_poc.server.bodies import decode, parse, write, written
from vllm_poc.server.errors import InvalidBodyError
from vllm_poc.wire.artifacts import Artifact, Encoding
from vllm_poc.wire.callbacks import GeneratedArtifacts
from vllm_poc.wire.generate import MAX_REQUEST_NONCES, GenerateRequest
from vllm_poc.wire.messages import API_PREFIX

log = logging.getLogger(__name__)

#: The best of so many tries counts: a collection of all that the tests have made takes long, too, and a busy machine
#: may let the event loop wait for a core while the thread beside it computes.
TRIES = 12
NONCES = list(range(MAX_REQUEST_NONCES))
PROOF_OF: dict[str, Any] = {"public_key": "p", "block_hash": "o", "block_height": 1}
PROOF = PROOF_OF | {"nonces": NONCES, "dist": [1.4] * len(NONCES)}
CLAIMS = [{"nonce": nonce, "vector_b64": vector(nonce, 4)} for nonce in NONCES]
BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "validate": ("validate", PROOF, 200),
    "artifacts": ("generate", ARTIFACT | {"nonces": NONCES, "wait": True}, 200),
    "distances": ("generate", DISTANCE | {"nonces": NONCES, "wait": True}, 200),
    "verdict": ("generate", ARTIFACT | {"nonces": NONCES, "wait": True, "validation": {"artifacts": CLAIMS}}, 200),
    "wrong at the end": ("generate", DISTANCE | {"nonces": [*NONCES[:-1], True], "wait": True}, 422),
}


def longest_seconds() -> float:
    """Return how long a piece may take on this machine, as busy as it is now (30 to 45 ms on a common one)."""
    if "STALL_SECONDS" in os.environ:
        return float(os.environ["STALL_SECONDS"])
    body, took = json.dumps(DISTANCE | {"nonces": NONCES}), list[float]()
    for _ in range(3):
        began = process_time()
        GenerateRequest.model_validate_json(body)
        took.append(process_time() - began)
    return min(took)


@contextmanager
def unlooked() -> Iterator[None]:
    """Let garbage collection not look through what the process has so far, as in vLLM's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def pod(pod: Pod) -> Iterator[Pod]:
    """A pod whose slices are large and take no time."""
    pod.engine.facts["max_batch_nonces"], pod.engine.facts["max_batch_tokens"] = 250, 10**6
    pod.engine.seconds_per_batch = 0
    with unlooked():
        yield pod


class Longest:
    """The longest time that this process computed without letting others in."""

    seconds = 0.0


@asynccontextmanager
async def watched() -> AsyncIterator[Longest]:
    """Measure in CPU time of this process, which the machine's other work does not add to."""
    longest = Longest()

    async def watch() -> None:
        last = process_time()
        while True:
            await asyncio.sleep(0.0005)
            now = process_time()
            longest.seconds, last = max(longest.seconds, now - last), now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    longest.seconds = 0.0
    yield longest
    await asyncio.sleep(0.005)  # what came last is measured, too
    watching.cancel()


@pytest.mark.parametrize("name", BODIES)
async def test_a_large_request_holds_nobody_up(pod: Pod, name: str) -> None:
    route, body, status = BODIES[name]
    await pod.post("init/validate", DISTANCE | SLOT)
    content = json.dumps(body | {"batch_size": 250}).encode()
    found = []
    for _ in range(TRIES):
        async with watched() as longest:
            answer = await pod.http.post(f"{API_PREFIX}/{route}", content=content, timeout=60)
        assert answer.status_code == status, answer.text[:200]
        found.append(longest.seconds)
        log.info("%s: %.1f ms", name, 1000 * longest.seconds)
        if longest.seconds < longest_seconds():
            return
    raise AssertionError(f"longest stalls of {TRIES} tries: {found}")


async def test_callbacks_of_a_large_request_hold_nobody_up(pod: Pod, receiver: CallbackReceiver) -> None:
    content = json.dumps(ARTIFACT | {"nonces": NONCES, "url": receiver.url, "batch_size": 250}).encode()
    found = []
    for _ in range(TRIES):
        receiver.payloads.clear()
        async with watched() as longest:
            answer = await pod.http.post(f"{API_PREFIX}/generate", content=content, timeout=60)
            assert answer.status_code == 200
            while len(receiver.nonces) < len(NONCES):  # noqa: ASYNC110 - the receiver has no event
                await asyncio.sleep(0.1)
        found.append(longest.seconds)
        if longest.seconds < 2 * longest_seconds():  # the receiver, of this process too, parses 5 000 results at once
            return
    raise AssertionError(f"longest stalls of {TRIES} tries: {found}")


async def test_kept_results_of_a_large_request_hold_nobody_up(pod: Pod) -> None:
    answer = await pod.post("generate", ARTIFACT | {"nonces": NONCES, "batch_size": 250})
    kept, found = f"{API_PREFIX}/generate/{answer.json()['request_id']}", []
    while (await pod.http.get(kept, timeout=60)).json()["status"] != "completed":  # noqa: ASYNC110 - a job has no event
        await asyncio.sleep(0.5)
    for _ in range(TRIES):
        async with watched() as longest:
            answer = await pod.http.get(kept, timeout=60)
        assert len(answer.content) > 20 * len(NONCES)
        found.append(longest.seconds)
        if longest.seconds < longest_seconds():
            return
    raise AssertionError(f"longest stalls of {TRIES} tries: {found}")


@pytest.mark.parametrize("k_dim", [12, 1_024, 5_120])
async def test_results_of_any_length_are_written_beside_others(k_dim: int) -> None:
    encoding = Encoding(k_dim=k_dim)
    artifacts = [Artifact(nonce=nonce, vector_b64="A" * (8 * k_dim // 3)) for nonce in range(5_000)]
    message = GeneratedArtifacts(**PROOF_OF, node_id=1, artifacts=artifacts, encoding=encoding)
    found = []
    with unlooked():
        for _ in range(TRIES):
            async with watched() as longest:
                body = await written(message)
            assert json.loads(body) == message.model_dump(mode="json", exclude_none=True)
            found.append(longest.seconds)
            if longest.seconds < longest_seconds():
                return
    raise AssertionError(f"longest stalls of {TRIES} tries: {found}")


@pytest.mark.parametrize(
    "text",
    ['{"a": [1, {"b": [2.5, "x"]}], "c": {"d": [null, true]}, "e": "\\u00e9"}', " [1, 2] ", '"x"', "{}", "[]", "-1e5"],
)
def test_large_bodies_are_read_as_all_others(text: str) -> None:
    assert decode(text.encode()) == json.loads(text)


@pytest.mark.parametrize("text", ["", " ", "{", "[1,", '{"a" 1}', '{"a": }', "1 2", "[1] x", '{"a": [1}'])
def test_what_is_no_json_is_refused_at_the_same_place(text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    with pytest.raises(json.JSONDecodeError) as found:
        decode(text.encode())
    assert (found.value.msg, found.value.pos) == (expected.value.msg, expected.value.pos)


def test_what_is_wrong_with_a_large_body_is_located_as_always() -> None:
    body = json.dumps(DISTANCE | {"nonces": [1, -1]}).encode()
    with pytest.raises(InvalidBodyError) as found:
        parse(GenerateRequest, body)
    assert [entry["loc"] for entry in found.value.errors] == [("body", "nonces", 1)]


def test_large_answers_are_written_as_all_others() -> None:
    request = GenerateRequest.model_validate(DISTANCE | {"nonces": NONCES[:5000], "wait": True})
    assert json.loads(write(request)) == request.model_dump(mode="json", exclude_none=True)
