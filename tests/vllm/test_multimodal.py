# SPDX-License-Identifier: Apache-2.0
"""Language models within multimodal ones: PoC gives what vLLM's engine gives for the same text."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.device import ARTIFACT_TOLERANCE
from tests.vllm.engine_answer import expect_engines_answer
from tests.vllm.server import serving
from tests.vllm.test_chat import poc_running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.client import Client

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

LENGTHS = (1, 17, 130)
#: With vLLM 0.23 on a CPU one number of twelve is 0.002 away at 17 tokens. All positions at zero are 0.1 away.
TOLERANCE = max(ARTIFACT_TOLERANCE, 0.004)
PROMPT = "What is a license?"
#: Many tokens, so that a nonce hardly has one twice.
_TEXT: dict[str, Any] = {
    "vocab_size": 65_536,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "patch_size": 14}
#: What config.json has beside the type of model, by which these are.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "query_pre_attn_scalar": 32,
        },
        "vision_config": {
            **_VISION,
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 65_535,
    },
    "qwen2_5_vl": {
        "text_config": {
            **_TEXT,
            # This type has no size of heads of its own.
            "hidden_size": 256,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            **_VISION,
            "model_type": "qwen2_5_vl",
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 256,
            "fullatt_block_indexes": [0],
        },
    },
}
#: What the other type shows as well.
_LONG = {"gemma3": pytest.mark.long}
#: Types of models that are served with all their parts here, and shown images.
SHOWN_IMAGES = {"qwen2_5_vl"}
FLAGS = (
    *("--enforce-eager", "--no-enable-prefix-caching"),
    *("--worker-extension-cls", "tests.vllm.engine_checks.EngineExtension"),
    *("--middleware", "vllm_poc.server.app.PocMiddleware"),
)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=_LONG.get(name, ())) for name in CONFIGS])
def client(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    from tests.vllm.images import write_model, write_processor  # noqa: PLC0415 - needs transformers

    name: str = request.param
    folder, flags = tmp_path_factory.mktemp(name), list(FLAGS)
    config = CONFIGS[name]
    if name in SHOWN_IMAGES:
        config = config | write_processor(model_folder / "qwen3-tiny", folder)
    else:
        flags.append("--language-model-only")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_folder / "qwen3-tiny" / file, folder)
    write_model(name, config, folder)
    with serving(folder, folder / "server.log", flags) as client:
        yield client


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_nonce_is_what_the_engine_makes_of_its_prompt(client: Client, seq_len: int) -> None:
    expect_engines_answer(client, seq_len, tolerance=TOLERANCE, other=2 * TOLERANCE)


def test_chat_keeps_its_tokens_and_its_cache(client: Client) -> None:
    before = client.chat(PROMPT)
    filled = client.worker("poc_test_kv_checksum")
    client.artifacts(range(40), seq_len=130, batch_size=8)
    assert client.worker("poc_test_kv_checksum") == filled
    assert client.chat(PROMPT) == before


@pytest.mark.parametrize("client", SHOWN_IMAGES, indirect=True)
def test_chat_about_images_and_poc_do_not_show_in_each_other(client: Client) -> None:
    from tests.vllm.images import asked_about  # noqa: PLC0415 - needs Pillow

    alone = client.artifacts(range(8), seq_len=130)
    red, blue = (client.chat(asked_about(colour)) for colour in ("red", "blue"))
    assert red != blue, "the images must show in the answers"
    assert client.artifacts(range(8), seq_len=130) == alone
    assert client.chat(asked_about("red")) == red
    with poc_running(client):
        assert client.chat(asked_about("blue")) == blue


def test_the_networks_plugin_finds_no_layers_to_reflect(client: Client) -> None:
    """Where it looks for them such models have none, and then it reflects none."""
    assert client.worker("poc_test_places") == []
