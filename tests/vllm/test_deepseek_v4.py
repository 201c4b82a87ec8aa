# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: PoC's own metadata, caches and token ids give what vLLM's engine gives for the same prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.device import ON_GPU, WHY_NO_STREAMS, older_than
from tests.vllm.engine_answer import expect_engines_answer
from tests.vllm.server import command_environment, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.client import Client

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

pytestmark = [
    pytest.mark.skipif(
        ON_GPU, reason="vLLM's kernels for GPUs take no such small model: benchmarks.gpu has a real one"
    ),
    pytest.mark.skipif(older_than(0, 32), reason="this release of vLLM computes DeepSeek-V4 on a GPU only"),
    pytest.mark.skipif(WHY_NO_STREAMS is not None, reason=str(WHY_NO_STREAMS)),
]
#: Layers of all kinds: windows alone, and beside them compressed keys, either few by an index or all of fewer.
RATIOS = [0, 4, 128]
#: Sizes of heads, index and streams are the real ones, for which alone there are kernels.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 65_536,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "compress_ratios": RATIOS,
    "compress_rope_theta": 160_000,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65_536,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FLAGS = (
    *("--enforce-eager", "--dtype", "bfloat16", "--load-format", "dummy", "--num-gpu-blocks-override", "4096"),
    *("--worker-extension-cls", "tests.vllm.engine_checks.EngineExtension"),
    *("--middleware", "vllm_poc.server.app.PocMiddleware"),
)
INTERPRETED = Path(__file__).with_name("interpreted")
#: bfloat16 rounds the same numbers in other batches otherwise; another nonce is some 0.3 away.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def client(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("deepseek-v4")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / "qwen3-tiny" / name, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    paths = {"PYTHONPATH": f"{INTERPRETED}:{command_environment()['PYTHONPATH']}"}
    with serving(folder, folder / "server.log", FLAGS, {"TRITON_INTERPRET": "1", **paths}) as client:
        yield client


@pytest.mark.parametrize("seq_len", [17, 300])
def test_a_nonce_is_what_the_engine_makes_of_its_prompt(client: Client, seq_len: int) -> None:
    expect_engines_answer(client, seq_len, tolerance=TOLERANCE, other=5 * TOLERANCE)
