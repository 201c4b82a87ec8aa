# SPDX-License-Identifier: Apache-2.0
"""What the server computes on scratch memory equals a plain forward pass."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import pytest

from tests.vllm.device import ARTIFACT_TOLERANCE, DISTANCE_TOLERANCE
from tests.vllm.families import CHANGES, FAMILIES

if TYPE_CHECKING:
    from tests.vllm.families import Family

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

NONCES = [0, 1, 5, 2**31 - 1]


@pytest.mark.parametrize("seq_len", [1, 17, 64, 128, 130])
def test_artifacts_equal_a_plain_forward(family: Family, seq_len: int) -> None:
    _, client, reference = family
    expected = reference.artifacts(reference.inputs(NONCES, seq_len), NONCES)
    found = torch.tensor(client.artifacts(NONCES, seq_len=seq_len))
    torch.testing.assert_close(found, expected, atol=ARTIFACT_TOLERANCE, rtol=0)


def test_strong_seeds_reach_the_model(family: Family) -> None:
    _, client, reference = family
    expected = reference.artifacts(reference.inputs(NONCES, 64, strong_rng=True), NONCES)
    found = torch.tensor(client.artifacts(NONCES, poc_stronger_rng=True))
    torch.testing.assert_close(found, expected, atol=ARTIFACT_TOLERANCE, rtol=0)


def test_distances_equal_a_plain_forward(family: Family) -> None:
    _, client, reference = family
    expected = reference.distances(reference.inputs(NONCES, 64), NONCES)
    found = torch.tensor(client.distances(NONCES))
    torch.testing.assert_close(found, expected, atol=DISTANCE_TOLERANCE, rtol=0)


def test_attention_shows_in_the_results(family: Family) -> None:
    """Without this the comparison above could not tell right attention from wrong."""
    reference = family.reference
    inputs = reference.inputs(NONCES, 64)
    changed = inputs.flip(1).contiguous()
    changed[:, -1] = inputs[:, -1]
    moved = reference.artifacts(changed, NONCES) - reference.artifacts(inputs, NONCES)
    assert moved.abs().amax(dim=1).mean() > 0.08 >= 2 * ARTIFACT_TOLERANCE


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in CHANGES], indirect=True)
def test_what_sets_a_family_apart_shows_in_the_results(family: Family) -> None:
    inputs = family.reference.inputs(NONCES, 64)
    changed = deepcopy(family.reference)
    CHANGES[family.name](changed)
    moved = changed.artifacts(inputs, NONCES) - family.reference.artifacts(inputs, NONCES)
    assert moved.abs().amax(dim=1).min() > 0.08 >= 2 * ARTIFACT_TOLERANCE
