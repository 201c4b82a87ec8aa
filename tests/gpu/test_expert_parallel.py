# SPDX-License-Identifier: Apache-2.0
"""Whole experts on each of two ranks, also where vLLM moves them as chat needs them: the same results as elsewhere."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import FLAGS
from tests.vllm.device import ARTIFACT_TOLERANCE, DISTANCE_TOLERANCE, LAYOUTS, WHY_NOT_PARALLEL
from tests.vllm.server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.client import Client
    from tests.vllm.reference import Reference

torch = pytest.importorskip("torch", reason="needs the worker environment")
pytestmark = pytest.mark.skipif(WHY_NOT_PARALLEL is not None, reason=str(WHY_NOT_PARALLEL))

_log = logging.getLogger(__name__)

NONCES, SEQ_LENS = list(range(6)), (17, 64)
EXPERTS = [*LAYOUTS["tp"], "--enable-expert-parallel"]
#: Each of chat's steps counts, and experts move after so many.
STEPS = 48
BALANCER = {"window_size": STEPS, "step_interval": STEPS, "num_redundant_experts": 2}
CHATS, TOKENS = 40, 16


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Path:
    return model_folder / "qwen3-moe-tiny"


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    from tests.vllm.reference import Reference  # noqa: PLC0415 - needs transformers

    return Reference(model)


@pytest.fixture(scope="module")
def fixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server whose experts stay where they are."""
    with serving(model, tmp_path_factory.mktemp("fixed") / "server.log", [*EXPERTS, *FLAGS]) as client:
        yield client


@pytest.fixture(scope="module")
def balanced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server that moves its experts."""
    flags = [*EXPERTS, "--enable-eplb", "--eplb-config", json.dumps(BALANCER), *FLAGS]
    with serving(model, tmp_path_factory.mktemp("balanced") / "server.log", flags) as client:
        yield client


def require_right(client: Client, reference: Reference) -> None:
    """Fail if results are not the model's."""
    for seq_len in SEQ_LENS:
        inputs = reference.inputs(NONCES, seq_len)
        found = torch.tensor(client.artifacts(NONCES, seq_len=seq_len))
        torch.testing.assert_close(found, reference.artifacts(inputs, NONCES), atol=ARTIFACT_TOLERANCE, rtol=0)
        distances = torch.tensor(client.distances(NONCES, seq_len=seq_len))
        expected = reference.distances(reference.inputs(NONCES, seq_len), NONCES)
        torch.testing.assert_close(distances, expected, atol=DISTANCE_TOLERANCE, rtol=0)


def require_allowed(client: Client) -> None:
    facts = client.workers("poc_describe")[0]
    _log.info("%s", facts["findings"])
    assert facts["refusal"] is None


def test_results_are_the_models(fixed: Client, reference: Reference) -> None:
    require_allowed(fixed)
    require_right(fixed, reference)


def test_pocs_tokens_are_not_counted(balanced: Client) -> None:
    require_allowed(balanced)
    before = balanced.workers("poc_test_expert_counts")
    balanced.chat("one", tokens=2)
    counted = balanced.workers("poc_test_expert_counts")
    assert all(sum(after) > sum(earlier) for earlier, after in zip(before, counted, strict=True)), "chat's are"
    balanced.artifacts(NONCES)
    balanced.distances(NONCES)
    assert balanced.workers("poc_test_expert_counts") == counted
    balanced.chat("one", tokens=2)
    assert all(
        sum(after) > sum(earlier)
        for earlier, after in zip(counted, balanced.workers("poc_test_expert_counts"), strict=True)
    ), "chat's still are"


def test_results_are_the_same_when_experts_have_moved(balanced: Client, reference: Reference) -> None:
    before = balanced.workers("poc_test_expert_places")
    moved = 0
    for number in range(CHATS):
        require_right(balanced, reference)
        balanced.chat(f"{number} and more", tokens=TOKENS)
        moved += balanced.workers("poc_test_expert_places") != before
        if moved > 2:
            return
    raise AssertionError("experts must move")
