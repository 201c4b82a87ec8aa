# SPDX-License-Identifier: Apache-2.0
"""A model like another one, of another size."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def write_resized(like: Path, folder: Path, *, hidden: int, layers: int, **changes: object) -> None:
    """Write a model of the architecture and with the tokenizer of ``like``, of this hidden size and depth.

    ``changes`` are other fields of its configuration.
    """
    shutil.copytree(like, folder)
    config = AutoConfig.from_pretrained(like)
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "initializer_range": hidden**-0.5}
    config.update({**size, **changes})
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:1] * layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
