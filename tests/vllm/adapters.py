# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of a tiny model, with random weights that change what chat answers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

RANK = 8


def write_adapter(model: Path, folder: Path) -> None:
    """Write an adapter for all linear layers of the dense ``model`` into ``folder``, as PEFT would."""
    config = AutoConfig.from_pretrained(model)
    hidden, middle, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    sizes = {"q_proj": (hidden, heads), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (heads, hidden)}
    sizes = {f"self_attn.{name}": size for name, size in sizes.items()}
    sizes |= {"mlp.gate_proj": (hidden, middle), "mlp.up_proj": (hidden, middle), "mlp.down_proj": (middle, hidden)}
    generator, tensors = torch.Generator().manual_seed(3), {}
    for layer in range(config.num_hidden_layers):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * inputs**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * RANK**-0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted(name.rpartition(".")[2] for name in sizes)
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
