# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.known_answers import ANSWERS, F16_ULP, UNIT_ABS, label

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from torch import Tensor  # noqa: E402

from tests.support.builders.tensors import DEVICE, assert_close, bits, known_hidden, seed_rows, ulp_distance  # noqa: E402
from vllm_poc.maths import artifact  # noqa: E402
from vllm_poc.maths.sampling import (  # noqa: E402
    hashes,
    reflect_chain,
    unit_normal,
)
from vllm_poc.wire.artifacts import decode_vector, encode_vector  # noqa: E402

pytestmark = pytest.mark.torch


def seeds(nonce: int, k_dim: int) -> Tensor:
    return seed_rows([nonce], artifact.artifact_purposes(k_dim))


def vectors(last_hidden: Tensor, nonces: list[int], k_dim: int = 12) -> Tensor:
    rows = seed_rows(nonces, artifact.artifact_purposes(k_dim))
    return artifact.artifact_vectors(last_hidden, artifact.Selection.of(rows, hidden=last_hidden.shape[1]))


@pytest.mark.parametrize("entry", ANSWERS["pick_indices"], ids=label)
def test_pick_in_cuda_order(entry: dict[str, Any]) -> None:
    pick = seeds(entry["nonce"], entry["k"])[:, 0]
    got = artifact.pick_indices(pick, hidden=entry["dim"], k_dim=entry["k"])
    assert got.tolist() == [entry["cuda_topk_order"]]
    assert sorted(got[0].tolist()) == sorted(entry["cpu_topk_order"])


@pytest.mark.parametrize("entry", ANSWERS["pick_indices"], ids=label)
def test_hashes_of_the_pick_ascend_in_hash_order(entry: dict[str, Any]) -> None:
    scores = hashes(seeds(entry["nonce"], entry["k"])[:, 0], entry["dim"])[0]
    assert scores.argsort()[: entry["k"]].tolist() == entry["ascending_hash_order"]


@given(seed=st.integers(min_value=0, max_value=2**32 - 1), data=st.data())
def test_pick_is_the_k_smallest_with_the_largest_of_them_last(seed: int, data: st.DataObject) -> None:
    hidden = data.draw(st.integers(min_value=1, max_value=300))
    k_dim = data.draw(st.integers(min_value=1, max_value=hidden))
    got = artifact.pick_indices(torch.tensor([seed]), hidden=hidden, k_dim=k_dim)[0].tolist()
    scores = hashes(torch.tensor(seed), hidden).tolist()
    by_score = sorted(range(hidden), key=scores.__getitem__)[:k_dim]
    assert got == [*sorted(by_score[:-1]), by_score[-1]]


@pytest.mark.parametrize("k_dim", [0, 9])
def test_pick_beyond_the_hidden_size_is_refused(k_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"k_dim {k_dim} must lie in 1\.\.8"):
        artifact.pick_indices(torch.tensor([1]), hidden=8, k_dim=k_dim)


@pytest.mark.parametrize("entry", ANSWERS["haar_householder_vectors"], ids=label)
def test_rotation_vectors(entry: dict[str, Any]) -> None:
    rotation = unit_normal(seeds(entry["nonce"], entry["k"])[:, 1:], entry["k"])
    assert_close(rotation[0, entry["j"]], entry["values"], UNIT_ABS)


@pytest.mark.parametrize("entry", ANSWERS["haar_householder_chain"], ids=label)
def test_rotation(entry: dict[str, Any]) -> None:
    x = torch.tensor([ANSWERS["haar_input_x"]["values"]])
    rotation = unit_normal(seeds(entry["nonce"], entry["k"])[:, 1:], entry["k"])
    assert_close(reflect_chain(x, rotation), [entry["y"]], UNIT_ABS)


def test_rotation_input_is_its_formula() -> None:
    expected = [(i + 1) / 650**0.5 for i in range(12)]
    assert_close(torch.tensor(ANSWERS["haar_input_x"]["values"]), expected, UNIT_ABS)


def test_hidden_state_is_its_formula() -> None:
    assert known_hidden(16)[0].tolist() == ANSWERS["test_hidden"]["first16"]


@pytest.mark.parametrize("entry", ANSWERS["artifact_from_hidden"], ids=label)
def test_artifact(entry: dict[str, Any]) -> None:
    expected = entry["cuda_topk_order"]
    got = vectors(known_hidden(entry["hidden"]), [entry["nonce"]], entry["k"])
    assert_close(got, [expected["vector_f32"]], UNIT_ABS)
    assert ulp_distance(bits(got.to(torch.float16)), expected["vector_f16_bits"]) <= F16_ULP


def test_encoded_artifacts_equal_the_known_ones() -> None:
    for entry in ANSWERS["artifact_from_hidden"]:
        got = vectors(known_hidden(entry["hidden"]), [entry["nonce"]])[0]
        both = encode_vector(got.tolist()), entry["cuda_topk_order"]["vector_b64"]
        found, expected = (bits(torch.tensor(decode_vector(text, 12), dtype=torch.float16)) for text in both)
        assert ulp_distance(found, expected) <= (0 if DEVICE.type == "cpu" else F16_ULP)


@pytest.mark.parametrize("entry", ANSWERS["artifact_from_hidden"], ids=label)
def test_another_order_of_the_pick_is_another_artifact(entry: dict[str, Any]) -> None:
    other = entry["ascending_hash_order"]
    picked = known_hidden(entry["hidden"])[:, other["indices"]]
    rotated = reflect_chain(picked, unit_normal(seeds(entry["nonce"], entry["k"])[:, 1:], entry["k"]))
    there = rotated / rotated.norm()
    assert_close(there, [other["vector_f32"]], UNIT_ABS)
    here = vectors(known_hidden(entry["hidden"]), [entry["nonce"]], entry["k"])
    assert (there - here).norm().item() == pytest.approx(entry["l2_between_orders"], abs=1e-3)


def test_a_batch_is_its_nonces_one_by_one_and_nan_stays_in_its_row() -> None:
    hidden = known_hidden(64).repeat(3, 1)
    hidden[1, 5] = torch.nan
    got = vectors(hidden, [0, 1, 2])
    torch.testing.assert_close(got[2:], vectors(hidden[2:], [2]), rtol=0, atol=UNIT_ABS)
    assert got.isfinite().all(dim=1).tolist() == [True, False, True]


def test_one_dimension_has_no_rotation() -> None:
    assert vectors(known_hidden(8), [3], k_dim=1).abs().tolist() == [[pytest.approx(1)]]
