# SPDX-License-Identifier: Apache-2.0
"""What a fleet's self-check finds on real servers: which of them the network would vote out.

The model has random weights and 24 layers, which add up what differs: the network's have 43 and more.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.validation import StatTest
from poc_operator.fleets.self_check import Check, Comparison, Vectors, compare, is_incomplete
from tests.vllm.client import Client
from tests.vllm.device import ON_GPU
from tests.vllm.server import MODEL_NAME, serving
from vllm_poc.wire.generate import GeneratedResponse
from vllm_poc.wire.messages import Protocol

if find_spec("torch") is not None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

LAYERS = 24
CHECK = Check(model=MODEL_NAME, seq_len=64, k_dim=12, nonces=32)
EAGER = ("--enforce-eager", "--enable-poc")
DOWN = "model.layers.3.mlp.down_proj.weight"
Weights = dict[str, Any]


@pytest.fixture(scope="module")
def deep(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with more layers, whose weights keep signals at their size."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    shutil.copytree(model_folder / "qwen3-tiny", folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = LAYERS, ["full_attention"] * LAYERS
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(7)
    for values in model.parameters():
        if values.ndim > 1:
            values.data.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    return folder


def served(model: Path, log: Path, *flags: str) -> Vectors:
    """What a server of the model computes for a self-check."""
    with serving(model, log, flags) as client:
        return computed(client)


def computed(client: Client) -> Vectors:
    request = CHECK.request(MODEL_NAME, beside_round=False).model_dump(mode="json", exclude_none=True)
    return CHECK.vectors(GeneratedResponse.model_validate(client.poc("generate", request)))


@pytest.fixture(scope="module")
def reference(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Vectors:
    return served(deep, tmp_path_factory.mktemp("reference") / "server.log", *EAGER)


def found(name: str, vectors: Vectors, reference: Vectors) -> Comparison:
    result = compare(vectors, reference, StatTest().thresholds(Protocol.ARTIFACT))
    print(  # noqa: T201 - the figures of the docs
        f"{name}: {result.mismatches} of {result.total} differ, p-value {result.p_value:.6g}, "
        f"largest distance {result.farthest:.3g}"
    )
    return result


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("the same", EAGER),
        pytest.param("compiled kernels", ("--enable-poc",), marks=pytest.mark.long),
        pytest.param("bfloat16", (*EAGER, "--dtype", "bfloat16" if not ON_GPU else "float16"), marks=pytest.mark.long),
    ],
)
def test_other_kernels_and_precision_pass(
    deep: Path, reference: Vectors, tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    result = found(name, served(deep, tmp_path / "server.log", *flags), reference)
    assert not result.failed
    assert result.mismatches == 0


def rounded(weights: Weights, bits: int, group: int) -> None:
    """Round all matrices but the embeddings as formats of so few bits do: each group of numbers has a scale."""
    largest = 2 ** (bits - 1) - 1
    for name, values in weights.items():
        if values.ndim == 2 and "embed" not in name:
            groups = values.reshape(-1, group)
            scale = groups.abs().amax(1, keepdim=True) / largest
            weights[name] = ((groups / scale).round() * scale).reshape(values.shape)


def flipped(weights: Weights, bit: int) -> None:
    """Flip one bit of one number."""
    number = weights[DOWN].view(-1)[5:6].view(torch.int32)
    number ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)


def of_another_model(weights: Weights) -> None:
    """Take the matrices of another model of the same shape."""
    for name, values in weights.items():
        weights[name] = values.roll(1, 0) if values.ndim == 2 else values


@pytest.mark.parametrize(
    ("name", "change", "failed"),
    [
        ("weights of 4 bits", partial(rounded, bits=4, group=128), True),
        pytest.param("weights of 8 bits", partial(rounded, bits=8, group=128), False, marks=pytest.mark.long),
        pytest.param("another weight file", of_another_model, True, marks=pytest.mark.long),
        ("the highest bit of one exponent", partial(flipped, bit=30), True),
        pytest.param("one sign", partial(flipped, bit=31), False, marks=pytest.mark.long),
    ],
)
def test_other_weights(
    deep: Path, reference: Vectors, tmp_path: Path, name: str, change: Callable[[Weights], None], failed: bool
) -> None:
    model = tmp_path / "model"
    shutil.copytree(deep, model)
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    vectors = served(model, tmp_path / "server.log", *EAGER)
    if is_incomplete(vectors):
        assert failed
        return
    result = found(name, vectors, reference)
    assert result.failed is failed
    assert result.farthest > 0
