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
    # deepseek-ai/DeepSeek-V4-Flash-0731 at 7872f01b: four residual streams, a window and compressed keys of two kinds,
    # FP8 layers and MXFP4 experts with scales that are powers of two, experts of the first layers chosen by token id.
    "deepseek-v4-flash": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "vocab_size": 129_280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4],
        "compress_rope_theta": 160_000,
        "rope_theta": 10_000,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65_536,
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
        "num_hash_layers": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "expert_dtype": "fp4",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1_048_576,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    },
    # zai-org/GLM-5.3-Flash at 04c4e9e9: linear attention with states in three of four layers, latent attention with an
    # index in the fourth, four residual streams, FP8 experts. The tower for pictures is a tiny one: PoC has none.
    "glm-5.3-flash": {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "glm5_next_text",
            "dtype": "bfloat16",
            "vocab_size": 154_880,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "linear_num_heads": 64,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "linear_lower_bound": -5.0,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 256,
            "qk_rope_head_dim": 0,
            "v_head_dim": 256,
            "mla_use_nope": True,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
            "index_kpool": 4,
            "index_kpool_always_select_tail": True,
            "indexer_rope_interleave": True,
            "mhc": True,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "n_routed_experts": 288,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "moe_router_dtype": "float32",
            "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1_048_576,
            "hidden_act": "silu",
            "num_nextn_predict_layers": 0,
        },
        "vision_config": {
            "model_type": "glm5_next_vision",
            "depth": 1,
            "hidden_size": 128,
            "num_heads": 4,
            "intermediate_size": 128,
            "out_hidden_size": 4096,
            "projection_intermediate_size": 128,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    },
}

#: Arguments of vLLM's engine without which it does not start on such a folder.
ARGUMENTS: dict[str, dict[str, Any]] = {"glm-5.3-flash": {"language_model_only": True}}
#: Those that the network's nodes have.
AS_SERVED: dict[str, dict[str, Any]] = {
    "glm-5.3-flash": {
        "kda_prefill_backend": "triton",
        "attention_config": {"sparse_mla_force_mqa": True},
        "enable_prefix_caching": False,
    }
}

#: What the benchmarks' option for that says.
PART_OF = (
    "what one of so many ranks has with tensor parallelism: without sums over ranks, but with all of the vocabulary"
)
#: What tensor parallelism divides among ranks. Routers, latent projections and the index are the same on each.
_DIVIDED = {"num_attention_heads", "linear_num_heads", "o_groups", "intermediate_size", "moe_intermediate_size"}
#: What ranks share where there are more of them.
_SHARED = "num_key_value_heads"


def write_shape(name: str, folder: Path, *, layers: int | None = None, ranks: int = 1) -> dict[str, Any]:
    """Write the configuration of a model, or of a part of it as in `shape_of`, into ``folder`` and return it."""
    config = shape_of(name, layers=layers, ranks=ranks)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def shape_of(name: str, *, layers: int | None = None, ranks: int = 1) -> dict[str, Any]:
    """Return the configuration of a model, of its first layers, or of what one of ``ranks`` ranks has.

    ValueError if so many ranks cannot share the model.
    """
    shape = SHAPES[name]
    if "text_config" in shape:
        return shape | {"text_config": _part(shape["text_config"], layers, ranks)}
    return _part(shape, layers, ranks)


def _part(shape: dict[str, Any], layers: int | None, ranks: int) -> dict[str, Any]:
    whole = [key for key in sorted(_DIVIDED & shape.keys()) if shape[key] % ranks]
    if whole:
        raise ValueError(f"{ranks} ranks cannot share {', '.join(f'{shape[key]} {key}' for key in whole)}")
    shape = shape | {"num_hidden_layers": shape["num_hidden_layers"] if layers is None else layers}
    if "compress_ratios" in shape:
        shape["compress_ratios"] = shape["compress_ratios"][: shape["num_hidden_layers"]]
    divided = {key: shape[key] // ranks for key in _DIVIDED & shape.keys()}
    return shape | divided | {_SHARED: max(1, shape[_SHARED] // ranks)}


def flops_per_nonce(config: dict[str, Any], seq_len: int) -> float:
    """Return the floating point operations of a forward pass: linear layers and causal attention, without the head."""
    if "text_config" in config:
        return _recurrent_flops(config["text_config"], seq_len)
    layers = _compressed_layers if "compress_ratios" in config else _plain_layers
    weights, pairs = layers(config, seq_len)
    return float(2 * seq_len * weights + 4 * config["num_attention_heads"] * config["head_dim"] * pairs)


def _plain_layers(config: dict[str, Any], seq_len: int) -> tuple[int, float]:
    """Return how many weights a token meets in all layers, and how many pairs of a query and a key there are."""
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    attention = hidden * (heads + 2 * config["num_key_value_heads"]) * width + heads * width * hidden
    feed_forward = 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is not None:
        feed_forward = hidden * experts + feed_forward * config["num_experts_per_tok"]
    layers = config["num_hidden_layers"]
    return layers * (attention + feed_forward), layers * seq_len * (seq_len + 1) / 2


def _compressed_layers(config: dict[str, Any], seq_len: int) -> tuple[int, float]:
    """Return the same for DeepSeek-V4, whose index ranks no keys of sequences that are short enough to read all."""
    hidden, width, streams = config["hidden_size"], config["head_dim"], config["hc_mult"]
    heads = config["num_attention_heads"] * width
    queries = hidden * (config["q_lora_rank"] + width) + config["q_lora_rank"] * heads
    outputs = heads * config["o_lora_rank"] + config["o_groups"] * config["o_lora_rank"] * hidden
    experts = config["num_experts_per_tok"] + config["n_shared_experts"]
    feed_forward = hidden * (3 * config["moe_intermediate_size"] * experts + config["n_routed_experts"])
    mixing = 2 * (2 + streams) * streams * streams * hidden
    weights, pairs = 0, 0.0
    for ratio in config["compress_ratios"]:
        # Keys and their scores; those of 4 tokens overlap, and have an index beside them.
        compressed = {0: 0, 4: 4 * (width + config["index_head_dim"]), 128: 2 * width}[ratio]
        weights += queries + outputs + hidden * compressed + feed_forward + mixing
        window = config["sliding_window"]
        pairs += sum(min(read, window) + (read // ratio if ratio else 0) for read in range(1, seq_len + 1))
    return weights, pairs


def _recurrent_flops(config: dict[str, Any], seq_len: int) -> float:
    """Return the same for GLM-5.3, whose index ranks no keys of sequences that are short enough to read all.

    Three of four layers have linear attention, whose recurrence takes a state of a square for each head and token. In
    the fourth, which is latent, keys and values are made of what the cache holds.
    """
    hidden, streams = config["hidden_size"], config["hc_mult"]
    width, state = config["linear_num_heads"] * config["linear_head_dim"], config["linear_head_dim"]
    linear = hidden * (3 * width + config["linear_num_heads"] + 2 * state) + 2 * state * width + width * hidden
    heads, keys, values = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    ranks = config["q_lora_rank"], config["kv_lora_rank"]
    latent = hidden * sum(ranks) + ranks[0] * heads * keys + ranks[1] * heads * (keys + values)
    latent += heads * values * hidden
    index = ranks[0] * config["index_n_heads"] * config["index_head_dim"]
    index += hidden * (config["index_n_heads"] + 2 * config["index_head_dim"])
    dense = 3 * hidden * config["intermediate_size"]
    experts = config["num_experts_per_tok"] + config["n_shared_experts"]
    sparse = hidden * (3 * config["moe_intermediate_size"] * experts + config["n_routed_experts"])
    layers, mixing = config["num_hidden_layers"], 2 * (2 + streams) * streams * streams * hidden
    fourths, first = layers // 4, min(3, layers)
    weights = (layers - fourths) * linear + fourths * (latent + index) + layers * mixing
    weights += first * dense + (layers - first) * sparse
    pairs = fourths * seq_len * (seq_len + 1) / 2
    recurrence = (layers - fourths) * seq_len * 3 * 2 * width * state
    return float(2 * seq_len * weights + 2 * heads * (keys + values) * pairs + recurrence)
