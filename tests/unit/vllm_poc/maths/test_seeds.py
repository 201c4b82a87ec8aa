# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from tests.support.builders.known_answers import ANSWERS, BLOCK_HASH, PUBLIC_KEY, label

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from vllm_poc.maths import seeds  # noqa: E402

pytestmark = pytest.mark.torch

TEXTS = {entry["string"]: entry["seed"] for entry in ANSWERS["seed_from_string"]}


@pytest.mark.parametrize("entry", ANSWERS["seed_from_string"], ids=label)
def test_seed_of_a_text(entry: dict[str, Any]) -> None:
    assert seeds.seed(entry["string"]) == entry["seed"]


def test_texts_are_spelled_as_the_protocol_says() -> None:
    inputs, pick = f"{BLOCK_HASH}_{PUBLIC_KEY}_nonce0", f"{BLOCK_HASH}_{PUBLIC_KEY}_nonce_0_pick_12"
    assert seeds.input_seeds(BLOCK_HASH, PUBLIC_KEY, 0, strong_rng=False) == (TEXTS[inputs],)
    assert seeds.nonce_seeds(BLOCK_HASH, PUBLIC_KEY, 0, ["pick_12"]) == [TEXTS[pick]]


@pytest.mark.parametrize("entry", ANSWERS["generate_inputs_concat_murmur"], ids=label)
def test_strong_seeds_are_the_whole_digest(entry: dict[str, Any]) -> None:
    words = [seeds.input_seeds(BLOCK_HASH, PUBLIC_KEY, entry["nonce"], strong_rng=strong) for strong in (True, False)]
    assert words == [tuple(entry["sub_seeds"]), tuple(entry["sub_seeds"][:1])]


def test_seed_tensors_hold_words_above_int31() -> None:
    tensor = seeds.seed_tensor(TEXTS, torch.device("cpu"))
    assert tensor.tolist() == list(TEXTS.values())
    assert tensor.max() > 2**31
