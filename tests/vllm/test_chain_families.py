# SPDX-License-Identifier: Apache-2.0
"""Chains of families whose layers keep states, windows and compressed keys from step to step.

Each chain is compared with one pass of vLLM's own over all of its tokens. That pass has the kernels of a prompt, and
nothing that a step left behind.
"""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import test_deepseek_v4, test_recurrent
from tests.vllm.client import chain_request
from tests.vllm.device import ON_GPU, WHY_NO_STREAMS, older_than
from tests.vllm.server import command_environment, serving
from vllm_poc.rpc import DecodeRequest, DecodeSetup, chain_nonces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.vllm.client import Client

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_chains.py has the real kernels"),
    pytest.mark.skipif(older_than(0, 32), reason="this release of vLLM computes these models on a GPU only"),
    pytest.mark.skipif(WHY_NO_STREAMS is not None, reason=str(WHY_NO_STREAMS)),
]
_log = logging.getLogger(__name__)
NONCES = [0, 5, 2**31 - 1]
#: Chains go on beyond windows of 128 tokens, and beyond what is compressed at 128.
SEQ_LEN, STEPS = 122, 12
#: More parts than these models have layers: each of these is one.
EACH_LAYER = 64
chains_of = partial(chain_request, seq_len=SEQ_LEN, steps=STEPS)
SETUP = DecodeSetup(codebook=None, rebuild=True, reserve_bytes=2**27)
#: What bfloat16 and an FP8 cache change of a margin: on average, and at most half of the network's tau.
MEAN_MARGIN, MARGIN = 0.025 / 8, 0.025 / 2
#: How far margins of chains are apart that have nothing in common.
FAR = 0.025
#: How many indices may differ.
OTHERS = 0.08
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": f"{test_deepseek_v4.INTERPRETED}:{command_environment()['PYTHONPATH']}",
}
#: Configuration, the server's flags and its environment, and the extension.
FAMILIES: dict[str, tuple[dict[str, Any], Sequence[str], dict[str, str], str]] = {
    "deepseek-v4": (test_deepseek_v4.CONFIG, test_deepseek_v4.FLAGS, INTERPRETED, "EngineChains"),
    "glm-5.3": (test_recurrent.CONFIG, test_recurrent.FLAGS, {}, "RecurrentChains"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def client(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    config, flags, environment, extension = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("chains")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / "qwen3-tiny" / name, folder)
    (folder / "config.json").write_text(json.dumps(config))
    # Two chains in a prefill, and the third in another. The last of two flags counts.
    flags = [*flags, "--worker-extension-cls", f"tests.vllm.chain_families.{extension}"]
    flags += ["--max-num-batched-tokens", str(2 * SEQ_LEN + 7), "--max-num-seqs", "8"]
    with serving(folder, folder / "server.log", flags, environment) as client:
        facts = client.worker("poc_prepare_decode", SETUP)
        assert facts["refusal"] is None, facts
        assert chain_nonces(facts, SEQ_LEN + STEPS) >= len(NONCES)
        yield client


def claims_of(nonces: Sequence[int]) -> list[list[int]]:
    return [[(3 * step + nonce) % 16 for step in range(STEPS + 1)] for nonce in nonces]


def decoded(client: Client, request: DecodeRequest) -> dict[str, Any]:
    """Repeat the request until it is complete."""
    for _ in range((STEPS + len(request["nonces"])) * EACH_LAYER + 1):
        answer: dict[str, Any] = client.worker("poc_decode", request)
        assert "error" not in answer, answer
        if answer["complete"]:
            return {name: answer[name] for name in ("indices", "margins")}
    raise AssertionError("chains have no end")


def test_chains_are_those_of_one_pass_over_all_tokens(client: Client) -> None:
    request = chains_of(NONCES, claims_of(NONCES))
    found, expected = decoded(client, request), client.worker("poc_test_chains_at_once", request)
    margins = torch.tensor(found["margins"]), torch.tensor(expected["margins"])
    apart, strange = (margins[0] - margins[1]).abs(), (margins[0] - margins[1].roll(1, 0)).abs()
    other = (torch.tensor(found["indices"]) != torch.tensor(expected["indices"])).float().mean()
    _log.info("margins: mean %.5f, largest %.5f apart, %.5f of others", apart.mean(), apart.max(), strange.mean())
    _log.info("%.2f %% other indices", 100 * other)
    assert apart.mean() <= MEAN_MARGIN
    assert apart.max() <= MARGIN
    assert other <= OTHERS
    assert strange.mean() > FAR
    assert len({point for row in found["indices"] for point in row}) > 8, "all chains are alike"


@pytest.mark.parametrize(
    "parts",
    [pytest.param(1, id="between-steps", marks=pytest.mark.long), pytest.param(EACH_LAYER, id="within-steps")],
)
def test_chat_and_prefill_run_beside_chains_and_neither_changes_the_other(client: Client, parts: int) -> None:
    prompt = "Something long enough to fill more than one block of the cache. " * 5
    before, artifacts = client.chat(prompt), client.artifacts(NONCES[:1])
    request = chains_of(NONCES, parts=1, cut=parts)
    expected = decoded(client, chains_of(NONCES))
    sums = client.worker("poc_test_cache_sums")
    for _ in range(3 if parts > 1 else 1):
        for _ in range(2):
            assert not client.worker("poc_decode", request)["complete"]
        assert client.worker("poc_test_cache_sums") == sums
        assert client.chat(prompt) == before
        assert client.artifacts(NONCES[:1]) == artifacts
        sums = client.worker("poc_test_cache_sums")
    assert decoded(client, request) == expected
    assert client.chat(prompt) == before
