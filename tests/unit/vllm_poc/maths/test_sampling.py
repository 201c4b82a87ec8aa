# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.known_answers import ANSWERS, BLOCK_HASH, NORMAL_ABS, PUBLIC_KEY, UNIFORM_ABS, label

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from tests.support.builders.tensors import DEVICE, assert_close  # noqa: E402
from vllm_poc.maths import sampling  # noqa: E402
from vllm_poc.maths.sampling import seed_tensor  # noqa: E402

pytestmark = pytest.mark.torch

TEXTS = {entry["string"]: entry["seed"] for entry in ANSWERS["seed_from_string"]}
WORD = st.integers(min_value=0, max_value=2**32 - 1)


def murmur_in_python(seed: int, key: int) -> int:
    """The formula on Python integers: no overflow can hide here."""
    mask = 0xFFFFFFFF

    def rotate(word: int, bits: int) -> int:
        return ((word << bits) | (word >> (32 - bits))) & mask

    k = rotate(key * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (rotate(seed ^ k, 13) * 5 + 0xE6546B64) & mask
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


@pytest.mark.parametrize("entry", ANSWERS["murmur3_32_single_block"], ids=label)
def test_murmur(entry: dict[str, Any]) -> None:
    got = sampling.murmur(torch.tensor(entry["seed"]), torch.tensor(entry["keys"]))
    assert got.tolist() == entry["hashes"]


@given(seeds=st.lists(WORD, min_size=1, max_size=4), keys=st.lists(WORD, min_size=1, max_size=8))
def test_murmur_agrees_with_integers_of_any_size(seeds: list[int], keys: list[int]) -> None:
    got = sampling.murmur(torch.tensor(seeds), torch.tensor(keys))
    assert got.tolist() == [[murmur_in_python(seed, key) for key in keys] for seed in seeds]


@given(seed=WORD)
def test_hashes_of_one_seed_never_tie(seed: int) -> None:
    assert len(set(sampling.hashes(torch.tensor(seed), 4096).tolist())) == 4096


@pytest.mark.parametrize("entry", ANSWERS["uniform"], ids=label)
def test_uniform(entry: dict[str, Any]) -> None:
    got = sampling.uniform(seed_tensor([entry["string"]], DEVICE), entry["n"])
    assert_close(got, [entry["values"]], UNIFORM_ABS)


@pytest.mark.parametrize("entry", ANSWERS["normal"], ids=label)
def test_normal(entry: dict[str, Any]) -> None:
    got = sampling.normal(seed_tensor([entry["string"]], DEVICE), entry["n"])
    assert_close(got, [entry["values"]], NORMAL_ABS)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 1001])
def test_normal_does_not_depend_on_the_chunk(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = seed_tensor(["a", "b", "c"], DEVICE)
    whole = sampling.normal(seeds, n)
    monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", 42)
    torch.testing.assert_close(sampling.normal(seeds, n), whole, rtol=0, atol=NORMAL_ABS)


def test_token_ids_are_hashes_of_positions() -> None:
    """The numbers follow from the formula on Python integers."""
    seed = sampling.token_seed(BLOCK_HASH, PUBLIC_KEY, 0)
    found = sampling.token_ids(torch.tensor([seed, 0]), 6, 129_280)
    assert (BLOCK_HASH, PUBLIC_KEY, seed, found.dtype) == ("abc123", "node1", 1_129_504_604, torch.int32)
    assert found[0].tolist() == [102_473, 48_738, 60_079, 77_002, 93_430, 86_556]
    assert found[1].tolist() == [murmur_in_python(0, position) % 129_280 for position in range(6)]


def test_normal_is_standard() -> None:
    sample = sampling.normal(seed_tensor(["moments"], DEVICE), 1_000_000)
    assert abs(sample.mean().item()) < 0.005
    assert abs(sample.std().item() - 1) < 0.005
    assert sample.isfinite().all()


@given(seed=WORD, n=st.integers(min_value=1, max_value=200))
def test_unit_normal_has_length_one(seed: int, n: int) -> None:
    length = sampling.unit_normal(torch.tensor([seed]), n).norm().item()
    assert length == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("entry", ANSWERS["seed_from_string"], ids=label)
def test_seed_of_a_text(entry: dict[str, Any]) -> None:
    assert sampling.seed(entry["string"]) == entry["seed"]


def test_texts_are_spelled_as_the_protocol_says() -> None:
    inputs, pick = f"{BLOCK_HASH}_{PUBLIC_KEY}_nonce0", f"{BLOCK_HASH}_{PUBLIC_KEY}_nonce_0_pick_12"
    assert sampling.input_seeds(BLOCK_HASH, PUBLIC_KEY, 0, strong_rng=False) == (TEXTS[inputs],)
    assert sampling.nonce_seeds(BLOCK_HASH, PUBLIC_KEY, 0, ["pick_12"]) == [TEXTS[pick]]


@pytest.mark.parametrize("entry", ANSWERS["generate_inputs_concat_murmur"], ids=label)
def test_strong_seeds_are_the_whole_digest(entry: dict[str, Any]) -> None:
    words = [
        sampling.input_seeds(BLOCK_HASH, PUBLIC_KEY, entry["nonce"], strong_rng=strong) for strong in (True, False)
    ]
    assert words == [tuple(entry["sub_seeds"]), tuple(entry["sub_seeds"][:1])]


def test_seed_tensors_hold_words_above_int31() -> None:
    tensor = sampling.seed_tensor(TEXTS, torch.device("cpu"))
    assert tensor.tolist() == list(TEXTS.values())
    assert tensor.max() > 2**31
