# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from tests.support.builders.known_answers import ANSWERS, BLOCK_HASH, F16_ULP, NORMAL_ABS, PUBLIC_KEY, label

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from torch import Tensor  # noqa: E402

from tests.support.builders.tensors import assert_close, bits, ulp_distance  # noqa: E402
from vllm_poc.maths.sampling import fill_inputs, input_seeds  # noqa: E402

pytestmark = pytest.mark.torch


def inputs(nonces: list[int], seq_len: int, hidden: int, *, dtype: object = torch.float32, strong: bool) -> Tensor:
    out = torch.full((len(nonces), seq_len, hidden), torch.nan, dtype=dtype)
    fill_inputs(out, seeds(nonces, strong=strong))
    return out


def seeds(nonces: list[int], *, strong: bool) -> Tensor:
    return torch.tensor([input_seeds(BLOCK_HASH, PUBLIC_KEY, nonce, strong_rng=strong) for nonce in nonces])


def shape(entry: dict[str, Any]) -> tuple[list[int], int, int]:
    return [entry["nonce"]], entry["seq_len"], entry["hidden"]


@pytest.mark.parametrize("entry", ANSWERS["generate_inputs"], ids=label)
def test_inputs(entry: dict[str, Any]) -> None:
    assert_close(inputs(*shape(entry), strong=False).flatten(), entry["float32_row_major"], NORMAL_ABS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("entry", ANSWERS["generate_inputs"], ids=label)
def test_inputs_in_the_model_dtype(entry: dict[str, Any], dtype: str) -> None:
    got = inputs(*shape(entry), dtype=getattr(torch, dtype), strong=False)
    assert ulp_distance(bits(got), entry[f"{dtype}_bits"]) <= F16_ULP


@pytest.mark.parametrize("entry", ANSWERS["generate_inputs_concat_murmur"], ids=label)
def test_inputs_of_the_stronger_generator(entry: dict[str, Any]) -> None:
    assert_close(inputs(*shape(entry), strong=True).flatten(), entry["float32_row_major"], NORMAL_ABS)
    got = inputs(*shape(entry), dtype=torch.bfloat16, strong=True)
    assert ulp_distance(bits(got), entry["bfloat16_bits"]) <= F16_ULP


@pytest.mark.parametrize("strong", [False, True])
def test_a_batch_is_its_nonces_one_by_one(strong: bool) -> None:
    batch = inputs([7, 0, 2**31 - 1], 5, 13, strong=strong)
    for row, nonce in zip(batch, [7, 0, 2**31 - 1], strict=True):
        torch.testing.assert_close(row, inputs([nonce], 5, 13, strong=strong)[0], rtol=0, atol=NORMAL_ABS)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("change", [{"block_hash": "x"}, {"public_key": "x"}, {"nonce": 1}])
def test_hash_key_and_nonce_each_change_the_seeds(change: dict[str, Any], strong: bool) -> None:
    same: dict[str, Any] = {"block_hash": BLOCK_HASH, "public_key": PUBLIC_KEY, "nonce": 0, "strong_rng": strong}
    assert input_seeds(**same) != input_seeds(**(same | change))
