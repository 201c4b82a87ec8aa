# SPDX-License-Identifier: Apache-2.0
"""A model with one layer, as wide as a real one."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def write_wide_model(like: Path, folder: Path, hidden: int) -> None:
    """Write a model of the architecture and with the tokenizer of ``like``, of this hidden size."""
    shutil.copytree(like, folder)
    config = AutoConfig.from_pretrained(like)
    config.update({"hidden_size": hidden, "num_hidden_layers": 1, "initializer_range": hidden**-0.5})
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:1]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
