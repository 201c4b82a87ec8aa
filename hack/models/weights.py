# SPDX-License-Identifier: Apache-2.0
"""Architectures of the tiny models and their random weights."""

import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hack.models.tokenizer import END_OF_TURN, VOCABULARY

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END_OF_TURN,
    "dtype": "float32",
}
# With smaller heads FlashAttention on a GPU is not batch-invariant, which the chat tests need.
_GROUPED_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}
# The head sizes are the real ones, for which alone there are kernels.
_LATENT_HEADS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
_QWEN3_MOE: dict[str, Any] = {"num_experts": 8, "norm_topk_prob": True}
_DEEPSEEK: dict[str, Any] = {
    # The first layer is dense, the second has experts.
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.0,
    # As the real ones have it. vLLM's CPU kernel for plain rotary embeddings misreads these heads, which lie apart.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_GEMMA3: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 32,
    "query_pre_attn_scalar": 32,
}

#: The type of each model, as the transformers library calls it, and its configuration; the names are the folders.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tiny": ("qwen3", _SHAPE | _GROUPED_HEADS),
    "llama-tiny": ("llama", _SHAPE | _GROUPED_HEADS),
    "qwen3-moe-tiny": ("qwen3_moe", _SHAPE | _GROUPED_HEADS | _EXPERTS | _QWEN3_MOE),
    "deepseek-tiny": ("deepseek_v2", _SHAPE | _LATENT_HEADS | _EXPERTS | _DEEPSEEK),
    "gemma3-tiny": ("gemma3_text", _SHAPE | _GROUPED_HEADS | _GEMMA3),
}

# Experts are chosen by these weights. So strong, the last of the chosen experts hardly counts: which one that is may
# then depend on rounding, and the results still agree.
_ROUTER = ".gate.weight"
_ROUTER_GAIN = 4.0


def write_weights(name: str, folder: Path) -> None:
    """Write config.json, generation_config.json and the float32 safetensors of the model ``name``."""
    model_type, fields = MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    for parameter, values in model.named_parameters():
        _randomise(f"{name}/{parameter}", values.data)
    model.save_pretrained(folder)


def _randomise(name: str, values: torch.Tensor) -> None:
    """Fill a weight so that signals keep their size: attention matters, and chat does not repeat itself."""
    if values.ndim == 1:  # of a norm, which passes signals on as it is
        return
    # Seeded by name, so that a change of one tensor leaves the others as they were.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
    if name.endswith(_ROUTER):
        values.mul_(_ROUTER_GAIN)
