# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash in its real shape, a few layers of it: results, batches, memory and chat."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm import LLM

torch = pytest.importorskip("torch", reason="needs the worker environment")

from tests.gpu.conftest import WHOLE  # noqa: E402
from tests.support.builders.batches import a_batch  # noqa: E402
from tests.vllm.device import ON_GPU  # noqa: E402
from tests.vllm.engine_answer import TRIES  # noqa: E402
from vllm_poc.wire.artifacts import decode_vector  # noqa: E402

SHAPE, LAYERS = "glm-5.3-flash", 4
SEQ_LEN, NONCES, BATCH = 1024, 16, 8
PROMPT = list(range(1000, 1900))
#: Long enough for latent attention to take it for a prompt, and short enough to have no token twice for most nonces.
PROMPT_LEN = 300
BATCHES = 100
#: L2 distance of two artifacts, which have length 1. Random weights send a token to other experts for a last bit.
MEAN_DISTANCE = 0.02
#: Relative distance of what a layer makes of the same input.
LAYER_DISTANCE = 1e-3


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    """The model with weights of sensible size and the flags that the network asks for, in this process."""
    if not ON_GPU:
        pytest.skip("needs a CUDA device")
    from benchmarks.gpu import options_of, served  # noqa: PLC0415 - needs vLLM

    arguments = ["--shape", SHAPE, "--layers", str(LAYERS), "--memory", "0.4", "--sequences", "256", "--as-served"]
    options = options_of(None).parse_args(arguments)
    model, _ = served(options, extension="tests.gpu.engine.ComparingExtension")
    asked(model, "poc_bench_weights")
    yield model
    model.llm_engine.engine_core.shutdown()


def asked(model: LLM, method: str, *args: object) -> Any:  # noqa: ANN401 - each method has its own answer
    from benchmarks.gpu_pod import call  # noqa: PLC0415 - needs vLLM

    return call(model, method, *args)


def artifacts(model: LLM, nonces: range, batch: int) -> list[str]:
    from benchmarks.gpu_pod import in_calls  # noqa: PLC0415 - needs vLLM

    *_, (_, found) = in_calls(model, a_batch(nonces, seq_len=SEQ_LEN, batch=batch))
    assert found["not_finite"] == []
    return list(found["vectors"])


def test_the_fused_pass_is_used(model: LLM) -> None:
    from benchmarks.gpu_pod import described  # noqa: PLC0415 - needs vLLM

    facts = described(model)
    assert facts["refusal"] is None
    assert facts["fused"]
    assert "Glm5NextLinearAttention" in facts["attention"]


def test_a_nonce_is_what_the_engine_makes_of_its_prompt(model: LLM) -> None:
    """vLLM's own pass, of a single nonce: then kernels split their sums as for the prompt."""
    own = a_batch([0], seq_len=PROMPT_LEN)
    nonce, prompt = prompt_of_a_nonce(model, own["block_hash"], own["public_key"])
    answer(model, prompt, tokens=1)
    expected = torch.tensor(asked(model, "poc_test_answer", own["block_hash"], own["public_key"], nonce, own["k_dim"]))
    found = asked(model, "poc_test_own", own | {"nonces": [nonce]})
    other = asked(model, "poc_test_own", own | {"nonces": [nonce + 1]})
    near, far = (
        float((torch.tensor(decode_vector(result["vectors"][0], own["k_dim"])) - expected).norm())
        for result in (found, other)
    )
    assert near <= MEAN_DISTANCE
    assert far >= 10 * MEAN_DISTANCE


def test_layers_make_what_vllms_make_in_any_batch(model: LLM) -> None:
    found = asked(model, "poc_bench_layers", a_batch(range(BATCH), seq_len=SEQ_LEN))
    alone, own = found["fused, nonce by nonce, from all at once"], found["fused from vLLM's own, layer by layer"]
    assert len(alone) == len(own) == LAYERS
    for layers in (alone, own):
        assert max(error for layer in layers for error, _ in layer.values()) <= LAYER_DISTANCE, layers


def test_artifacts_are_nearer_to_vllms_than_its_own_in_other_batches(model: LLM) -> None:
    from benchmarks.gpu_equality import equality  # noqa: PLC0415 - needs vLLM

    found = equality(model, SEQ_LEN, BATCH, NONCES)
    assert found["kernels"]["mean"] <= max(MEAN_DISTANCE, found["kernels_itself"]["mean"] / 2), found
    assert found["halved"]["largest"] == 0


def test_a_nonce_has_the_same_bits_in_any_batch(model: LLM) -> None:
    nonces = range(NONCES)
    together = artifacts(model, nonces, BATCH)
    assert artifacts(model, nonces, 1) == together
    assert artifacts(model, nonces, 3) == together
    assert asked(model, "poc_warm_up", a_batch(range(BATCH), seq_len=SEQ_LEN), WHOLE)["seconds"] > 0
    assert artifacts(model, nonces, BATCH) == together
    assert artifacts(model, range(5, NONCES), BATCH) == together[5:]
    asked(model, "poc_warm_up", a_batch(range(BATCH), seq_len=SEQ_LEN), 1e-4)
    assert artifacts(model, nonces, BATCH) == together


def test_chats_caches_stay_as_they_are(model: LLM) -> None:
    before, sums = answer(model), asked(model, "poc_test_cache_sums")
    together = artifacts(model, range(NONCES), BATCH)
    assert asked(model, "poc_test_cache_sums") == sums
    assert answer(model) == before
    assert artifacts(model, range(NONCES), BATCH) == together


def test_memory_stays_flat(model: LLM) -> None:
    artifacts(model, range(NONCES), BATCH)
    before = asked(model, "poc_test_memory")
    artifacts(model, range(BATCHES * BATCH), BATCH)
    after = asked(model, "poc_test_memory")
    assert (after["reserved"], after["free"]) == (before["reserved"], before["free"])


def prompt_of_a_nonce(model: LLM, block_hash: str, public_key: str) -> tuple[int, list[int]]:
    """Return the first nonce without a token that occurs twice, as a prompt."""
    for nonce in range(TRIES):
        with suppress(Exception):  # vLLM has but one for all that a worker raises
            return nonce, asked(model, "poc_test_prompt", block_hash, public_key, nonce, PROMPT_LEN)
    raise AssertionError(f"no nonce has {PROMPT_LEN} different tokens, or the worker's log says what failed")


def answer(model: LLM, prompt: Sequence[int] = PROMPT, tokens: int = 16) -> list[int]:
    """Return what the model says to a prompt."""
    from vllm import SamplingParams  # noqa: PLC0415 - needs vLLM

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    (found,) = model.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
    return list(found.outputs[0].token_ids)
