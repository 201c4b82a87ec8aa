# SPDX-License-Identifier: Apache-2.0
"""A tiny model with a layer that drafts, behind those of the target (MTP)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS, HIDDEN = 2, 128


def write_drafting(like: Path, folder: Path) -> None:
    """Write MiMo with the tokenizer of ``like``: the layers of a Qwen2, and one more that drafts.

    The one that drafts has the weights of the last of the others, so that chat takes some of its drafts.
    """
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=AutoConfig.from_pretrained(like).vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=HIDDEN**-0.5,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(like / name, folder)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | _drafting_layer(weights), folder / "model.safetensors", {"format": "pt"})


def _drafting_layer(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    last, prefix = f"model.layers.{LAYERS - 1}.", "model.mtp_layers.0."
    layer = {prefix + name.removeprefix(last): values for name, values in weights.items() if name.startswith(last)}
    norms = {f"{prefix}{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("token", "hidden", "final")}
    mixed = torch.cat([torch.eye(HIDDEN), torch.eye(HIDDEN)], dim=1)
    return {name: values.clone() for name, values in layer.items()} | norms | {f"{prefix}input_proj.weight": mixed}
