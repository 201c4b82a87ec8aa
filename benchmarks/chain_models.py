# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, and what a cheat would serve in place of each."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hack.models.store import models

HIDDEN, LAYERS = 320, 6
#: The families: a dense one, and one with experts, of which the decode scheme's seeds choose as with MiniMax.
FAMILIES: Mapping[str, str] = {"dense": "qwen3-tiny", "experts": "qwen3-moe-tiny"}


def write_models(family: str, folder: Path) -> Mapping[str, Path]:
    """Write the family's model and those of cheats, and return their folders by what they are."""
    like, honest = models() / FAMILIES[family], folder / "the model"
    shutil.copytree(like, honest)
    config = AutoConfig.from_pretrained(like)
    config.update({"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "initializer_range": HIDDEN**-0.5})
    config.layer_types = config.layer_types[:1] * LAYERS if getattr(config, "layer_types", None) else None
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(honest)
    changes: dict[str, Callable[[torch.nn.Module], None]] = {
        "weights of 8 bits": lambda model: _round_weights(model, 8),
        "weights of 4 bits": lambda model: _round_weights(model, 4),
        "one layer less": _drop_layer,
        "other weights": _draw_again,
    }
    written = {"the model": honest}
    for name, change in changes.items():
        written[name] = shutil.copytree(honest, folder / name)
        model = AutoModelForCausalLM.from_pretrained(honest, dtype=torch.float32)
        with torch.no_grad():
            change(model)
        model.save_pretrained(written[name])
    return written


def _round_weights(model: torch.nn.Module, bits: int) -> None:
    """Round each row of each matrix of the layers to so many bits, as quantised weights are."""
    for name, weight in model.named_parameters():
        if ".layers." in name and weight.dim() > 1:
            weight.copy_(_rounded(weight, 2 ** (bits - 1) - 1))


def _rounded(weight: Tensor, most: int) -> Tensor:
    scale = weight.abs().amax(dim=-1, keepdim=True) / most
    return (weight / scale).round() * scale


def _drop_layer(model: torch.nn.Module) -> None:
    inner: torch.nn.Module = model.model
    inner.layers = inner.layers[:-1]
    model.config.num_hidden_layers = LAYERS - 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:-1]


def _draw_again(model: torch.nn.Module) -> None:
    """Exchange the rows of each matrix of the layers: weights of the same size, of another model."""
    for name, weight in model.named_parameters():
        if ".layers." in name and weight.dim() > 1:
            weight.copy_(weight.roll(1, -2))
