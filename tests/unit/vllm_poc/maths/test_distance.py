# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from tests.support.builders.known_answers import ANSWERS, BLOCK_HASH, UNIT_ABS, label

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from torch import Tensor  # noqa: E402

from tests.support.builders.tensors import DEVICE, assert_close, known_hidden, seed_rows  # noqa: E402
from vllm_poc.maths import distance  # noqa: E402
from vllm_poc.maths.sampling import (  # noqa: E402
    normal,
    seed_tensor,
    unit_normal,
)

pytestmark = pytest.mark.torch

HEAD = ANSWERS["random_lm_head"]


def seeds(*nonces: int, sign_flips: bool = True) -> Tensor:
    return seed_rows(nonces, distance.distance_purposes(sign_flips=sign_flips))


def distances(last_hidden: Tensor, *nonces: int, sign_flips: bool = True) -> Tensor:
    head = distance.random_head(BLOCK_HASH, last_hidden.shape[1], DEVICE)
    transform = distance.Transform.of(seeds(*nonces, sign_flips=sign_flips), hidden=last_hidden.shape[1])
    return distance.distances(last_hidden, transform, head, distance.round_target(BLOCK_HASH, DEVICE))


@pytest.mark.parametrize(
    "entry", ANSWERS["target_by_block_hash_only"] + ANSWERS["target_by_block_hash_and_key"], ids=label
)
def test_target_vectors(entry: dict[str, Any]) -> None:
    got = unit_normal(seed_tensor([entry["string"]], DEVICE), entry["dim"])[0, : entry["first"]]
    assert_close(got, entry["values"], UNIT_ABS)


def test_the_round_target_is_seeded_by_the_block_hash_alone() -> None:
    entry = next(e for e in ANSWERS["target_by_block_hash_only"] if e["dim"] == distance.OUTPUT_DIM)
    assert_close(distance.round_target(BLOCK_HASH, DEVICE)[: entry["first"]], entry["values"], UNIT_ABS)


@pytest.mark.parametrize("entry", ANSWERS["sign_flips"], ids=label)
def test_signs(entry: dict[str, Any]) -> None:
    assert distance.signs(seeds(entry["nonce"])[:, 8], entry["dim"]).tolist() == [entry["values"]]


@pytest.mark.parametrize("entry", ANSWERS["nonce_householder_vectors"], ids=label)
def test_nonce_reflections(entry: dict[str, Any]) -> None:
    got = unit_normal(seeds(entry["nonce"])[:, :8], entry["dim"])[0, entry["r"]]
    assert_close(got, entry["values"], UNIT_ABS)


def test_random_head() -> None:
    head = distance.random_head(BLOCK_HASH, HEAD["hidden"], DEVICE)
    assert head.shape == (HEAD["out_dim"], HEAD["hidden"])
    assert_close(head[0], HEAD["row0"], UNIT_ABS)
    assert_close(head[8191], HEAD["row8191"], UNIT_ABS)
    raw = normal(seed_tensor([HEAD["string"]], DEVICE), HEAD["out_dim"] * HEAD["hidden"])
    assert_close(head.flatten(), (raw[0] * HEAD["scale"]).tolist(), UNIT_ABS)


@pytest.mark.parametrize("entry", ANSWERS["distance_phase34"], ids=label)
def test_distance(entry: dict[str, Any]) -> None:
    flips = entry["sign_flips"]
    hidden = known_hidden(entry["hidden"])
    transform = distance.Transform.of(seeds(entry["nonce"], sign_flips=flips), hidden=entry["hidden"])
    reflected = distance.transform_hidden(hidden, transform)
    assert_close(reflected, [entry["reflected"]], UNIT_ABS)
    assert_close(distances(hidden, entry["nonce"], sign_flips=flips), [entry["distance"]], UNIT_ABS)


def test_a_batch_is_its_nonces_one_by_one_and_bad_rows_give_nan() -> None:
    rows = torch.stack([known_hidden(8)[0], torch.zeros(8), torch.full((8,), torch.inf), known_hidden(8)[0]])
    got = distances(rows, 0, 1, 2, 1)
    known = {e["nonce"]: e["distance"] for e in ANSWERS["distance_phase34"] if e["sign_flips"]}
    assert_close(got[[0, 3]], [known[0], known[1]], UNIT_ABS)
    assert got.isnan().tolist() == [False, True, True, False]
