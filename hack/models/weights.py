# SPDX-License-Identifier: Apache-2.0
"""Architectures of the tiny models and their random weights."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hack.models.tokenizer import END_OF_TURN, VOCABULARY

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END_OF_TURN,
    "dtype": "float32",
}

#: How each model is made; the names are the folders.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-tiny": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE)),
    "llama-tiny": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
}


def write_weights(name: str, folder: Path) -> None:
    """Write config.json, generation_config.json and the float32 safetensors of the model ``name``."""
    model = MODELS[name]()
    for parameter, values in model.named_parameters():
        _randomise(f"{name}/{parameter}", values.data)
    model.save_pretrained(folder)


def _randomise(name: str, values: torch.Tensor) -> None:
    """Fill a weight so that signals keep their size: attention matters, and chat does not repeat itself."""
    if values.ndim == 1:  # of a norm
        values.fill_(1.0)
        return
    # Seeded by name, so that a change of one tensor leaves the others as they were.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
