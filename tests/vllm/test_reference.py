# SPDX-License-Identifier: Apache-2.0
"""What the server computes on scratch memory equals a plain forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.device import ARTIFACT_TOLERANCE, DISTANCE_TOLERANCE

if TYPE_CHECKING:
    from tests.vllm.client import Client
    from tests.vllm.reference import Reference

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

NONCES = [0, 1, 5, 2**31 - 1]


@pytest.fixture(params=["qwen3", "llama"])
def both(request: pytest.FixtureRequest) -> tuple[Client, Reference]:
    return request.getfixturevalue(request.param), request.getfixturevalue(f"{request.param}_reference")


@pytest.mark.parametrize("seq_len", [1, 17, 64, 128, 130])
def test_artifacts_equal_a_plain_forward(both: tuple[Client, Reference], seq_len: int) -> None:
    client, reference = both
    expected = reference.artifacts(reference.inputs(NONCES, seq_len), NONCES)
    found = torch.tensor(client.artifacts(NONCES, seq_len=seq_len))
    torch.testing.assert_close(found, expected, atol=ARTIFACT_TOLERANCE, rtol=0)


def test_strong_seeds_reach_the_model(both: tuple[Client, Reference]) -> None:
    client, reference = both
    expected = reference.artifacts(reference.inputs(NONCES, 64, strong_rng=True), NONCES)
    found = torch.tensor(client.artifacts(NONCES, poc_stronger_rng=True))
    torch.testing.assert_close(found, expected, atol=ARTIFACT_TOLERANCE, rtol=0)


def test_distances_equal_a_plain_forward(both: tuple[Client, Reference]) -> None:
    client, reference = both
    expected = reference.distances(reference.inputs(NONCES, 64), NONCES)
    found = torch.tensor(client.distances(NONCES))
    torch.testing.assert_close(found, expected, atol=DISTANCE_TOLERANCE, rtol=0)


def test_attention_shows_in_the_results(both: tuple[Client, Reference]) -> None:
    """Without this the comparison above could not tell right attention from wrong."""
    _, reference = both
    inputs = reference.inputs(NONCES, 64)
    changed = inputs.flip(1).contiguous()
    changed[:, -1] = inputs[:, -1]
    moved = reference.artifacts(changed, NONCES) - reference.artifacts(inputs, NONCES)
    assert moved.abs().amax(dim=1).min() > 0.08 >= 2 * ARTIFACT_TOLERANCE
