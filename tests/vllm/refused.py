# SPDX-License-Identifier: Apache-2.0
"""Configurations of small models on which PoC cannot run, and vLLM's real models of them without a server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
_ENCODER = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
_DECODER = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR_SIZES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 1024}
_HYPER_CONNECTIONS = {"hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 2}
_COMPRESSED = {"compress_ratios": [4, 4], "compress_rope_theta": 160000, "sliding_window": 128}
_INDEX = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
_RANKS = {"q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 2, "qk_rope_head_dim": 64}
_ROUTING = {"num_hash_layers": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
_SCORES = {"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True}

#: config.json by vLLM's name of the model.
CONFIGS: dict[str, dict[str, Any]] = {
    "BertModel": {"model_type": "bert", **_SHAPE},
    "WhisperForConditionalGeneration": {
        "model_type": "whisper",
        "vocab_size": 1024,
        "d_model": 64,
        **_ENCODER,
        **_DECODER,
        **_TOKENS,
    },
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        **_SHAPE,
    },
    "Gemma3nForCausalLM": {"model_type": "gemma3n_text", "num_kv_shared_layers": 0, **_PER_LAYER, **_SHAPE},
    "Gemma4ForCausalLM": {
        "model_type": "gemma4_text",
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **_SHAPE,
    },
    "DeepseekV4ForCausalLM": {
        "model_type": "deepseek_v4",
        **_SHAPE,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "max_position_embeddings": 4096,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "swiglu_limit": 10.0,
        "routed_scaling_factor": 1.5,
        **_RANKS,
        **_ROUTING,
        **_SCORES,
        **_COMPRESSED,
        **_INDEX,
        **_HYPER_CONNECTIONS,
    },
    # Three layers with linear attention; with the latent attention of others vLLM builds none on a CPU.
    "Glm5NextForConditionalGeneration": {
        "model_type": "glm5_next",
        "text_config": {
            "model_type": "glm5_next_text",
            **_SHAPE,
            "hidden_size": 256,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "linear_num_heads": 4,
            # Named, as `swiglu_limit` below, since vLLM 0.30 and 0.31 have other defaults than transformers.
            "layer_types": ["linear_attention"] * 3,
            "mlp_layer_types": ["dense"] * 3,
            "pad_token_id": 0,
            "mhc": True,
        },
        "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 256, "swiglu_limit": 10.0},
    },
    "OPTForCausalLM": {"model_type": "opt", "word_embed_proj_dim": 128, "ffn_dim": 256, **_SHAPE},
    "Qwen3NextForCausalLM": {
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 64,
        **_SHAPE,
        **_EXPERTS,
        **_LINEAR_HEADS,
        **_LINEAR_SIZES,
    },
}


def write_config(name: str, folder: Path) -> None:
    """Write config.json of the model ``name`` into ``folder``."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | {"architectures": [name]}))


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """Let models be built in this process, and leave nothing of it behind."""
    with patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}):
        init_distributed_environment(1, 0, f"file://{folder / 'store'}", 0, "gloo")
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def build(name: str, folder: Path, **more: Any) -> tuple[VllmConfig, nn.Module]:  # noqa: ANN401
    """Return vLLM's configuration and model of ``name``, with weights of any value, as its worker makes them.

    ``more`` are arguments of the engine.

    Skips the test where that takes a GPU.
    """
    write_config(name, folder)
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        enable_prefix_caching=False,
        **more,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), _default_dtype(torch.bfloat16):
        ensure_model_parallel_initialized(1, 1)
        try:
            return config, initialize_model(config)
        except torch.AcceleratorError:
            # vLLM 0.23 makes CUDA streams for DeepSeek-V4.
            pytest.skip(f"this release of vLLM builds {name} on a GPU only")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default for a while. vLLM's own function of older releases leaves it so when a model is not built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
