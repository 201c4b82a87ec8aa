# SPDX-License-Identifier: Apache-2.0
"""Chains of the decode scheme in real shapes: captured or not, beside vLLM's own pass, and beside chat."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.vllm.client import Client
    from vllm import LLM

torch = pytest.importorskip("torch", reason="needs the worker environment")

from tests.vllm.device import ON_GPU, WHY_NOT_PARALLEL  # noqa: E402
from vllm_poc.rpc import DecodeRequest, DecodeSetup  # noqa: E402

_log = logging.getLogger(__name__)

#: Sequences go on from one block into the next ones, and beyond DeepSeek-V4's windows of 128 tokens.
SEQ_LEN, STEPS = 116, 27
NONCES = [*range(20), 2**31 - 1]
TWO = ["--tensor-parallel", "2"]
#: vLLM then does not ask what other processes leave of the GPU, so that several families can be tested at a time.
KV_CACHE = ["--kv-cache-memory-bytes", str(6 * 2**30)]
SETUP = DecodeSetup(codebook=None, rebuild=True, reserve_bytes=3 * 2**30)
#: What rounding to 16 bits, or in an FP8 cache, changes of a margin: on average, and of all but one in a hundred at
#: most half of the network's tau. Where a token is at other experts for a last bit, a margin is further away.
MEAN_MARGIN, MARGIN, OF_ALL = 0.025 / 8, 0.025 / 2, 0.99
#: How many indices may differ from those of another pass: points are near each other in few places.
OTHERS = 0.05
#: How many times as much it may be with GLM-5.3. Its states take sums over 64 tokens in 16 bits in that pass, and those
#: of a single token in 32 bits in a step.
_TIMES = {"glm5_next": 2}
#: Shape, share of the memory, other arguments. Of DeepSeek-V4 layers of all kinds, one of which has a seeded router; of
#: GLM-5.3 one with latent attention and a router behind those with states.
SERVED = {
    "qwen3": ("qwen3-0.6b", "0.3", []),
    "qwen3-fp8-cache": ("qwen3-0.6b", "0.3", ["--layers", "8", "--kv-cache-dtype", "fp8"]),
    "minimax": ("minimax-m2.7", "0.3", ["--layers", "3", "--kv-cache-dtype", "fp8"]),
    "minimax-tp": ("minimax-m2.7", "0.3", ["--layers", "3", "--tensor-parallel", "2"]),
    "deepseek-v4": ("deepseek-v4-flash", "0.4", ["--layers", "5", "--kv-cache-dtype", "fp8"]),
    "deepseek-v4-tp": ("deepseek-v4-flash", "0.3", ["--layers", "5", "--kv-cache-dtype", "fp8", *TWO]),
    "glm-5.3": ("glm-5.3-flash", "0.4", ["--layers", "4", "--as-served"]),
    "glm-5.3-tp": ("glm-5.3-flash", "0.3", ["--layers", "4", "--as-served", *TWO]),
}


def chains_of(
    nonces: Sequence[int],
    forced: Sequence[Sequence[int]] = (),
    *,
    parts: int = 5,
    cut: int = 1,
    segments: int = 1,
) -> DecodeRequest:
    return DecodeRequest(
        block_hash="b10c",
        public_key="key",
        nonces=list(nonces),
        seq_len=SEQ_LEN,
        max_tokens=STEPS,
        forced=[list(claim) for claim in forced],
        parts=parts,
        cuts={"prefill": cut, "step": cut, "graph": segments},
    )


def claims_of(nonces: Sequence[int]) -> list[list[int]]:
    return [[(3 * step + nonce) % 16 for step in range(STEPS + 1)] for nonce in nonces]


@pytest.fixture(scope="module", params=SERVED)
def model(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """The model with weights of sensible size, ready for chains."""
    if not ON_GPU:
        pytest.skip("needs a CUDA device")
    from benchmarks.gpu import options_of, served  # noqa: PLC0415 - needs vLLM
    from benchmarks.gpu_pod import described  # noqa: PLC0415

    shape, memory, arguments = SERVED[request.param]
    if request.param.endswith("-tp") and WHY_NOT_PARALLEL is not None:
        pytest.skip(WHY_NOT_PARALLEL)
    arguments = ["--shape", shape, "--memory", memory, *KV_CACHE, "--sequences", "256", *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process may have used the GPU
        model, _ = served(options_of(None).parse_args(arguments), extension="benchmarks.gpu_worker.MeasuringExtension")
    asked(model, "poc_bench_weights")
    found = described(model)
    assert found["fused"], str(found)
    yield model
    model.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def _prepared(request: pytest.FixtureRequest) -> None:
    if "model" in request.fixturenames:
        assert asked(request.getfixturevalue("model"), "poc_prepare_decode", SETUP)["refusal"] is None


def asked(model: LLM, method: str, *args: object) -> Any:  # noqa: ANN401 - each method has its own answer
    from benchmarks.gpu_pod import call  # noqa: PLC0415 - needs vLLM

    return call(model, method, *args)


def decoded(model: LLM, request: DecodeRequest) -> dict[str, Any]:
    """Repeat the request until it is complete."""
    for _ in range((STEPS + len(request["nonces"])) * max(request["cuts"].values()) + 1):
        answer: dict[str, Any] = asked(model, "poc_decode", request)
        if answer["complete"]:
            return {name: answer[name] for name in ("indices", "margins")}
    raise AssertionError("chains have no end")


def test_fused_steps_give_what_vllms_own_give(model: LLM) -> None:
    """And captured ones what others give: the trial that comes before all chains says so."""
    (finding,) = asked(model, "poc_prepare_decode", SETUP)["findings"]
    assert "they gave what vLLM's own gave" in finding


def test_captured_steps_give_the_same_bits(model: LLM) -> None:
    """Also for other nonces in the same graph, in slices of any length, in parts, and with claims."""
    assert asked(model, "poc_test_captures")
    requests = [
        chains_of(NONCES),
        chains_of([nonce + 100 for nonce in range(len(NONCES))], parts=1),
        chains_of(NONCES, claims_of(NONCES), parts=40),
        chains_of(NONCES[:7], parts=3),
        chains_of(NONCES, parts=1, cut=3, segments=2),
        chains_of(NONCES, claims_of(NONCES), parts=4, cut=2, segments=3),
    ]
    captured = [decoded(model, request) for request in [*requests, *requests]]
    assert captured[: len(requests)] == captured[len(requests) :]
    assert asked(model, "poc_test_steps_one_by_one")
    assert [decoded(model, request) for request in requests] == captured[: len(requests)]
    assert captured[4] == captured[0]
    assert captured[5] == captured[2]
    points = {point for row in captured[0]["indices"] for point in row}
    assert len(points) == 16, "random weights lead everywhere"


def test_chains_are_those_of_one_pass_over_all_tokens(model: LLM) -> None:
    """That pass is vLLM's own, and has neither graphs, nor fused operations, nor keys of steps before in a cache."""
    request = chains_of(NONCES, claims_of(NONCES))
    found, expected = decoded(model, request), asked(model, "poc_test_chains_at_once", request)
    apart = (torch.tensor(found["margins"]) - torch.tensor(expected["margins"])).abs()
    other = (torch.tensor(found["indices"]) != torch.tensor(expected["indices"])).float().mean()
    _log.info("margins: mean %.5f, largest %.5f apart; %.2f %% other indices", apart.mean(), apart.max(), 100 * other)
    half = STEPS // 2
    early, late = apart[:, 1 : half + 1].mean(), apart[:, -half:].mean()
    _log.info("margins: mean %.5f apart in the first half of the steps, %.5f in the second", early, late)
    times = _TIMES.get(model.llm_engine.vllm_config.model_config.hf_config.model_type, 1)
    assert apart.mean() <= times * MEAN_MARGIN
    assert apart.flatten().quantile(OF_ALL) <= times * MARGIN
    assert apart.max() <= 2 * times * MARGIN
    assert other <= times * OTHERS
    assert late <= 2 * early, "what a step leaves behind goes wrong"


@pytest.mark.parametrize("cuts", [1, 3], ids=["between-steps", "within-steps"])
def test_chat_and_prefill_run_beside_chains_and_neither_changes_the_other(model: LLM, cuts: int) -> None:
    from tests.support.builders.batches import a_batch  # noqa: PLC0415

    request, batch = chains_of(NONCES, parts=1, cut=cuts, segments=cuts), a_batch(range(8), seq_len=SEQ_LEN)
    expected = decoded(model, chains_of(NONCES))
    answer(model)  # from now on all of the prompt but its last block comes from the cache
    chat, artifacts = answer(model), asked(model, "poc_compute", batch)
    assert answer(model) == chat, "chat must be repeatable without PoC beside it"
    held = asked(model, "poc_test_held")
    assert decoded(model, request) == expected
    assert asked(model, "poc_test_held") == held
    for _ in range(3 * cuts + 1):
        assert not asked(model, "poc_decode", request)["complete"]
        assert asked(model, "poc_test_held") == held
        assert answer(model) == chat
        held = asked(model, "poc_test_held")
        assert asked(model, "poc_compute", batch) == artifacts
    assert decoded(model, request) == expected
    assert answer(model) == chat


def answer(model: LLM) -> list[int]:
    """Return the greedy answer to a prompt that fills several blocks."""
    from vllm import SamplingParams  # noqa: PLC0415

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (found,) = model.generate([{"prompt_token_ids": list(range(1000, 1100))}], greedy, use_tqdm=False)
    return list(found.outputs[0].token_ids)


@pytest.mark.parametrize("real_client", ["one", "fp8"], indirect=True)
def test_a_server_as_users_start_it_captures_steps_and_chat_keeps_its_tokens(real_client: Client) -> None:
    """Compiled and with CUDA graphs of its own, for which attention's metadata is made in another way."""

    def all_of(request: DecodeRequest) -> dict[str, Any]:
        while not (found := real_client.worker("poc_decode", request)).get("complete"):
            assert "error" not in found, found
        return {name: found[name] for name in ("indices", "margins")}

    chat, request = real_client.chat("Tell me about licenses."), chains_of(NONCES, parts=4)
    assert real_client.worker("poc_prepare_decode", SETUP)["refusal"] is None
    assert real_client.worker("poc_test_captures")
    before = real_client.worker("poc_test_kv_checksum")
    captured = all_of(request)
    assert real_client.worker("poc_test_kv_checksum") == before
    assert not real_client.worker("poc_decode", chains_of(NONCES, parts=10))["complete"]
    assert real_client.chat("Tell me about licenses.") == chat
    assert all_of(request) == captured
    cut = chains_of(NONCES, parts=1, cut=3, segments=2)
    for _ in range(9):
        assert not real_client.worker("poc_decode", cut)["complete"]
        assert real_client.chat("Tell me about licenses.") == chat
    assert all_of(cut) == captured
    assert real_client.worker("poc_test_steps_one_by_one")
    assert all_of(request) == captured
    assert all_of(cut) == captured
