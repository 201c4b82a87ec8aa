# SPDX-License-Identifier: Apache-2.0
"""A model in a real shape, random, so that attention and every layer show in the results."""

import shutil
import zlib
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hack.models.tokenizer import END_OF_TURN, VOCABULARY

#: Qwen3-0.6B but for the vocabulary, which PoC does not use.
_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": END_OF_TURN,
}


def write_real_size(folder: Path, *, tokenizer: Path) -> Path:
    """Write the model into ``folder``, with the tokenizer of another one, and return the folder."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(Qwen3Config(**_CONFIG, dtype="bfloat16"))
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        generator = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()))
        if parameter.ndim == 1:  # of a norm
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
