# SPDX-License-Identifier: Apache-2.0
"""A tiny model with a layer that drafts, behind those of the target (MTP)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hack.models.weights import MODELS

LAYERS, HIDDEN = 2, 128
_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 2048,
    "initializer_range": HIDDEN**-0.5,
    "tie_word_embeddings": False,
}
_LATENT = MODELS["deepseek-tiny"][1]
_EXPERTS = {
    "moe_intermediate_size": HIDDEN,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
#: By vLLM's name of the target: the kind of model in transformers that it is like, and more of its shape.
_TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "MiMoForCausalLM": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", _LATENT | {"topk_method": "noaux_tc"}),
    "Glm4MoeForCausalLM": ("glm4_moe", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64} | _EXPERTS),
}
#: Where the layer that drafts is in the target's checkpoint, and what it has more than others: norms, then what mixes.
_MIMO = ("model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj")
_BEHIND = (f"model.layers.{LAYERS}.", ("enorm", "hnorm", "shared_head.norm"), "eh_proj")
#: What it has a copy of, behind the last layer.
_COPIED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def write_drafting(like: Path, folder: Path, target: str = "MiMoForCausalLM") -> None:
    """Write a ``target`` with the tokenizer of ``like``, and with one layer more that drafts.

    The one that drafts has the weights of the last of the others, so that chat takes some of its drafts.
    """
    kind, shape = _TARGETS[target]
    vocabulary = AutoConfig.from_pretrained(like).vocab_size
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **shape | _SHAPE | {"vocab_size": vocabulary})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(like / name, folder)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"architectures": [target], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    weights = load_file(folder / "model.safetensors")
    layer = _drafting_layer(weights, *(_MIMO if kind == "qwen2" else _BEHIND))
    copies = {} if kind == "qwen2" else {_BEHIND[0] + name: weights[of].clone() for name, of in _COPIED.items()}
    save_file(weights | layer | copies, folder / "model.safetensors", {"format": "pt"})


def _drafting_layer(
    weights: dict[str, torch.Tensor], prefix: str, norms: tuple[str, ...], mixing: str
) -> dict[str, torch.Tensor]:
    last = f"model.layers.{LAYERS - 1}."
    layer = {prefix + name.removeprefix(last): values for name, values in weights.items() if name.startswith(last)}
    ones = {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in norms}
    mixed = torch.cat([torch.eye(HIDDEN), torch.eye(HIDDEN)], dim=1)
    return {name: values.clone() for name, values in layer.items()} | ones | {f"{prefix}{mixing}.weight": mixed}
