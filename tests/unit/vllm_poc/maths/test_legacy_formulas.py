# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from tests.support.builders.known_answers import ANSWERS, BLOCK_HASH, PUBLIC_KEY, UNIT_ABS, label

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")
pytest.importorskip("numpy", reason="numpy is not installed: run in the worker environment")

from tests.support.builders import legacy_formulas as legacy  # noqa: E402
from tests.support.builders.tensors import assert_close, known_hidden  # noqa: E402
from vllm_poc.maths.sampling import normalise  # noqa: E402

pytestmark = pytest.mark.torch

PICKS = {(entry["nonce"], entry["dim"], entry["k"]): entry for entry in ANSWERS["pick_indices"]}


@pytest.mark.parametrize("entry", ANSWERS["permutations"], ids=label)
def test_permutation(entry: dict[str, Any]) -> None:
    got = legacy.permutation(BLOCK_HASH, PUBLIC_KEY, entry["nonce"], entry["vocab"])
    assert got.tolist() == entry["values"]


@pytest.mark.parametrize("entry", ANSWERS["haar_qr"], ids=label)
def test_haar_matrix(entry: dict[str, Any]) -> None:
    q = legacy.haar_matrix(BLOCK_HASH, PUBLIC_KEY, entry["nonce"], entry["k"])
    assert_close(q[0], entry["Q_row0"], UNIT_ABS)
    assert_close(q @ torch.tensor(ANSWERS["haar_input_x"]["values"]), entry["Qx"], UNIT_ABS)


@pytest.mark.parametrize("entry", ANSWERS["distance_kdim_qr"], ids=label)
def test_k_dim_distance(entry: dict[str, Any]) -> None:
    indices = PICKS[entry["nonce"], entry["hidden"], entry["k"]][entry["order"]]
    picked = normalise(known_hidden(entry["hidden"]))[0, indices]
    got = legacy.k_dim_distance(picked, BLOCK_HASH, PUBLIC_KEY, entry["nonce"])
    assert got == pytest.approx(entry["distance"], abs=UNIT_ABS)


def test_first_generation_entropy() -> None:
    expected = ANSWERS["legacy_pow_v1"]["entropy_first4"]
    assert legacy.entropy(f"{BLOCK_HASH}_{PUBLIC_KEY}_nonce0")[:4].tolist() == expected


@pytest.mark.parametrize("nonce", [0, 1, 2])
def test_first_generation_inputs(nonce: int) -> None:
    expected = ANSWERS["legacy_pow_v1"]["input_first8_seq4_dim8"][nonce]
    got = legacy.first_inputs(BLOCK_HASH, PUBLIC_KEY, nonce, 4 * 8)[:8]
    assert got == pytest.approx(expected, abs=UNIT_ABS)
