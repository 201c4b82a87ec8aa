# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3's linear attention: PoC's metadata and states give what vLLM's engine gives for the same prompt.

On a CPU vLLM has neither kernels for it nor any latent attention with an index. Layers of the latter are left out, and
functions stand in for the kernels; tests/gpu/test_recurrent.py has both.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.device import ON_GPU, WHY_NO_STREAMS, older_than
from tests.vllm.engine_answer import expect_engines_answer
from tests.vllm.server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.client import Client

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_recurrent.py has the real kernels"),
    # Older ones have no such model, want tilelang, or have no convolution in float32.
    pytest.mark.skipif(older_than(0, 32), reason="this release of vLLM computes GLM-5.3 on a GPU only"),
]
LAYERS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "text_config": {
        "model_type": "glm5_next_text",
        "vocab_size": 65_536,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention"] * LAYERS,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
        "mla_use_nope": True,
        "indexer_rope_interleave": True,
        "mhc": True,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "pad_token_id": 0,
        "max_position_embeddings": 4096,
    },
    "vision_config": {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 256,
        "projection_intermediate_size": 64,
        "swiglu_limit": 10.0,  # vLLM 0.30 and 0.31 have no default
    },
}
FLAGS = (
    *("--enforce-eager", "--dtype", "bfloat16", "--load-format", "dummy", "--num-gpu-blocks-override", "64"),
    *("--language-model-only", "--no-enable-prefix-caching"),
    *("--worker-extension-cls", "tests.vllm.recurrent_checks.RecurrentExtension"),
    *("--middleware", "vllm_poc.server.app.PocMiddleware"),
)
#: bfloat16 rounds the same numbers in other batches otherwise; another nonce is some 0.3 away.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def client(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("glm-5.3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / "qwen3-tiny" / name, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with serving(folder, folder / "server.log", FLAGS) as client:
        yield client


@pytest.mark.skipif(WHY_NO_STREAMS is not None, reason=str(WHY_NO_STREAMS))
@pytest.mark.parametrize("seq_len", [17, 130])
def test_a_nonce_is_what_the_engine_makes_of_its_prompt(client: Client, seq_len: int) -> None:
    expect_engines_answer(client, seq_len, tolerance=TOLERANCE, other=5 * TOLERANCE)


def test_the_networks_plugin_finds_no_layers_to_reflect(client: Client) -> None:
    """Where it looks for them this model has none, and then it reflects none."""
    assert client.worker("poc_test_places") == []
