# SPDX-License-Identifier: Apache-2.0
"""A model without an argument for embeddings gets them in place of its own."""

import os
from pathlib import Path

import pytest

from tests.vllm.client import Client
from tests.vllm.device import ARTIFACT_TOLERANCE, DISTANCE_TOLERANCE
from tests.vllm.server import serving

NONCES = [0, 1, 5, 2**31 - 1]
PROMPT = "What is a license?"


@pytest.mark.long
def test_a_model_without_an_argument_for_embeddings_computes_the_same(
    qwen3: Client, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.vllm.reference import Reference  # noqa: PLC0415 - needs transformers
    from tests.vllm.tokens_only import copy_model, write_plugin  # noqa: PLC0415 - needs vLLM

    copy_model(model_folder / "qwen3-tiny", tmp_path / "model")
    write_plugin(tmp_path / "plugin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "plugin"), prepend=os.pathsep)
    reference = Reference(model_folder / "qwen3-tiny")
    inputs = reference.inputs(NONCES, 64)
    with serving(tmp_path / "model", tmp_path / "server.log", ["--enforce-eager", "--enable-poc"]) as client:
        before = client.chat(PROMPT)
        for found, expected in zip(client.artifacts(NONCES), reference.artifacts(inputs, NONCES).tolist(), strict=True):
            assert found == pytest.approx(expected, abs=ARTIFACT_TOLERANCE)
        expected = reference.distances(inputs, NONCES).tolist()
        assert client.distances(NONCES) == pytest.approx(expected, abs=DISTANCE_TOLERANCE)
        assert client.chat(PROMPT) == before == qwen3.chat(PROMPT), "chat must get its own embeddings back"
