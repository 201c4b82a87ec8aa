# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallel: the same results, and a rank that fails holds nobody up for ever."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

import pytest

from tests.vllm.device import (
    ARTIFACT_TOLERANCE,
    DISTANCE_TOLERANCE,
    LAYOUTS,
    ON_GPU,
    PARALLEL_ENVIRONMENT,
    WHY_NOT_PARALLEL,
)
from tests.vllm.server import serving
from tests.vllm.test_chat import PROMPTS, answers, poc_running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.receiver import Receiver
    from tests.vllm.client import Client
    from tests.vllm.reference import Reference

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytestmark = pytest.mark.skipif(WHY_NOT_PARALLEL is not None, reason=str(WHY_NOT_PARALLEL))

NONCES = [0, 1, 5, 2**31 - 1]
FLAGS = ["--worker-extension-cls", "tests.vllm.faults.FaultExtension"]
FLAGS += [] if ON_GPU else ["--enforce-eager"]
FLAGS += ["--middleware", "vllm_poc.server.middleware.PocMiddleware"]
#: The first call compiles kernels on a GPU.
ENGINE_SECONDS = 30 if ON_GPU else 5
#: Four forward passes of a round that is nobody's.
SLICE = {
    "block_hash": "b10c",
    "public_key": "key",
    "seq_len": 17,
    "k_dim": 12,
    "strong_rng": True,
    "layer_hooks": True,
    "sign_flips": False,
    "batch": 2,
    "part": 0,
}


@pytest.fixture(scope="module", params=LAYOUTS)
def parallel(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """Qwen3 on two ranks."""
    log = tmp_path_factory.mktemp(request.param) / "server.log"
    environment = PARALLEL_ENVIRONMENT | {
        "VLLM_POC_ENGINE_SECONDS": str(ENGINE_SECONDS),
        # So that the status can be read after a worker's death.
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",
    }
    with serving(model_folder / "qwen3-tiny", log, [*FLAGS, *LAYOUTS[request.param]], environment) as client:
        yield client


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Reference:
    from tests.vllm.reference import Reference  # noqa: PLC0415 - needs transformers

    return Reference(model_folder / "qwen3-tiny")


def failed(client: Client, seconds: float) -> Any:  # noqa: ANN401
    """Return the status once it is FAILED; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(URLError):
            status = client.status()
            if status["state"] == "FAILED":
                return status
        time.sleep(0.2)
    raise AssertionError(f"not FAILED after {seconds} s")


def ended(client: Client, seconds: float) -> bool:
    """Whether the engine is reported dead within ``seconds``."""
    end = time.monotonic() + seconds
    while client.is_healthy() and time.monotonic() < end:
        time.sleep(0.2)
    return not client.is_healthy()


@pytest.mark.parametrize("seq_len", [17, 64])
def test_two_ranks_compute_what_one_does(parallel: Client, reference: Reference, seq_len: int) -> None:
    inputs = reference.inputs(NONCES, seq_len)
    artifacts = torch.tensor(parallel.artifacts(NONCES, seq_len=seq_len))
    expected = reference.artifacts(inputs, NONCES)
    torch.testing.assert_close(artifacts, expected, atol=ARTIFACT_TOLERANCE, rtol=0)
    distances = torch.tensor(parallel.distances(NONCES, seq_len=seq_len))
    expected = reference.distances(reference.inputs(NONCES, seq_len), NONCES)
    torch.testing.assert_close(distances, expected, atol=DISTANCE_TOLERANCE, rtol=0)


def answer(client: Client, method: str, *args: object) -> Any:  # noqa: ANN401
    """Return the answer of the rank that has one; those that have must agree."""
    found = [found for found in client.workers(method, *args) if found is not None]
    assert "error" not in found[0], found
    assert all(other == found[0] for other in found)
    return found[0]


@pytest.mark.parametrize("protocol", ["artifact", "distance"])
def test_slices_that_are_begun_ahead_give_the_same_bits(parallel: Client, protocol: str) -> None:
    def asked(first: int, ahead: range = range(0)) -> dict[str, Any]:
        return {**SLICE, "protocol": protocol, "nonces": list(range(first, first + 8)), "ahead": list(ahead)}

    rehearsal = answer(parallel, "poc_rehearse", asked(0) | {"nonces": [0, 1]}, 1.0)
    assert rehearsal["seconds"] > 0
    alone = [answer(parallel, "poc_compute", asked(first)) for first in (0, 8, 16)]
    assert [found["nonces"] for found in alone] == [list(range(first, first + 8)) for first in (0, 8, 16)]
    begun = [answer(parallel, "poc_compute", asked(first, range(first + 8, first + 16))) for first in (0, 8, 16)]
    assert begun == alone
    assert answer(parallel, "poc_compute", asked(8)) == alone[1], "24 to 31 were begun, and nobody asks for them"


@pytest.mark.skipif(not ON_GPU, reason="on CPU vLLM's own chat does not work with two ranks")
def test_chat_beside_poc_keeps_its_tokens_and_its_cache(parallel: Client) -> None:
    before = answers(parallel)
    with poc_running(parallel):
        assert answers(parallel) == before
    filled = parallel.workers("poc_test_kv_checksum")
    parallel.artifacts(range(40), seq_len=130, batch_size=8)
    assert parallel.workers("poc_test_kv_checksum") == filled
    parallel.chat(PROMPTS[2][::-1])
    now = parallel.workers("poc_test_kv_checksum")
    assert all(new != old for new, old in zip(now, filled, strict=True)), "the checksum must see chat's writes"


def test_all_ranks_hold_a_scratch_if_they_need_one(parallel: Client) -> None:
    assert all(facts["fused"] or facts["scratch_bytes"] > 0 for facts in parallel.workers("poc_describe"))


def test_a_round_delivers_every_nonce_once(parallel: Client, receiver: Receiver) -> None:
    parallel.start(url=receiver.url)
    assert receiver.wait_for(2)
    parallel.stop()
    nonces = [artifact["nonce"] for body in receiver.bodies for artifact in body["artifacts"]]
    assert nonces == list(range(len(nonces)))


def test_a_trial_runs_through_all_ranks(parallel: Client) -> None:
    shapes = [[4, 128], [4, 128]]  # of the last hidden states
    stages = parallel.workers("poc_describe")[0]["stages"]
    assert parallel.workers("poc_test_trial", None) == [shapes if stages == 1 else [], shapes]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_stage_that_fails_in_a_trial_ends_it_for_all(parallel: Client, failing: int) -> None:
    if parallel.workers("poc_describe")[0]["stages"] == 1:
        pytest.skip("with tensor parallelism, a rank that fails alone ends the server")
    assert parallel.workers("poc_test_trial", failing) == [None, None]
    assert len(parallel.artifacts(NONCES)) == len(NONCES)


def test_a_rank_that_cannot_prepare_fails_the_round_and_harms_no_other(parallel: Client) -> None:
    parallel.workers("poc_test_break_scratch", 1)
    parallel.start()
    error = failed(parallel, 10)["error"]
    assert "MemoryError: no memory on this rank" in error
    assert "OtherRankError" in error
    parallel.workers("poc_test_break_scratch", None)
    assert len(parallel.artifacts(NONCES)) == len(NONCES)


def test_a_rank_that_hangs_fails_the_round_in_time(parallel: Client) -> None:
    process = int(parallel.workers("poc_test_process")[1])
    parallel.start()
    os.kill(process, signal.SIGSTOP)
    try:
        assert f"did not answer within {ENGINE_SECONDS} s" in failed(parallel, ENGINE_SECONDS + 5)["error"]
    finally:
        os.kill(process, signal.SIGCONT)
    assert len(parallel.artifacts(NONCES)) == len(NONCES), "a rank that was only slow goes on"


def test_a_rank_that_fails_between_collectives_ends_the_server(parallel: Client) -> None:
    parallel.workers("poc_test_break_layer", 1)
    parallel.start()
    assert failed(parallel, 30)["error"].startswith(("poc_compute", "poc_rehearse"))
    assert ended(parallel, 30), "vLLM must notice that a worker died"
