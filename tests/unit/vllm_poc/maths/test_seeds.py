# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from tests.support.known_answers import ANSWERS, BLOCK_HASH, PUBLIC_KEY, label

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from vllm_poc.maths import seeds  # noqa: E402

pytestmark = pytest.mark.torch

TEXTS = {entry["string"]: entry["seed"] for entry in ANSWERS["seed_from_string"]}


@pytest.mark.parametrize("entry", ANSWERS["seed_from_string"], ids=label)
def test_seed_of_a_text(entry: dict[str, Any]) -> None:
    assert seeds.seed(entry["string"]) == entry["seed"]


def test_texts_are_spelled_as_the_protocol_says() -> None:
    assert seeds.input_text(BLOCK_HASH, PUBLIC_KEY, 0) in TEXTS
    assert seeds.nonce_text(BLOCK_HASH, PUBLIC_KEY, 0, "pick_12") in TEXTS


@pytest.mark.parametrize("entry", ANSWERS["generate_inputs_concat_murmur"], ids=label)
def test_strong_seeds_are_the_whole_digest(entry: dict[str, Any]) -> None:
    text = seeds.input_text(BLOCK_HASH, PUBLIC_KEY, entry["nonce"])
    assert list(seeds.strong_seeds(text)) == entry["sub_seeds"]
    assert seeds.strong_seeds(text)[0] == seeds.seed(text)


def test_seed_tensors_hold_words_above_int31() -> None:
    tensor = seeds.seed_tensor(TEXTS, torch.device("cpu"))
    assert tensor.tolist() == list(TEXTS.values())
    assert tensor.max() > 2**31
