# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallel: the same results, and a rank that fails holds nobody up for ever."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.error import URLError

import pytest

from tests.support.builders.batches import a_batch
from tests.vllm.client import ROUND
from tests.vllm.device import (
    ARTIFACT_TOLERANCE,
    BATCH_TOLERANCE,
    DISTANCE_TOLERANCE,
    LAYOUTS,
    ON_GPU,
    PARALLEL_ENVIRONMENT,
    WHY_NOT_PARALLEL,
)
from tests.vllm.server import serving
from tests.vllm.test_chat import PROMPTS, answers, poc_running
from vllm_poc.rpc import BatchRequest, DecodeRequest, DecodeResult, DecodeSetup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.fakes.receiver import Receiver
    from tests.vllm.client import Client
    from tests.vllm.reference import Reference

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytestmark = pytest.mark.skipif(WHY_NOT_PARALLEL is not None, reason=str(WHY_NOT_PARALLEL))

NONCES = [0, 1, 5, 2**31 - 1]
#: Enough for the coordinates that the decode scheme picks.
HIDDEN = 320
CHAIN_TOKENS, CHAIN_STEPS = 24, 4
SETUP = DecodeSetup(codebook=None, rebuild=True, reserve_bytes=64 * 2**20)
FLAGS = ["--worker-extension-cls", "tests.vllm.faults.FaultExtension"]
FLAGS += [] if ON_GPU else ["--enforce-eager"]
FLAGS += ["--middleware", "vllm_poc.server.app.PocMiddleware"]
#: The first call compiles kernels on a GPU.
ENGINE_SECONDS = 30 if ON_GPU else 10


@pytest.fixture(scope="module")
def model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with more than one layer for each stage of a pipeline."""
    from tests.vllm.resized import write_resized  # noqa: PLC0415 - needs transformers

    folder = tmp_path_factory.mktemp("model") / "qwen3"
    write_resized(model_folder / "qwen3-tiny", folder, hidden=HIDDEN, layers=5)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def parallel(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """That model on two ranks."""
    log = tmp_path_factory.mktemp(request.param) / "server.log"
    environment = PARALLEL_ENVIRONMENT | {
        "VLLM_POC_ENGINE_SECONDS": str(ENGINE_SECONDS),
        # So that the status can be read after a worker's death.
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",
    }
    with serving(model, log, [*FLAGS, *LAYOUTS[request.param]], environment) as client:
        yield client


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    from tests.vllm.reference import Reference  # noqa: PLC0415 - needs transformers

    return Reference(model)


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


def a_slice(protocol: str, nonces: list[int], ahead: list[list[int]] | None = None, *, batch: int = 2) -> BatchRequest:
    """Ask for a slice of a round that is nobody's, in forward passes of ``batch`` nonces."""
    return a_batch(nonces, seq_len=17, protocol=protocol, batch=batch, ahead=ahead or [], strong_rng=True)


def slices(first: int, count: int) -> list[list[int]]:
    """Return the nonces of so many slices from ``first`` on."""
    return [list(range(start, start + 8)) for start in range(first, first + 8 * count, 8)]


def computed(client: Client, protocol: str, first: int, ahead: int = 0, *, batch: int = 2) -> tuple[Any, int]:
    """Return the answer to a slice that others follow, and how many calls it took."""
    nonces, *following = slices(first, 1 + ahead)
    return client.computed(a_slice(protocol, nonces, following, batch=batch))


@pytest.mark.parametrize("protocol", ["artifact", "distance"])
def test_slices_that_are_begun_ahead_give_the_same_bits(parallel: Client, protocol: str) -> None:
    stages = parallel.workers("poc_describe")[0]["stages"]
    timing = answer(parallel, "poc_warm_up", a_slice(protocol, [0, 1]), 1.0)
    assert timing["seconds"] > 0
    alone = [computed(parallel, protocol, first) for first in (0, 8, 16, 24)]
    assert [found["nonces"] for found, _ in alone] == slices(0, 4)
    assert {calls for _, calls in alone} == {stages}
    begun = [computed(parallel, protocol, first, stages) for first in (0, 8, 16, 24)]
    assert [found for found, _ in begun] == [found for found, _ in alone]
    assert [calls for _, calls in begun] == [stages, 1, 1, 1], "what follows was on its way"
    assert computed(parallel, protocol, 8) == alone[1], "32 to 39 were begun, and nobody asks for them"


@pytest.mark.skipif(ON_GPU, reason="on a GPU tests/gpu/test_fused.py does this with CUDA graphs")
@pytest.mark.parametrize("protocol", ["artifact", "distance"])
def test_passes_in_segments_go_through_all_stages(parallel: Client, protocol: str) -> None:
    stages = parallel.workers("poc_describe")[0]["stages"]
    alone = [computed(parallel, protocol, first, batch=8)[0] for first in (0, 8, 16, 24)]
    parallel.workers("poc_test_replay")
    asked = a_slice(protocol, slices(0, 1)[0])
    segments = answer(parallel, "poc_warm_up", asked, 1e-9)["segments"]
    assert segments == (2 if stages > 1 else 5), "as many as the shortest stage has layers"
    assert computed(parallel, protocol, 0, batch=8) == (alone[0], segments * stages)
    begun = [computed(parallel, protocol, first, stages, batch=8) for first in (0, 8, 16, 24)]
    assert [found for found, _ in begun] == alone
    assert [calls for _, calls in begun] == [segments * stages, segments, segments, segments]
    other, _ = parallel.computed(a_slice(protocol, [5, 6], batch=8))  # fewer than what is captured
    assert other["nonces"] == [5, 6]
    assert computed(parallel, protocol, 16, stages, batch=8) == (alone[2], segments * stages)
    parallel.workers("poc_test_anew")


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


def test_the_parity_check_runs_through_all_ranks(parallel: Client) -> None:
    stages = parallel.workers("poc_describe")[0]["stages"]
    first, last = parallel.workers("poc_test_parity", None)
    assert len(last) >= 3, "two lengths, and one beyond a block"
    assert {hidden for _, hidden in last} == {HIDDEN}
    assert first == (last if stages == 1 else [])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_the_parity_check_ends_it_for_all(parallel: Client, failing: int) -> None:
    assert parallel.workers("poc_test_parity", failing) == [None, None]
    assert len(parallel.artifacts(NONCES)) == len(NONCES)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_lacks_memory_in_a_warm_up_ends_it_for_all_and_no_more(parallel: Client, lacking: int) -> None:
    """In the middle of a forward pass, where the other rank would wait within a collective."""
    parallel.workers("poc_test_anew")
    assert {facts["refusal"] for facts in parallel.workers("poc_describe")} == {None}
    parallel.workers("poc_test_lack_memory", lacking)
    timing = answer(parallel, "poc_warm_up", a_slice("artifact", [0, 1]), 1.0)
    assert timing == {"seconds": None, "segments": 1}
    parallel.start()
    assert "start vLLM with a lower --gpu-memory-utilization" in failed(parallel, 10)["error"]
    parallel.workers("poc_test_lack_memory", None)
    assert parallel.is_healthy()
    assert len(parallel.artifacts(NONCES)) == len(NONCES)


def test_a_larger_batch_than_one_rank_has_memory_for_is_halved(parallel: Client) -> None:
    expected = parallel.artifacts(NONCES, seq_len=33)
    parallel.workers("poc_test_anew")
    parallel.workers("poc_describe")
    parallel.workers("poc_test_lack_memory", 1, 2 * 33)
    found = torch.tensor(parallel.artifacts(NONCES, seq_len=33))
    torch.testing.assert_close(found, torch.tensor(expected), atol=BATCH_TOLERANCE, rtol=0)
    parallel.workers("poc_test_lack_memory", None)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_lacks_memory_at_the_start_keeps_poc_back_until_it_has_some(parallel: Client, lacking: int) -> None:
    parallel.workers("poc_test_anew")
    parallel.workers("poc_test_lack_memory", lacking)
    errors = {found["error"] for found in parallel.workers("poc_describe")}
    assert len(errors) == 1
    assert "MemoryError: the GPU has no room for PoC's small batches: start vLLM with a lower" in errors.pop()
    parallel.workers("poc_test_lack_memory", None)
    assert {facts["refusal"] for facts in parallel.workers("poc_describe")} == {None}
    assert len(parallel.artifacts(NONCES)) == len(NONCES)


def decodes(client: Client) -> bool:
    """Prepare the decode scheme, and say whether it runs here: a pipeline is refused, with what to do."""
    refusals = {facts["refusal"] for facts in client.workers("poc_prepare_decode", SETUP)}
    if client.workers("poc_describe")[0]["stages"] > 1:
        assert all("without --pipeline-parallel-size" in str(refusal) for refusal in refusals)
        return False
    assert refusals == {None}
    return True


def chains(nonces: list[int]) -> DecodeRequest:
    """Ask for whole chains in one call."""
    return DecodeRequest(
        block_hash=str(ROUND["block_hash"]),
        public_key=str(ROUND["public_key"]),
        nonces=nonces,
        seq_len=CHAIN_TOKENS,
        max_tokens=CHAIN_STEPS,
        forced=[],
        parts=len(nonces) + CHAIN_STEPS,
        cuts={"prefill": 1, "step": 1, "graph": 1},
    )


def whole(parallel: Client, request: DecodeRequest) -> DecodeResult:
    """Compute the chains to their end: a call does passes of one kind."""
    while not (found := answer(parallel, "poc_decode", request)).get("complete"):
        assert "error" not in found, found
    return cast("DecodeResult", found)


def test_chains_are_those_of_another_implementation(parallel: Client, model: Path) -> None:
    from tests.vllm.decode_reference import DecodeReference  # noqa: PLC0415 - needs transformers

    if not decodes(parallel):
        return
    found = whole(parallel, chains(NONCES))["indices"]
    assert whole(parallel, chains(NONCES))["indices"] == found
    if not ON_GPU:  # where rounding is another one
        reference = DecodeReference(model)
        assert found == [reference.chain(nonce, CHAIN_TOKENS, CHAIN_STEPS).points for nonce in NONCES]


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_lacks_memory_for_chains_ends_no_other(parallel: Client, lacking: int) -> None:
    """It runs out of it where the other one would wait within a collective. Fewer chains are computed then."""
    if not decodes(parallel):
        return
    expected = whole(parallel, chains(NONCES))["indices"]
    assert decodes(parallel), "what ran before needs no dry run"
    parallel.workers("poc_test_lack_memory", lacking, 2 * CHAIN_TOKENS)
    errors = {found["error"] for found in parallel.workers("poc_decode", chains(NONCES))}
    assert len(errors) == 1
    assert "MemoryError: the GPU has no room for 4 chains at a time" in errors.pop()
    assert whole(parallel, chains(NONCES[:2]))["indices"] == expected[:2]
    parallel.workers("poc_test_lack_memory", None)
    assert whole(parallel, chains(NONCES))["indices"] == expected
    assert parallel.is_healthy()


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_lacks_memory_in_the_trial_of_chains_ends_no_other(parallel: Client, lacking: int) -> None:
    if not decodes(parallel):
        return
    parallel.workers("poc_test_lack_memory", lacking)
    errors = [found["error"] for found in parallel.workers("poc_prepare_decode", SETUP)]
    assert all(error.startswith("MemoryError: the GPU has no room for 2 chains at a time") for error in errors)
    parallel.workers("poc_test_lack_memory", None)
    assert parallel.is_healthy()
    assert decodes(parallel)


def test_a_lack_of_memory_that_all_ranks_know_of_fails_the_round_and_no_more(parallel: Client) -> None:
    parallel.workers("poc_test_memory_fits", False)
    parallel.start()
    assert "start vLLM with a lower --gpu-memory-utilization" in failed(parallel, 10)["error"]
    parallel.workers("poc_test_anew")
    assert parallel.is_healthy()
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
    assert failed(parallel, 30)["error"].startswith(("poc_compute", "poc_warm_up"))
    assert ended(parallel, 30), "vLLM must notice that a worker died"
