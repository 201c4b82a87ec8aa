# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.known_answers import ANSWERS, BLOCK_HASH, F16_ULP, UNIT_ABS, label

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from torch import Tensor  # noqa: E402

from tests.support.builders.tensors import DEVICE, assert_close, bits, ulp_distance  # noqa: E402
from vllm_poc.maths.sampling import layer_vectors, normal, normalise, reflect, reflect_chain, unit_normal  # noqa: E402  # noqa: E402

pytestmark = pytest.mark.torch

HOOK = ANSWERS["layer_hook_apply"]
WORD = st.integers(min_value=0, max_value=2**32 - 1)


def layer_vector(layer: int, hidden: int) -> Tensor:
    return layer_vectors(block_hash=BLOCK_HASH, num_layers=layer + 1, hidden=hidden, device=DEVICE)[layer]


@pytest.mark.parametrize("entry", ANSWERS["layer_householder_vectors"], ids=label)
def test_layer_vectors(entry: dict[str, Any]) -> None:
    vector = layer_vector(entry["layer"], entry["dim"])[: entry["first"]]
    assert_close(vector, entry["float32"], UNIT_ABS)
    assert ulp_distance(bits(vector.to(torch.bfloat16)), entry["bfloat16_bits"]) <= F16_ULP


def test_reflection_of_a_layer_output() -> None:
    vector = layer_vector(HOOK["layer"], HOOK["hidden"])
    assert_close(reflect(torch.tensor(HOOK["x"]), vector), HOOK["float32"], UNIT_ABS)


def test_reflection_rounds_in_the_activation_dtype() -> None:
    vector = layer_vector(HOOK["layer"], HOOK["hidden"])
    reflected = reflect(torch.tensor(HOOK["x"], dtype=torch.bfloat16), vector)
    assert reflected.dtype == torch.bfloat16
    assert bits(reflected) == HOOK["bfloat16_bits"]


def test_reflection_of_a_normalised_output() -> None:
    vector = layer_vector(HOOK["layer"], HOOK["hidden"])
    got = reflect(normalise(torch.tensor(HOOK["x"])), vector)
    assert_close(got, HOOK["float32_normalised_first"], UNIT_ABS)


@given(seed=WORD, hidden=st.integers(min_value=2, max_value=128))
def test_reflections_keep_lengths_and_undo_themselves(seed: int, hidden: int) -> None:
    vectors = unit_normal(torch.tensor([[seed, seed ^ 1, seed ^ 2]]), hidden)
    x = normal(torch.tensor([seed ^ 3]), hidden)
    there = reflect_chain(x, vectors)
    torch.testing.assert_close(there.norm(), x.norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(reflect_chain(there, vectors.flip(1)), x, rtol=0, atol=1e-4)


def test_normalise_keeps_zero_and_spreads_nan() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [torch.nan, 1.0]])
    got = normalise(rows)
    assert got[0].tolist() == [0, 0]
    assert got[1].norm().item() == pytest.approx(1)
    assert got[2].isnan().all()
