# SPDX-License-Identifier: Apache-2.0
"""A model whose forward pass has no argument for embeddings, and how a server comes to know it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch import Tensor
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.sequence import IntermediateTensors

from vllm import ModelRegistry

NAME = "TokensOnlyQwen3"
_ENTRY_POINT = f"[vllm.general_plugins]\n{NAME} = {__name__}:register\n"


class TokensOnlyQwen3(Qwen3ForCausalLM):  # type: ignore[misc]  # vLLM is untyped here
    """Qwen3 that reads token ids and nothing else; vLLM's runner passes the rest by keyword."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        **_: object,
    ) -> Tensor | IntermediateTensors:
        """Return the last hidden states of the tokens."""
        return super().forward(input_ids, positions, intermediate_tensors)


def register() -> None:
    """Make the model known; vLLM calls it in all of its processes."""
    ModelRegistry.register_model(NAME, f"{__name__}:{NAME}")


def write_plugin(folder: Path) -> None:
    """Write what makes vLLM find `register` where ``folder`` is on the Python path."""
    metadata = folder / "tokens_only-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tokens-only\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINT)


def copy_model(qwen3: Path, folder: Path) -> None:
    """Write a copy of the model in ``qwen3`` that names the class above."""
    shutil.copytree(qwen3, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [NAME]}))
