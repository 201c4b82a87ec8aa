# SPDX-License-Identifier: Apache-2.0
"""Shapes of real models, and how much arithmetic a nonce takes in them."""

import json
from pathlib import Path
from typing import Any

_QWEN3 = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
_DENSE = _QWEN3 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1_000_000}
_EXPERTS = _QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rope_theta": 5_000_000}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _DENSE
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-32b": _DENSE
    | {
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-235b-a22b-fp8": _EXPERTS
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    },
    # MiniMaxAI/MiniMax-M2.7 at d494266a: one norm over all heads of queries and one over those of keys, half of each
    # head rotated, experts chosen by sigmoid and bias, their router in float32.
    "minimax-m2.7": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "dtype": "bfloat16",
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": 64,
        "rope_theta": 5_000_000,
        "max_position_embeddings": 204_800,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "tie_word_embeddings": False,
        "bos_token_id": 200_019,
        "eos_token_id": 200_020,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    },
}


def write_shape(name: str, folder: Path, *, layers: int | None = None) -> dict[str, Any]:
    """Write the configuration of a model, or of its first layers, into ``folder`` and return it."""
    config = SHAPES[name] | ({"num_hidden_layers": layers} if layers is not None else {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def flops_per_nonce(config: dict[str, Any], seq_len: int) -> float:
    """Return the floating point operations of a forward pass: linear layers and causal attention, without the head."""
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    attention = hidden * (heads + 2 * config["num_key_value_heads"]) * width + heads * width * hidden
    feed_forward = 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is not None:
        feed_forward = hidden * experts + feed_forward * config["num_experts_per_tok"]
    pairs = seq_len * (seq_len + 1) / 2  # of a query and a key that it sees
    return float(config["num_hidden_layers"] * (2 * seq_len * (attention + feed_forward) + 4 * heads * width * pairs))
